"""A part of ``references.py``: a published JAX implementation with the settings of one of our models, in its own process."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.torch_layers import get_actor_critic_arch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_flow import DSRL, FQL, QAM, RLPD, RQL, OfflineDataset
from sb3_flow.data.rows import ACTION_MARGIN
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm

Settings = dict[str, Any]

FIXED: dict[type, Settings] = {
    RQL: {"objective": "rql", "sampling": "trajectory"},
    FQL: {"normalize_q_loss": False, "sampling": "transition"},
    DSRL: {"decoder": None, "ent_coef": "auto", "sampling": "transition"},
    QAM: {"max_grad_norm": 1.0, "ent_coef": "auto", "sampling": "transition"},
    RLPD: {"backup_entropy": False, "policy_delay": 1, "ent_coef": "auto", "sampling": "transition"},
}
"""Arguments that the published implementations do not have: they do what these values say."""


def translated(model: Any) -> tuple[str, Settings]:
    """
    Write a model's settings as the published implementation has them.

    :return: module and class of the agent, and its configuration
    :raises ValueError: if the published implementation cannot do the same
    """
    for name, value in FIXED[type(model)].items():
        if getattr(model, name) != value:
            raise ValueError(f"`{name}={getattr(model, name)!r}` has no counterpart, only {value!r} has.")
    actor_layers, critic_layers = get_actor_critic_arch(model.policy.net_arch)
    config: Settings = {
        **{"lr": model.learning_rate, "batch_size": model.batch_size, "discount": model.gamma, "tau": model.tau},
        **{"actor_hidden_dims": actor_layers, "value_hidden_dims": critic_layers},
    }

    def same(*names: str) -> Settings:
        return {name: getattr(model, name) for name in names}

    if isinstance(model, RQL):
        own = same("alpha", "expectile", "rho", "flow_steps")
        return "rql.RQLAgent", {
            **{**config, **own, "h": model.horizon_length, "ensemble_ct": model.n_critics, "ema": model.ema_decay}
        }
    config |= {"horizon_length": model.horizon_length, "action_chunking": True, "num_qs": model.n_critics}
    if isinstance(model, FQL):
        actor_type = {"distilled": "distill-ddpg", "best_of_n": "best-of-n"}[model.actor_type]
        own = {"actor_type": actor_type, "actor_num_samples": model.n_candidates, "q_agg": model.q_aggregation}
        return "acfql.ACFQLAgent", {**config, **own, **same("alpha", "flow_steps")}
    if isinstance(model, DSRL):
        own = {"best_of_n": model.n_candidates, "target_entropy": model.entropy_coefficient.target_entropy}
        return "dsrl.DSRLAgent", {**config, **own, **same("rho", "flow_steps", "noise_scale")}
    if isinstance(model, QAM):
        edits = {"edit_target_entropy": model.entropy_coefficient.target_entropy} if model.edit_scale else {}
        return "qam.QAMAgent", {**config, **edits, **same("rho", "flow_steps", "inv_temp", "edit_scale")}
    own = {"target_entropy": model.entropy_coefficient.target_entropy}
    return "rlpd.RLPDAgent", {**config, **own, **same("rho", "bc_alpha")}


def write_transitions(dataset: OfflineDataset, env: VecEnv | None, file: Path) -> None:
    """Write what the replay buffer of a model gives its updates: scaled actions, normalised observations."""
    normalize = env.normalize_obs if isinstance(env, VecNormalize) else np.asarray
    low, high = dataset.action_space.low, dataset.action_space.high
    limit = 1 - ACTION_MARGIN
    arrays: dict[str, Any] = {
        "observations": normalize(dataset.observations),  # type: ignore[arg-type]
        "next_observations": normalize(dataset.next_observations),  # type: ignore[arg-type]
        "actions": np.clip(2 * (dataset.actions - low) / (high - low) - 1, -limit, limit),
        "rewards": dataset.rewards,
        "terminals": dataset.trajectory_ends,
        "masks": ~dataset.terminated,
    }
    np.savez(file, **{name: array.astype(np.float32) for name, array in arrays.items()})


class Reference:
    """
    A published implementation in a process of its own.

    :param python: with JAX
    :param checkout: its folder
    :param model: ours, whose settings it gets
    :param file: of ``write_transitions``
    :param variables: of its environment; by default it runs on the CPU
    """

    def __init__(
        self,
        python: str,
        checkout: Path,
        model: OfflineToOnlineAlgorithm,
        file: Path,
        variables: dict[str, str] | None = None,
    ) -> None:
        flags = "--xla_cpu_multi_thread_eigen=false" if th.get_num_threads() == 1 else ""
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("reference_worker.py")), str(checkout)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.model = model
        agent, config = translated(model)
        self.ask("start", agent=agent, config=config, data=str(file), seed=model.seed)

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the worker and wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"ask": method, **arguments}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("The published implementation's process has ended; its messages are above.")
        found: dict[str, Any] = json.loads(answer)
        return found

    def decide(self, observations: np.ndarray) -> np.ndarray:
        """Decide chunks, shape ``(n, h, d)``, scaled to [-1, 1]."""
        return np.array(self.ask("act", observations=observations.tolist())["chunks"], np.float32)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Give the next actions of the chunks under way; a chunk is executed as a whole, and ends with its episode."""
        assert isinstance(observation, np.ndarray) and episode_start is not None
        n, h = len(observation), self.model.horizon_length
        chunks, used = (np.zeros((n, h, 1), np.float32), np.full(n, h)) if state is None else state
        new = episode_start | (used == h)
        if new.any():
            # for all environments, so that JAX compiles for one number of observations
            chunks, used = np.where(new[:, None, None], self.decide(observation), chunks), np.where(new, 0, used)
        return self.model.policy.unscale_action(chunks[np.arange(n), used]), (chunks, used + 1)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # the worker's loop ends with its input
        self.process.wait()
