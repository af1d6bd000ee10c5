"""The public functions of ``sb3_flow.kernels`` on arrays, with plain twins in float64."""

from typing import Any

import numpy as np

from sb3_flow import kernels
from sb3_flow.kernels.rewards import FLAT_RANGE
from tests import kernel_references as plain
from tests.attack.engine import Entry

SIZES = (1, 1, 2, 3, 7, 8, 9, 17, 33, 130)
Arguments = dict[str, Any]


def _dtype(rng: np.random.Generator) -> Any:
    return (np.float32, np.float64)[rng.integers(2)]


def _some(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def _factor(rng: np.random.Generator) -> float:
    return float((0.0, 1.0, 0.99, rng.random())[rng.integers(4)])


def _sequences(rng: np.random.Generator) -> Arguments:
    n_steps, n_envs, dtype = int(rng.choice(SIZES)), int(rng.choice(SIZES)), _dtype(rng)
    if rng.random() < 0.02:
        n_envs = 3000  # more than a chunk
    arguments = plain.trajectories(rng, n_steps, n_envs, dtype=dtype)
    arguments["final_values"] = np.nan_to_num(arguments["final_values"])
    if rng.random() < 0.3:
        arguments["truncated"] = arguments["final_values"] = None
    if rng.random() < 0.2:
        arguments["values"] = np.concatenate([arguments["values"], arguments.pop("last_values")[None]])
    elif rng.random() < 0.1:
        arguments["terminated"][-1] = True
        arguments["last_values"] = None
    if rng.random() < 0.2 and n_envs == 1:
        arguments = {name: array if array is None else array.reshape(-1) for name, array in arguments.items()}
    return arguments | {"gamma": _factor(rng), "gae_lambda": _factor(rng)}


def _full(rewards, values, last_values=None, terminated=None, truncated=None, final_values=None, **others):  # type: ignore[no-untyped-def]
    """:return: arguments of the plain twins: all arrays given, shape ``(T, N)``"""
    shape = rewards.shape
    if rewards.ndim not in (1, 2) or not rewards.size:
        raise ValueError("no steps")
    if values.shape == (len(rewards) + 1, *shape[1:]):
        if last_values is not None:
            raise ValueError("last values given twice")
        values, last_values = values[:-1], values[-1]
    if (truncated is None) != (final_values is None):
        raise ValueError("only one of both")
    none = np.zeros(shape, bool)
    terminated = none if terminated is None else _flags(terminated)
    truncated = none if truncated is None else _flags(truncated)
    if last_values is None:
        if not (terminated[-1] | truncated[-1]).all():
            raise ValueError("no last values")
        last_values = np.zeros(shape[1:])
    final_values = np.zeros(shape) if final_values is None else final_values
    final_values = np.where(truncated & ~terminated, final_values, 0)
    arrays = {
        "rewards": rewards,
        "values": values,
        "terminated": terminated,
        "truncated": truncated,
        "final_values": final_values,
        **others,
    }
    if any(array.shape != shape for array in arrays.values()):
        raise ValueError("shapes")
    last_values = np.asarray(last_values, float).reshape(shape[1:])
    arrays = {name: array.reshape(len(rewards), -1) for name, array in arrays.items()}
    return {**arrays, "last_values": last_values.reshape(-1)}


def _flags(flags: np.ndarray) -> np.ndarray:
    if not np.isin(flags, (0, 1)).all():
        raise ValueError("no flags")
    return flags.astype(bool)


def _gae(gamma, gae_lambda, **arrays):  # type: ignore[no-untyped-def]
    full = _full(**arrays)
    return tuple(part.reshape(arrays["rewards"].shape) for part in plain.gae(gamma=gamma, gae_lambda=gae_lambda, **full))


def _vtrace_arguments(rng: np.random.Generator) -> Arguments:
    arguments = _sequences(rng)
    rewards, c_bar = arguments["rewards"], float(0.1 + 2 * rng.random())
    caps = {"c_bar": c_bar, "rho_bar": c_bar + float(rng.random()), "rho_pg_bar": float(0.1 + 2 * rng.random())}
    return {"log_rhos": _some(rng, rewards.shape, rewards.dtype), **arguments, **caps}


def _vtrace(gamma, gae_lambda, rho_bar, c_bar, rho_pg_bar, **arrays):  # type: ignore[no-untyped-def]
    full = _full(**arrays)
    full["last_values"] = np.where(full["terminated"][-1] | full["truncated"][-1], 0, full["last_values"])
    caps = {"rho_bar": rho_bar, "c_bar": c_bar, "rho_pg_bar": rho_pg_bar}
    result = plain.vtrace(gamma=gamma, gae_lambda=gae_lambda, **caps, **full)
    return tuple(part.reshape(arrays["rewards"].shape) for part in result)


def _sb3_arguments(rng: np.random.Generator) -> Arguments:
    shape, dtype = (int(rng.choice(SIZES)), int(rng.choice(SIZES))), _dtype(rng)
    arrays = {"rewards": _some(rng, shape, dtype), "values": _some(rng, shape, dtype)}
    arrays["episode_starts"] = (rng.random(shape) < 0.2).astype(dtype)
    arrays["last_values"] = _some(rng, shape[1], dtype)
    arrays["dones"] = rng.random(shape[1]) < 0.5
    return {**arrays, "gamma": _factor(rng), "gae_lambda": _factor(rng)}


def _sb3(rewards, values, episode_starts, last_values, dones, gamma, gae_lambda):  # type: ignore[no-untyped-def]
    n_envs = rewards.shape[1]
    if values.shape != rewards.shape or episode_starts.shape != rewards.shape:
        raise ValueError("shapes")
    if last_values.shape != (n_envs,) or np.shape(dones) != (n_envs,):
        raise ValueError("shapes")
    advantages, following = np.zeros(rewards.shape), 0.0
    for t in reversed(range(len(rewards))):
        last = t == len(rewards) - 1
        alive = 1.0 - (np.asarray(dones) if last else episode_starts[t + 1])
        delta = rewards[t] + gamma * (last_values if last else values[t + 1]) * alive - values[t]
        following = advantages[t] = delta + gamma * gae_lambda * alive * following
    return advantages, advantages + values


def _batch_arguments(rng: np.random.Generator) -> Arguments:
    n, dtype, longer = int(rng.integers(0, 5)), _dtype(rng), int(rng.integers(2))
    lengths = rng.choice(SIZES, n)
    arguments: Arguments = {
        "rewards": [_some(rng, size, dtype) for size in lengths],
        "values": [_some(rng, size + longer, dtype) for size in lengths],
        "gamma": _factor(rng),
        "gae_lambda": _factor(rng),
        "terminated": rng.random(n) < 0.5,
    }
    if not longer:
        arguments["last_values"] = _some(rng, n, dtype)
    return arguments


def _batch(rewards, values, gamma, gae_lambda, last_values=None, terminated=None):  # type: ignore[no-untyped-def]
    results: list[Any] = [[], []]
    if any(given is not None and len(given) != len(rewards) for given in (values, last_values, terminated)):
        raise ValueError("numbers")
    for i, (r, v) in enumerate(zip(rewards, values, strict=True)):
        ends = np.zeros(len(r), bool)
        ends[-1] = False if terminated is None else _flags(np.asarray(terminated))[i]
        last = None if last_values is None else np.asarray(last_values, float)[i]
        if last is not None and np.ndim(last):
            raise ValueError("shapes")
        found = _gae(gamma, gae_lambda, rewards=r, values=v, last_values=last, terminated=ends)
        for result, part in zip(results, found, strict=True):
            result.append(part)
    return results


def _group_options(rng: np.random.Generator, **more: Any) -> Arguments:
    options: Arguments = {"ddof": int(rng.integers(2)), **more}
    return {
        "baseline": ("loo", "mean", "median", "min")[rng.integers(4)],
        "scale": ("group", "batch", "none")[rng.integers(3)],
        **options,
    }


def _group_arguments(rng: np.random.Generator) -> Arguments:
    n_groups, size = int(rng.integers(0, 9)), int(rng.integers(2, 9))
    rewards = _some(rng, (n_groups, size), _dtype(rng))
    options = _group_options(rng, eps=float((0.0, 1e-8, 1e-4)[rng.integers(3)]))
    if rng.random() < 0.5:
        return {"rewards": rewards.reshape(-1), "group_size": size, **options}
    return {"rewards": rewards, **options}


def _group(rewards, group_size=None, baseline="mean", scale="group", ddof=0, eps=1e-8):  # type: ignore[no-untyped-def]
    rewards = np.asarray(rewards, float)
    size = rewards.shape[-1] if group_size is None else int(group_size)
    if size != (size if group_size is None else group_size) or size < 2 or rewards.ndim not in (1, 2):
        raise ValueError("size")
    if rewards.ndim == 2 and rewards.shape[1] != size:
        raise ValueError("columns")
    groups = rewards.reshape(-1, size)
    out = np.zeros_like(groups)
    for k, group in enumerate(groups):
        spread = group.std(ddof=ddof)
        if np.ptp(group) == 0 or (scale == "group" and spread <= 1e-6 * np.abs(group).max()):
            continue
        out[k] = [x - plain.baseline_of(group, i, baseline) for i, x in enumerate(group)]
        out[k] /= spread + eps if scale == "group" else 1.0
    if scale == "batch" and rewards.size:
        spread = rewards.std(ddof=ddof)
        out = out / (spread + eps) if spread > 1e-6 * np.abs(rewards).max() else 0 * out
    return out.reshape(rewards.shape)


def _steps_arguments(rng: np.random.Generator) -> Arguments:
    shape = tuple(int(size) for size in rng.choice(SIZES[:8], rng.integers(1, 4)))
    return {"rewards": _some(rng, shape, _dtype(rng)), "alive": rng.random(shape) < 0.7, "gamma": _factor(rng)}


def _steps(rewards, alive, gamma):  # type: ignore[no-untyped-def]
    alive = np.ones(rewards.shape, bool) if alive is None else _flags(alive)
    if alive.shape != rewards.shape or not rewards.size:
        raise ValueError("shapes")
    return plain.returns_to_go(np.where(alive, rewards, 0), alive, gamma)


def _members(rng: np.random.Generator) -> Arguments:
    shape = int(rng.choice(SIZES[:8])), int(rng.integers(1, 5)), int(rng.integers(2, 6))
    ends = rng.integers(0, shape[0] + 1, shape[1:])
    alive = np.arange(shape[0])[:, None, None] < ends if rng.random() < 0.8 else None
    return {"rewards": _some(rng, shape, _dtype(rng)), "alive": alive}


def _to_go_arguments(rng: np.random.Generator) -> Arguments:
    arguments = _members(rng)
    rewards = arguments["rewards"]
    if rng.random() < 0.5:
        arguments["values"] = _some(rng, rewards.shape, rewards.dtype)
    few = ("pooled", "zero")[rng.integers(2)]
    return {**arguments, "gamma": 0.5 + 0.5 * _factor(rng), **_group_options(rng), "few_peers": few}


def _alive(rewards: np.ndarray, alive: np.ndarray | None) -> np.ndarray:
    alive = np.ones(rewards.shape, bool) if alive is None else _flags(alive)
    if alive.shape != rewards.shape or rewards.ndim != 3 or rewards.shape[2] < 2 or not rewards.size:
        raise ValueError("shapes")
    if (alive[1:] & ~alive[:-1]).any():
        raise ValueError("back to life")
    return alive


def _to_go(rewards, alive, values=None, **options):  # type: ignore[no-untyped-def]
    alive = _alive(rewards, alive)
    if values is not None and values.shape != rewards.shape:
        raise ValueError("shapes")
    if not alive.any():
        return np.zeros(rewards.shape), np.zeros(rewards.shape)
    values = None if values is None else np.where(alive, values, 0)
    if alive.sum() == 1 and options["scale"] == "batch":
        options["ddof"] = 0
    return plain.group_returns_to_go(np.where(alive, rewards, 0), alive, values=values, **options)


def _process_arguments(rng: np.random.Generator) -> Arguments:
    return {**_members(rng), "ddof": int(rng.integers(2))}


def _process(rewards, alive, ddof):  # type: ignore[no-untyped-def]
    alive = _alive(rewards, alive)
    out = np.zeros(rewards.shape)
    for k in range(rewards.shape[1]):
        r = rewards[:, k][alive[:, k]]
        if len(r) > 1 and r.std(ddof=ddof) > 1e-6 * np.abs(r).max():
            normalised = np.where(alive[:, k], (rewards[:, k] - r.mean()) / (r.std(ddof=ddof) + 1e-8), 0.0)
            out[:, k] = np.cumsum(normalised[::-1], axis=0)[::-1]
    return np.where(alive, out, 0.0)


def _rewards(rng: np.random.Generator, ndim: int = 1, smallest: int = 0) -> np.ndarray:
    sizes = (max(0, smallest), *SIZES)
    return _some(rng, tuple(int(size) for size in rng.choice(sizes[: 11 if ndim == 1 else 7], ndim)), _dtype(rng))


def _same(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError("shapes")
    return arrays


def _normal(rewards, running_mean, running_var, count, epsilon):  # type: ignore[no-untyped-def]
    rewards = np.asarray(rewards, float)
    if not rewards.size:
        return rewards, running_mean, running_var, count
    total = count + len(rewards)
    mean = (running_mean * count + rewards.sum()) / total
    squares = (running_var + (running_mean - mean) ** 2) * count + np.square(rewards - mean).sum()
    variance = squares / total if total > 1 else 0.0
    return (rewards - mean) / np.sqrt(variance + epsilon), mean, variance, total


def _statistics(rewards):  # type: ignore[no-untyped-def]
    r = np.asarray(rewards, float)
    return r.mean(), r.std(), r.min(), r.max(), np.median(r), r.size


def _average(x, alpha):  # type: ignore[no-untyped-def]
    out = np.array(x, float)
    for i in range(1, len(out)):
        out[i] = alpha * x[i] + (1 - alpha) * out[i - 1]
    return out


def _scaled(rewards, target_min, target_max):  # type: ignore[no-untyped-def]
    r = np.asarray(rewards, float)
    if not r.size or np.ptp(r) < FLAT_RANGE:
        return np.full_like(r, 0.5 * (target_min + target_max))
    return target_min + (r - r.min()) / np.ptp(r) * (target_max - target_min)


def _clipped(ratios, advantages, low, high):  # type: ignore[no-untyped-def]
    w, a = _same(np.asarray(ratios, float), np.asarray(advantages, float))
    return np.minimum(w * a, np.clip(w, low, high) * a)


def _gspo(new_log_probs, old_log_probs, lengths):  # type: ignore[no-untyped-def]
    new, old, lengths = _same(*(np.asarray(x, float) for x in (new_log_probs, old_log_probs, lengths)))
    if (lengths < 1).any():
        raise ValueError("lengths")
    return np.exp(np.minimum((new - old) / lengths, 20.0))


def _gspo_arguments(rng: np.random.Generator) -> Arguments:
    new = _rewards(rng)
    return {"new_log_probs": new, "old_log_probs": _some(rng, new.shape, new.dtype), "lengths": rng.integers(1, 99, new.shape)}


def _pair(rng: np.random.Generator, **settings: float) -> Arguments:
    ratios = np.exp(_rewards(rng))
    return {"ratios": ratios, "advantages": _some(rng, ratios.shape, ratios.dtype), **settings}


def _shape_arguments(rng: np.random.Generator) -> Arguments:
    rewards = _rewards(rng, int(rng.integers(1, 3)))
    others = {name: _some(rng, rewards.shape, rewards.dtype) for name in ("potentials", "next_potentials")}
    return {"rewards": rewards, **others, "gamma": _factor(rng), "terminated": rng.random(rewards.shape) < 0.2}


def _shaped(rewards, potentials, next_potentials, gamma, terminated):  # type: ignore[no-untyped-def]
    r, before, after = _same(*(np.asarray(x, float) for x in (rewards, potentials, next_potentials)))
    ends = np.zeros(r.shape, bool) if terminated is None else _flags(terminated)
    _same(r, ends)
    return r + gamma * np.where(ends, 0, after) - before


def _normal_arguments(rng: np.random.Generator) -> Arguments:
    running = {"running_mean": float(rng.normal()), "running_var": float(rng.random()), "count": int(rng.integers(0, 9))}
    return {"rewards": _rewards(rng), **running, "epsilon": 1e-4}


ENTRIES = [
    Entry("compute_gae", kernels.compute_gae, _sequences, _gae),
    Entry("compute_lambda_returns", kernels.compute_lambda_returns, _sequences, lambda **given: _gae(**given)[1]),
    Entry("compute_gae_sb3", kernels.compute_gae_sb3, _sb3_arguments, _sb3),
    Entry("batch_compute_gae", kernels.batch_compute_gae, _batch_arguments, _batch),
    Entry("compute_vtrace", kernels.compute_vtrace, _vtrace_arguments, _vtrace),
    Entry("compute_group_advantages", kernels.compute_group_advantages, _group_arguments, _group),
    Entry("compute_returns_to_go", kernels.compute_returns_to_go, _steps_arguments, _steps),
    Entry("compute_group_returns_to_go", kernels.compute_group_returns_to_go, _to_go_arguments, _to_go),
    Entry("compute_process_advantages", kernels.compute_process_advantages, _process_arguments, _process),
    Entry("normalize_rewards", kernels.normalize_rewards, _normal_arguments, _normal),
    Entry(
        "clip_rewards",
        kernels.clip_rewards,
        lambda rng: {"rewards": _rewards(rng, int(rng.integers(1, 4))), "minimum": -float(rng.random()), "maximum": 0.5},
        lambda rewards, minimum, maximum: np.clip(np.asarray(rewards, float), minimum, maximum),
    ),
    Entry(
        "compute_reward_statistics",
        kernels.compute_reward_statistics,
        lambda rng: {"rewards": _rewards(rng, int(rng.integers(1, 4)), 1)},
        _statistics,
    ),
    Entry("shape_rewards", kernels.shape_rewards, _shape_arguments, _shaped),
    Entry(
        "exponential_moving_average",
        kernels.exponential_moving_average,
        lambda rng: {"x": _rewards(rng), "alpha": _factor(rng)},
        _average,
    ),
    Entry(
        "auto_scale_rewards",
        kernels.auto_scale_rewards,
        lambda rng: {"rewards": _rewards(rng, int(rng.integers(1, 3))), "target_min": -float(rng.random()), "target_max": 2.0},
        _scaled,
    ),
    Entry("compute_gspo_importance_ratios", kernels.compute_gspo_importance_ratios, _gspo_arguments, _gspo),
    Entry(
        "apply_gspo_clipping",
        kernels.apply_gspo_clipping,
        lambda rng: _pair(rng, left=0.1, right=0.2),
        lambda ratios, advantages, left, right: _clipped(ratios, advantages, 1 - left, 1 + right),
    ),
    Entry(
        "compute_ppo_surrogate",
        kernels.compute_ppo_surrogate,
        lambda rng: _pair(rng, clip_range=0.2),
        lambda ratios, advantages, clip_range: _clipped(ratios, advantages, 1 - clip_range, 1 + clip_range),
    ),
]
