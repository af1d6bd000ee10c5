"""The algorithms and environments that rl-zoo3 is given, their names, and where their configurations are."""

from pathlib import Path

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm

import sb3_flow.envs  # noqa: F401  (registers the ids of OGBench's single tasks)
from sb3_flow import (
    DSRL,
    FMQ,
    FQL,
    GRPO,
    GSPO,
    PPO,
    QAM,
    RLPD,
    RQL,
    AsyncPPO,
    HerReplayBuffer,
    MaskablePPO,
    MaskableRecurrentPPO,
    PrioritizedReplayBuffer,
    RecurrentPPO,
)

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {
    "rql": RQL,
    "fmq": FMQ,
    "fql": FQL,
    "rlpd": RLPD,
    "dsrl": DSRL,
    "qam": QAM,
    "flow_ppo": PPO,
    "recurrent_ppo": RecurrentPPO,
    "maskable_ppo": MaskablePPO,
    "maskable_recurrent_ppo": MaskableRecurrentPPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "async_ppo": AsyncPPO,
}
REPLAY_BUFFERS = {buffer.__name__: buffer for buffer in (HerReplayBuffer, PrioritizedReplayBuffer)}
"""Replay buffers of our algorithms that a configuration names in ``replay_buffer_class``; the zoo would take SB3's."""
CONFIGS = Path(__file__).parent / "configs"


def config_file(algo: str) -> Path:
    """
    Find the configuration of an algorithm that is used without ``--conf-file``: ``zoo_configs/<algo>.yml`` of the repository.

    :param algo: a key of ``ALGORITHMS``
    """
    return CONFIGS / f"{algo}.yml"


def check_device(device: th.device | str) -> None:
    """
    Refuse a GPU that is not there. SB3 takes the CPU without a word, but a user who asks for a GPU wants to know.

    :param device: the user's argument
    :raises ValueError: if it is a GPU that torch does not see
    """
    if th.device("cpu" if device == "auto" else device).type == "cuda" and not th.cuda.is_available():
        raise ValueError(
            f"--device {device}: torch {th.__version__} sees no GPU; leave out --device to train on the CPU, or install a "
            "build of torch for your CUDA driver."
        )
