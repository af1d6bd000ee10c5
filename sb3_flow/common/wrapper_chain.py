"""Wrappers of vectorised environments, and of what ``torch.compile`` returns."""

from typing import Any

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper


def chain(env: VecEnv) -> list[VecEnv]:
    """List the wrappers, the outermost first, and the environment that they wrap."""
    found = [env]
    while isinstance(found[-1], VecEnvWrapper):
        found.append(found[-1].venv)
    return found


def unwrapped(policy: Any) -> Any:
    """Return the policy inside the wrapper that ``torch.compile`` returns, or else the given policy."""
    return getattr(policy, "_orig_mod", policy)
