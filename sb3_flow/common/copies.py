"""Copies and pickles of algorithms, with their environments."""

import copy
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_flow.common.wrapper_chain import chain

_WRAPPED = "_wrapped_by_normalisers"


class DeepCopies(BaseAlgorithm):
    """
    An algorithm that ``copy.deepcopy`` copies whole, with its environments: the copy goes on by itself as the original would
    have done. Without this class, SB3's algorithms can be copied until their first update only, and what a VecNormalize wraps
    is lost in copies and pickles.
    """

    def __getstate__(self) -> dict[str, Any]:
        links = [] if self.env is None else chain(self.env)
        # a VecNormalize leaves out what it wraps; processes have to stay out
        if links and isinstance(links[-1], SubprocVecEnv):
            links = []
        wrapped = [(link, link.venv, link.returns) for link in links if isinstance(link, VecNormalize)]
        return vars(self) | ({_WRAPPED: wrapped} if wrapped else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        wrapped = state.pop(_WRAPPED, [])
        vars(self).update(state)
        for link, venv, returns in reversed(wrapped):
            if link.venv is None:
                link.set_venv(venv)
                link.returns = returns

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        env: Any = None if self.env is None else chain(self.env)[-1]
        if isinstance(env, SubprocVecEnv) and id(env) not in memo:
            # SB3's attempt fails, and closes the pipes to the processes, which are the original's
            raise TypeError(
                "A model whose `env` is a SubprocVecEnv cannot be copied, since its processes cannot be. Save the model and "
                "load it with an environment of its own, or copy it while `env` is None."
            )
        for name in ("policy", "reference"):
            # the distribution of the last update hangs on a graph of gradients, which cannot be copied and need not be
            distribution = getattr(getattr(self, name, None), "action_dist", None)
            if distribution is not None:
                memo[id(distribution)] = copy.copy(distribution)
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied
