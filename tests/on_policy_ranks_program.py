"""What ``test_on_policy_ranks.py`` runs on two ranks, and on one: ``python tests/on_policy_ranks_program.py RANK FOLDER``."""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch as th
import torch.distributed as dist
from gymnasium import spaces
from ranks_program import refusal, weights
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ProgressBarCallback
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from test_torch_vec_env import N as N_WALKS
from test_torch_vec_env import Walk

from sb3_flow import GRPO, GSPO, PPO, AsyncPPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.common import ranks
from sb3_flow.envs import TorchEnvAdapter
from sb3_flow.on_policy import minibatches, policy_gradient, whole_batch

STEPS, ROLLOUTS = 16, 3
KINDS = DiagGaussianDistribution, CategoricalDistribution, MaskableCategoricalDistribution


class Drift(gym.Env):
    """A point that drifts, and is pushed: an episode ends beyond a limit, earlier or later, or is cut after 12 steps."""

    def __init__(self, discrete: bool = False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = spaces.Discrete(3) if discrete else spaces.Box(-2, 2, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.speed, self.t = *self.np_random.uniform((-1.0, 0.1), (0.5, 0.4)), 0
        return self._see(), {}

    def _see(self) -> np.ndarray:
        return np.array([self.x, 3 * self.speed], dtype=np.float32)

    def step(self, action: Any) -> Any:
        push = float(action) - 1.0 if isinstance(self.action_space, spaces.Discrete) else float(action[0])
        self.x, self.t = self.x + self.speed + 0.05 * push, self.t + 1
        ended = self.x > 1.2
        return self._see(), 1.0 - self.x**2, bool(ended), self.t >= 12 and not ended, {"is_success": bool(self.x > 1.5)}

    def action_masks(self) -> np.ndarray:
        return np.array([True, self.x > -0.5, True])


# a small epsilon would turn rounding errors of gradients near zero into whole steps
SMALL = {"policy_kwargs": {"net_arch": [16, 16], "optimizer_kwargs": {"eps": 1e-2}}, "learning_rate": 0.01, "device": "cpu"}
SMALL |= {"n_steps": STEPS, "n_epochs": 3, "seed": 3, "gamma": 0.9}
LSTM = {"policy_kwargs": {**SMALL["policy_kwargs"], "lstm_hidden_size": 8}}
GROUPS = {"group_by": "none", "n_steps": 12, "n_epochs": 8, "normalize_advantage": True, "ent_coef": 0.01, "n_envs": 2}
# algorithm, policy, and arguments; `n_envs` are each rank's
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ppo": (PPO, "MlpPolicy", {"batch_size": 8, "clip_range_vf": 0.2, "ent_coef": 0.01, "n_envs": 2}),
    "kl": (PPO, "MlpPolicy", {"batch_size": 8, "target_kl": 0.002, "n_epochs": 5}),
    "vtrace": (
        PPO,
        "MlpPolicy",
        {"advantage": "vtrace", "policy_loss": "decoupled", "kl_coef": 0.1, "reference_policy": "initial", "batch_size": 16},
    ),
    "maskable": (MaskablePPO, "MlpPolicy", {"batch_size": 16, "learning_rate": 0.001}),
    "recurrent": (RecurrentPPO, "MlpLstmPolicy", {**LSTM, "batch_size": None}),
    "maskable-recurrent": (MaskableRecurrentPPO, "MlpGruPolicy", {**LSTM, "batch_size": None}),
    "grpo": (GRPO, "MlpPolicy", {**GROUPS, "batch_size": 1000, "credit": "pooled"}),
    "grpo-critic": (GRPO, "MlpPolicy", {**GROUPS, "batch_size": 1000, "baseline": "critic", "aggregation": "episode"}),
    # normalised, the equal advantages of a single episode would be rounding errors
    "gspo": (GSPO, "MlpPolicy", {**GROUPS, "batch_size": 10, "normalize_advantage": False}),
    # one episode each, so that one rank stands in
    "gspo-token": (GSPO, "MlpPolicy", {**GROUPS, "batch_size": 2, "credit": "return_to_go", "policy_loss": "gspo_token"}),
}


def environments(n_envs: int, discrete: bool = False) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(Drift(discrete))] * n_envs)


def build(case: str, together: int = 1, rank: int = 0, env: Any = None, **changed: Any) -> Any:
    """
    Make the model of a case.

    :param together: number of ranks whose environments it has
    :param rank: other ranks have another seed, which the first rank's replaces
    """
    algorithm, policy, options = CASES[case]
    options = {**SMALL, **options, "seed": SMALL["seed"] + 50 * rank, **changed}
    n_envs = options.pop("n_envs", 1) * together
    env = environments(n_envs, algorithm in (MaskablePPO, MaskableRecurrentPPO)) if env is None else env
    if algorithm in (PPO, GRPO, GSPO):
        options = {"backend": "torch", **options}
    return algorithm(policy, env, **options)


def without_chance(distribution: Any) -> th.Tensor:
    """Draw actions that only depend on what the policy sees; a mean itself would have no gradient."""
    if isinstance(distribution, CategoricalDistribution | MaskableCategoricalDistribution):
        return distribution.mode()
    mean, spread = distribution.distribution.mean, distribution.distribution.stddev
    return mean + spread * th.cos(30 * mean + 1)


class Rollouts(BaseCallback):
    """Stops in the first step after a number of rollouts: 1 of whole episodes, after which the next depend on the others'."""

    def _on_training_start(self) -> None:
        self.left = 1 if self.model.whole_episodes else ROLLOUTS

    def _on_rollout_start(self) -> None:
        self.left -= 1

    def _on_step(self) -> bool:
        return self.left >= 0


def in_order(together: int, batch_size: int | None) -> Callable[[int], np.ndarray]:
    """Make a permutation that leaves ranks' rows in order, and takes in one process the same rows for each minibatch."""

    def permutation(n: int) -> np.ndarray:
        rows = np.arange(n)
        if together == 1 or batch_size is None or batch_size * 2 > n:
            return rows
        return rows.reshape(together, -1, batch_size // together).swapaxes(0, 1).ravel()

    return permutation


def run(case: str, folder: Path, together: int = 1, rank: int = 0) -> dict[str, th.Tensor]:
    """Train, and leave the metrics in a file."""
    model = build(case, together, rank)
    model.set_logger(configure(str(folder / case), ["json"] if rank == 0 else []))
    by_episode = model.policy_loss.startswith("gspo")
    order = in_order(together, None if by_episode or model.whole_episodes else model.batch_size)
    patches = [mock.patch("numpy.random.permutation", order), mock.patch("numpy.random.randint", lambda *_: 0)]
    patches += [mock.patch.object(kind, "sample", without_chance) for kind in KINDS]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        model.learn(100_000, callback=Rollouts())
    model.dump_logs()  # of the last update
    return weights(model)


def first_ranks(mean: th.Tensor) -> th.Tensor:
    """A mistake: the first rank's number is taken for the mean over ranks."""
    return ranks.from_first(lambda: mean)


class OwnNormalisation(whole_batch.WholeBatch):
    """A mistake: every rank normalises by its own mean and deviation."""

    def normalised(self, advantages: th.Tensor) -> th.Tensor:
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


class OwnMeans(whole_batch.WholeBatch):
    """A mistake: every rank weighs the same, however many rows it has."""

    def part(self, mean: th.Tensor, by_sequence: bool = False) -> th.Tensor:
        return mean


MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "gradients": ("ppo", policy_gradient, "backward", lambda loss, _: loss.backward()),
    "normalisation": ("ppo", policy_gradient, "WholeBatch", OwnNormalisation),
    "target_kl": ("kl", policy_gradient, "mean_over_ranks", first_ranks),
    "weights": ("grpo", policy_gradient, "WholeBatch", OwnMeans),
    "episodes": ("gspo", minibatches, "drawn_episodes", lambda lengths, _: iter([list(range(len(lengths)))])),
}


