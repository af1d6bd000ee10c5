"""Modules that moved, under the names that older files have for them. Only loading reads this table."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

MOVED = {
    "collect.async_ppo": "ppo.async_ppo",
    "collect.envpool": "envs.envpool",
    "common.acting": "offline_to_online.acting",
    "common.actors": "offline_to_online.actors",
    "common.chunking": "offline_to_online.chunking",
    "common.compare": "offline_to_online.acting_comparison",
    "common.environments": "envs.registration",
    "common.estimators": "on_policy.estimators",
    "common.evaluate": "common.statistics offline_to_online.evaluation_notes",
    "common.generators": "offline_to_online.random_streams",
    "common.grouped": "grpo.grouped_starts",
    "common.groups": "on_policy.grouping",
    "common.metrics": "offline_to_online.metrics",
    "common.minibatches": "on_policy.minibatches",
    "common.native": "on_policy.native_learner",
    "common.offline_env": "envs.wrappers offline_to_online.offline_env",
    "common.plot_callback": "plotting.callback",
    "common.policies": "offline_to_online.generative_policy",
    "common.robomimic": "envs.robomimic_task",
    "common.rollouts": "on_policy.rollout_buffer",
    "common.targets": "offline_to_online.moving_average",
    "flow.activations": "fused.plain_mlp",
    "flow.backend": "fused.compiled_network",
    "flow.fused": "fused.fused_mlp",
    "kernels.networks": "native.network_layout",
    "kernels.objectives": "native.objectives",
    "losses.advantages": "losses.advantage_scans",
}
"""Old and new modules, below ``sb3_flow``, of the classes and functions that a saved or pickled object may name."""

_lock = RLock()


class _Moved(ModuleType):
    def __init__(self, old: str, new: str) -> None:
        super().__init__(old)
        self._new = new.split()

    def __getattr__(self, name: str) -> Any:
        for new in self._new:
            found = getattr(importlib.import_module(f"sb3_flow.{new}"), name, self)
            if found is not self:
                return found
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


@contextmanager
def finding_moved_modules() -> Iterator[None]:
    """Let files be read meanwhile that name modules by older names."""
    with _lock:
        by_name = {f"sb3_flow.{old}": new for old, new in MOVED.items()}
        added = {name: _Moved(name, new) for name, new in by_name.items() if name not in sys.modules}
        sys.modules.update(added)
        try:
            yield
        finally:
            for name in added:
                sys.modules.pop(name, None)
