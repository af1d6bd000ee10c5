"""Advantages and groups written as slow loops in float64, straight from the formulas; and arrays to try them on."""

import numpy as np


def trajectories(rng, n_steps, n_envs, flags=0.2, dtype=np.float64):
    """Random arguments of compute_gae; bootstrap values that must not be used are NaN."""
    shape = (n_steps, n_envs)
    rewards, values, final_values = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    terminated, truncated = rng.random(shape) < flags, rng.random(shape) < flags
    final_values[~truncated | terminated] = np.nan
    last_values = rng.standard_normal(n_envs).astype(dtype)
    return {
        "rewards": rewards,
        "values": values,
        "last_values": last_values,
        "terminated": terminated,
        "truncated": truncated,
        "final_values": final_values,
    }


def successor_values(values, last_values, terminated, truncated, final_values):
    """V'_t, 0 where terminated"""
    following = np.concatenate([values[1:], last_values[None]]).astype(np.float64)
    return np.where(terminated, 0.0, np.where(truncated, final_values, following))


def gae(rewards, values, last_values, terminated, truncated, final_values, gamma, gae_lambda):
    following = successor_values(values, last_values, terminated, truncated, final_values)
    advantages = np.zeros(rewards.shape)
    for n in range(rewards.shape[1]):
        advantage = 0.0
        for t in reversed(range(len(rewards))):
            delta = float(rewards[t, n]) + gamma * following[t, n] - float(values[t, n])
            advantage = delta + (0.0 if terminated[t, n] or truncated[t, n] else gamma * gae_lambda * advantage)
            advantages[t, n] = advantage
    return advantages, advantages + values


def vtrace(
    log_rhos,
    rewards,
    values,
    last_values,
    terminated,
    truncated,
    final_values,
    gamma,
    gae_lambda=1.0,
    rho_bar=1.0,
    c_bar=1.0,
    rho_pg_bar=1.0,
    reward_only=False,
):
    """``reward_only`` has the fault of some implementations: the ratio scales the reward instead of the whole error."""
    following = successor_values(values, last_values, terminated, truncated, final_values)
    w = np.exp(np.asarray(log_rhos, np.float64))
    vs, q = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for n in range(rewards.shape[1]):
        e, vs_next = 0.0, 0.0
        for t in reversed(range(len(rewards))):
            rho, c = min(rho_bar, w[t, n]), gae_lambda * min(c_bar, w[t, n])
            done = terminated[t, n] or truncated[t, n]
            error = float(rewards[t, n]) + gamma * following[t, n] - float(values[t, n])
            delta = rho * error
            if reward_only:
                delta = error + (rho - 1) * float(rewards[t, n])
            mixed = following[t, n]
            if not done and t < len(rewards) - 1:
                mixed = (1 - gae_lambda) * following[t, n] + gae_lambda * vs_next
            q[t, n] = float(rewards[t, n]) + gamma * mixed - float(values[t, n])
            e = delta + (0.0 if done else gamma * c * e)
            vs_next = vs[t, n] = float(values[t, n]) + e
    return vs, q, np.minimum(rho_pg_bar, w) * q


def returns_to_go(rewards, alive, gamma):
    out = np.zeros(rewards.shape)
    for t in reversed(range(len(rewards))):
        following = out[t + 1] if t + 1 < len(rewards) else 0.0
        out[t] = np.where(alive[t], rewards[t] + gamma * following, 0.0)
    return out


def baseline_of(x, i, baseline):
    if baseline == "loo":
        return np.delete(x, i).mean()
    return {"mean": np.mean, "median": np.median, "min": np.min}[baseline](x)


def group_returns_to_go(rewards, alive, gamma, values=None, baseline="loo", scale="batch", ddof=0, few_peers="pooled"):
    returns = returns_to_go(rewards, alive, gamma)
    compared = returns if values is None else returns - values
    out = np.zeros(rewards.shape)
    for t, k, g in np.argwhere(alive):
        peers, own = compared[t, k][alive[t, k]], alive[t, k, :g].sum()
        if len(peers) < 2:
            if few_peers == "zero":
                continue
            peers, own = compared[t][alive[t]], alive[t].ravel()[: k * rewards.shape[2] + g].sum()
        if len(peers) < 2 or np.ptp(peers) == 0:
            continue
        out[t, k, g] = compared[t, k, g] - baseline_of(peers, own, baseline)
        if scale == "group":
            out[t, k, g] /= peers.std(ddof=ddof) + 1e-8
    if scale == "batch":
        out = out / (out[alive].std(ddof=ddof) + 1e-8)
    return out, returns


def process_advantages(rewards, alive, ddof=0):
    out = np.zeros(rewards.shape)
    for k in range(rewards.shape[1]):
        r = rewards[:, k][alive[:, k]]
        normalised = np.where(alive[:, k], (rewards[:, k] - r.mean()) / (r.std(ddof=ddof) + 1e-8), 0.0)
        out[:, k] = np.cumsum(normalised[::-1], axis=0)[::-1]
    return np.where(alive, out, 0.0)