class Recorded(DummyVecEnv):
    """Environments that keep what they return: observations, and returns as ``VecNormalize`` discounts them."""

    def __init__(self, n_envs: int, gamma: float = 0.9):
        super().__init__([lambda: Monitor(Drift())] * n_envs)
        self.seen: list[np.ndarray] = []
        self.discounted: list[np.ndarray] = []
        self.running, self.gamma = np.zeros(n_envs), gamma

    def reset(self) -> Any:
        self.seen.append(super().reset().copy())
        return self.seen[-1]

    def step_wait(self) -> Any:
        found = super().step_wait()
        self.seen.append(found[0].copy())
        self.running = self.running * self.gamma + found[1]
        self.discounted.append(self.running.copy())
        self.running[found[2]] = 0
        return found


class Watch(BaseCallback):
    """Notes time steps and episodes, saves the normaliser in the middle of a rollout, and stops in a step."""

    def __init__(self, folder: Path, stop: int):
        super().__init__()
        self.folder, self.stop, self.timesteps = folder, stop, []

    def _on_step(self) -> bool:
        if self.n_calls == 5 and self.model.get_vec_normalize_env() is not None:
            self.model.get_vec_normalize_env().save(self.folder / "in_between.pkl")
            self.model.save(self.folder / "in_between.zip")
        self.timesteps.append(self.num_timesteps)
        return self.n_calls < self.stop


def normalised(folder: Path, rank: int) -> dict[str, Any]:
    """Train with a normaliser whose statistics are all ranks'; the callback stops in the third rollout."""
    inner = Recorded(2)
    env = VecNormalize(inner, gamma=0.9)
    model = build("ppo", rank=rank, env=env)
    watch = Watch(folder, stop=2 * STEPS + 3)
    bar = ProgressBarCallback()
    with mock.patch("stable_baselines3.common.callbacks.tqdm", Bar):
        model.learn(1000, callback=CallbackList([watch, bar]))
    both = {"obs": env.obs_rms, "ret": env.ret_rms}
    episodes = [(one["r"], one["l"]) for one in model.ep_info_buffer]
    return {
        "statistics": {name: (part.mean, part.var, part.count, type(part).__name__) for name, part in both.items()},
        "rows": (inner.seen, inner.discounted),
        "episodes": (episodes, list(model.ep_success_buffer)),
        "timesteps": (model.num_timesteps, watch.timesteps),
        "bar": bar.pbar.n if rank == 0 else None,
        "weights": weights(model),
        "seeds": inner.seen[0],
    }


class Bar:
    """Stands in for tqdm."""

    def __init__(self, total: int):
        self.total, self.n = total, 0

    def update(self, n: int) -> None:
        self.n += n

    def refresh(self) -> None: ...

    close = refresh


def on_tensors(rank: int) -> dict[str, Any]:
    """Train in environments of tensors that reset a step late, so that ranks have different numbers of rows."""

    class Later(Walk):
        def reset(self, *arguments: Any, **options: Any) -> Any:
            super().reset(*arguments, **options)
            self.episode = self.episode + 2 * rank
            return self._see(), {}

    env = VecNormalize(TorchEnvAdapter(Later(late=True)), gamma=0.9)
    model = PPO("MlpPolicy", env, n_steps=12, batch_size=20, n_epochs=2, seed=0, device="cpu")
    model.learn(3 * 12 * N_WALKS * 2)
    rows = [int(model.rollout_buffer.rows.size)]
    return {
        "weights": weights(model),
        "statistics": [(part.mean, part.var, part.count) for part in (env.obs_rms, env.ret_rms)],
        "rows": rows,
        "timesteps": model.num_timesteps,
        "episodes": len(model.ep_info_buffer),
    }


