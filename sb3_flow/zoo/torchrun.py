"""``train`` in several processes: ``torchrun --nproc-per-node=2 -m sb3_flow.zoo train ...``."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

import torch as th
import torch.distributed as dist

from sb3_flow import AsyncPPO
from sb3_flow.common.ranks import is_first, n_ranks
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.on_policy.policy_gradient import PolicyGradient


@contextlib.contextmanager
def as_rank(command: str) -> Iterator[None]:
    """
    Be one of the processes that torchrun started: join them, on a GPU of this process's own where there are GPUs. All but the
    first print nothing and leave no files. A process that torchrun did not start, or started alone, does nothing here.

    :param command: of the zoo
    :raises ValueError: if the command is not ``train``, or there are fewer GPUs than processes
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    if command != "train":
        raise ValueError(f"several processes are for `train`: run `{command}` without torchrun, in one process.")
    if th.cuda.is_available():
        own = int(os.environ.get("LOCAL_RANK", "0"))
        if own >= th.cuda.device_count():
            raise ValueError(
                f"--nproc-per-node must be at most the number of GPUs, {th.cuda.device_count()}: every process takes one."
            )
        th.cuda.set_device(own)
    dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
    with contextlib.nullcontext() if is_first() else _unseen():
        yield
    dist.destroy_process_group()  # not after an error: what others still send would be waited for


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Print nothing, and have the zoo's files written to a folder that is removed."""
    os.environ["WANDB_MODE"] = "disabled"
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        sys.argv += ["--log-folder", folder, "--tensorboard-log=", "--eval-freq=-1", "--save-freq=-1"]
        yield


def check_trainable(algorithm: type, optimizes: bool, n_timesteps: int) -> None:
    """
    Refuse what does not train in several processes.

    :param algorithm: class
    :param optimizes: whether hyperparameters are searched
    :param n_timesteps: environment steps of the configuration, or of ``-n``
    :raises ValueError: if several processes run and cannot train this
    """
    if n_ranks() == 1:
        return
    if optimizes:
        raise ValueError("torchrun trains one model: search hyperparameters without it.")
    if issubclass(algorithm, AsyncPPO):
        raise ValueError(
            "AsyncPPO learns in one process: run it without torchrun, with more collectors (`-params n_collectors:2`), or "
            "take flow_ppo, which several processes train."
        )
    if issubclass(algorithm, PolicyGradient):
        return
    if not issubclass(algorithm, OfflineToOnlineAlgorithm):
        raise ValueError(
            "several processes train PPO, GRPO, GSPO, and the offline phases of RQL, FMQ, FQL, RLPD, DSRL and QAM, but not "
            f"{algorithm.__name__}: run it without torchrun."
        )
    if n_timesteps > 0:
        raise ValueError(
            f"the online phase ({n_timesteps} environment steps) runs in one process: give torchrun `-params n_timesteps:0`, "
            "which makes the offline steps alone, and go on without torchrun by `-i` with the saved model."
        )
