"""Wrappers of vectorised environments."""

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper


def chain(env: VecEnv) -> list[VecEnv]:
    """List the wrappers, the outermost first, and the environment that they wrap."""
    found = [env]
    while isinstance(found[-1], VecEnvWrapper):
        found.append(found[-1].venv)
    return found