def resumed(folder: Path, rank: int) -> dict[str, Any]:
    """Save after two rollouts on the first rank, load on all, and go on."""
    env = VecNormalize(environments(2), gamma=0.9)
    model = build("ppo", rank=rank, env=env).learn(2 * STEPS * 2 * 2)
    before = weights(model)
    if rank == 0:
        model.save(folder / "half")
        env.save(str(folder / "half.pkl"))
    dist.barrier()
    env = VecNormalize.load(str(folder / "half.pkl"), environments(2))
    loaded = PPO.load(folder / "half", env=env)
    loaded.learn(STEPS * 2 * 2, reset_num_timesteps=False)
    counts = loaded.num_timesteps, loaded._n_updates, env.obs_rms.count, loaded.chosen_backend
    return {"before": before, "after": weights(loaded), "counts": counts}


def met_later(rank: int) -> str:
    """A model that was built before the ranks met may compute in compiled loops."""
    with mock.patch.object(dist, "is_initialized", lambda: False):
        model = build("ppo", rank=rank, backend="auto")
        assert model.native is not None and model.chosen_backend == "native"
        strict = build("ppo", rank=rank, backend="native")
    model.learn(STEPS * 2)
    assert model.native is None
    return refusal(lambda: strict.learn(STEPS))


def broken(rank: int) -> tuple[str, bool]:
    """An advantage of the last rank is not a number; return the error, and whether the pass was put back."""
    model = build("ppo", rank=rank).learn(STEPS * 4)
    before, estimate = weights(model), model._estimate

    def estimate_badly(buffer: Any, *arguments: Any) -> None:
        estimate(buffer, *arguments)
        buffer.advantages[-1, -1] = np.nan if rank == 1 else 0.0

    model._estimate = estimate_badly
    told = refusal(lambda: model.learn(STEPS * 4))
    return told, all(th.equal(value, before[name]) for name, value in weights(model).items())


def end_in_the_middle(rank: int) -> str:
    """The last rank is killed in the middle of its second rollout."""
    model = build("ppo", rank=rank)
    step = model.env.step_wait

    def step_or_end() -> Any:
        if rank == 1 and model.num_timesteps == STEPS * 4 + 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    model.env.step_wait = step_or_end
    return refusal(lambda: model.learn(1000))


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    th.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found: dict[str, Any] = {case: run(case, folder / "two", rank=rank) for case in CASES}
    for name, (case, module, function, wrong) in MISTAKES.items():
        with mock.patch.object(module, function, wrong):
            found[f"mistake-{name}"] = run(case, folder / name, rank=rank)
    found |= {"normalised": normalised(folder, rank), "resumed": resumed(folder, rank), "tensors": on_tensors(rank)}
    found["broken"] = broken(rank)
    (folder / f"found{rank}.pkl").write_bytes(pickle.dumps(found))
    told = {
        "met_later": met_later(rank),
        "shares": refusal(lambda: build("ppo", rank=rank, batch_size=5).learn(STEPS)),
        "steps": refusal(lambda: build("ppo", rank=rank).learn(STEPS + rank)),
        "arguments": refusal(lambda: build("ppo", rank=rank, n_steps=STEPS + 4 * rank).learn(STEPS)),
        "schedules": refusal(lambda: build("ppo", rank=rank, clip_range=0.2 + rank / 10).learn(STEPS)),
        "native": refusal(lambda: build("ppo", rank=rank, backend="native")),
        "async": refusal(lambda: AsyncPPO("MlpPolicy", environments(1), **SMALL).learn(STEPS)),
        "sequences": refusal(lambda: build("recurrent", rank=rank, advantage="group", n_envs=2).learn(STEPS)),
        "ended": end_in_the_middle(rank),
    }
    (folder / "told.json").write_text(json.dumps(told))  # by the first rank: the other has ended
    os._exit(0)  # torch's threads to the ended rank may abort this process while the interpreter ends


if __name__ == "__main__":
    main()
