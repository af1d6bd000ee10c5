"""
Models that one version of this package saves and a later version loads, and the result of training these models further.

``python tests/saved_models.py FOLDER`` writes a folder for each case: the files that users have (model, replay buffer,
statistics of ``VecNormalize``), and ``resumed.npz``, the result of training further in the same version.
``test_older_files.py`` trains the models of an earlier version further and compares the results.
"""

import inspect
import json
import platform
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, Walk, walks
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from tasks import PointEnv, collect
from torch import nn

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
    FlowMapPolicy,
    GroupedStart,
    MaskablePPO,
    OfflineDataset,
    RecurrentPPO,
)
from sb3_flow.common.checkpoints import CheckpointCallback

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "learning_rate": 3e-3, "seed": 3, "device": "cpu"}
OFFLINE: dict[str, Any] = {"batch_size": 16, "learning_rate": 3e-3, "buffer_size": 60, "learning_starts": 0, "tau": 0.1}
OFFLINE |= {"horizon_length": 2, "n_candidates": 4, "seed": 3, "device": "cpu", "offline_fraction": 0.5}


@dataclass(frozen=True)
class Case:
    """
    :param algorithm: class of the model
    :param policy: name of its policy
    :param env: makes its environments
    :param options: of the constructor
    :param normalised: whether the environments are in a ``VecNormalize``
    """

    algorithm: Any
    policy: str
    env: Callable[[], VecEnv]
    options: dict[str, Any] = field(default_factory=dict)
    normalised: bool = False


def net(*sizes: int, **others: Any) -> dict[str, Any]:
    return {"policy_kwargs": {"net_arch": list(sizes), **others}}


def grouped_walks() -> VecEnv:
    return DummyVecEnv([lambda: GroupedStart(Walk(ACTION_SPACES["discrete"]))] * 4)


CHOICES: dict[str, Any] = {"advantage": "vtrace", "policy_loss": "dual_clip", "dual_clip": 2.0, "clip_range_high": 0.3}
CHOICES |= {"kl_coef": 0.1, "reference_policy": "initial", "clip_range": LinearSchedule(0.2, 0.1, 1.0), "ent_coef": 0.01}
ON_POLICY = {
    "ppo_native": Case(
        PPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["box"]), {**SMALL, **net(8), "backend": "native"}, normalised=True
    ),
    "ppo_auto": Case(PPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["multi_discrete"]), {**SMALL, **net(8), **CHOICES}),
    "ppo_torch": Case(
        *(PPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["box"])),
        {**SMALL, **net(8, activation_fn=nn.ELU), **CHOICES, "backend": "torch"},
        normalised=True,
    ),
    "ppo_sde": Case(
        *(PPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["box"])),
        {**SMALL, **net(8), "use_sde": True, "policy_loss": "decoupled", "target_kl": 0.05},
    ),
    "maskable_ppo": Case(MaskablePPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["discrete"]), {**SMALL, **net(8)}),
    "recurrent_ppo": Case(
        *(RecurrentPPO, "MlpLstmPolicy", lambda: walks(2, ACTION_SPACES["box"])),
        {**SMALL, **net(4, lstm_hidden_size=4), "policy_loss": "gspo"},
    ),
    "grpo": Case(GRPO, "MlpPolicy", grouped_walks, {**SMALL, **net(8), "group_size": 2, "n_steps": 30}),
    "grpo_critic": Case(
        *(GRPO, "MlpPolicy", lambda: walks(4, ACTION_SPACES["box"])),
        {**SMALL, **net(8), "group_by": "none", "baseline": "critic", "credit": "outcome", "n_steps": 30, "backend": "torch"},
    ),
    "gspo": Case(GSPO, "MlpPolicy", grouped_walks, {**SMALL, **net(8), "group_size": 2, "n_steps": 30}),
    "async_ppo": Case(AsyncPPO, "MlpPolicy", lambda: walks(2, ACTION_SPACES["box"]), {**SMALL, **net(8)}),
}
OFFLINE_TO_ONLINE = {
    "rql": Case(
        *(RQL, "MlpPolicy", lambda: DummyVecEnv([PointEnv, PointEnv])),
        {**OFFLINE, **net(8), "n_critics": 2, "flow_steps": 3, "acting_mode": "best_of_n", "backend": "native"},
        normalised=True,
    ),
    "rql_torch": Case(
        *(RQL, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(6, activation_fn=nn.ReLU), "n_critics": 2, "flow_steps": 2, "backend": "torch"}
        | {"optimize_memory_usage": True, "sampling": "transition", "horizon_length": 1},
    ),
    "fql": Case(
        *(FQL, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(6), "flow_steps": 2, "actor_type": "best_of_n", "n_candidates": 3, "q_aggregation": "min"},
    ),
    "dsrl": Case(
        *(DSRL, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(6), "n_critics": 2, "flow_steps": 2, "noise_scale": 0.5},
        normalised=True,
    ),
    "qam": Case(
        *(QAM, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(6), "n_critics": 2, "flow_steps": 2, "edit_scale": 0.1, "inv_temp": 3.0},
    ),
    "rlpd": Case(
        *(RLPD, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(6), "n_critics": 3, "bc_alpha": 0.1, "backend": "torch"},
    ),
    "fmq": Case(
        *(FMQ, "MultiInputPolicy", lambda: DummyVecEnv([lambda: PointEnv("dict")] * 2)),
        {**OFFLINE, **net(8, fourier_dim=4), "execution_horizon": 1, "warmup_steps": 2, "acting_mode": "qgbs"}
        | {"search": {"beam_width": 2, "branches": 2}, "distillation": "lsd", "backend": "native"},
        normalised=True,
    ),
    "fmq_auto": Case(
        *(FMQ, "MlpPolicy", lambda: DummyVecEnv([PointEnv])),
        {**OFFLINE, **net(8, fourier_dim=4), "n_sampling_steps": 2, "acting_mode": "sample", "reanchor_every": 3},
    ),
}
MODELS = {**ON_POLICY, **OFFLINE_TO_ONLINE}
POLICIES = ("flow_map_policy", "rql_policy")


@contextmanager
def one_thread() -> Iterator[None]:
    threads = th.get_num_threads()
    th.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        th.set_num_threads(threads)


def dataset(name: str, folder: Path | None = None) -> OfflineDataset:
    """:return: of random actions in the environment of the case; that of "rql" is read from the folder that was saved"""
    if name == "rql" and folder is not None:
        return OfflineDataset.load(f"npz:{folder / 'dataset'}")
    return collect(PointEnv("dict" if name == "fmq" else "box"), episodes=3)


def file(folder: Path, kind: str) -> Path:
    """:return: the file as ``CheckpointCallback`` calls it; ``kind`` is "", "replay_buffer_" or "vecnormalize_" """
    (found,) = folder.glob(f"rl_model_{kind}[0-9]*_steps.*")
    return found


def save(name: str, folder: Path) -> None:
    """
    :param name: of the case
    :param folder: a new one for its files
    """
    folder.mkdir(parents=True)
    if name in POLICIES:
        policy = FlowMapPolicy(*spaces_of_points(), lambda _: 1e-3, n_critics=0, net_arch=[8], fourier_dim=4, noise_seed=5)
        if name == "rql_policy":
            case = MODELS["rql"]
            policy = case.algorithm(case.policy, PointEnv(), **case.options).learn_offline(dataset(name), 3).policy
        else:
            policy.learn_behaviour(dataset(name), 3, batch_size=16)
        policy.save(str(folder / "policy.pth"))
        return
    case = MODELS[name]
    env = case.env()
    model = case.algorithm(case.policy, VecNormalize(env) if case.normalised else env, **case.options)
    if name in OFFLINE_TO_ONLINE:
        offline = dataset(name)
        if name == "rql":
            offline.save(folder / "dataset")
        model.learn_offline(offline, 3)
    # in the middle of an episode, and of a chunk; rollouts of the others end where they end
    steps = 46 if name in OFFLINE_TO_ONLINE else 32
    model.learn(steps)
    callback = CheckpointCallback(1, str(folder), save_replay_buffer=True, save_vecnormalize=True)
    callback.init_callback(model)
    callback.num_timesteps = model.num_timesteps
    callback.on_step()
    close(model)
    deflate(file(folder, ""))


def deflate(path: Path) -> None:
    """Have a model's file take half the room; what is in it stays."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def spaces_of_points() -> tuple[spaces.Space, Any]:
    return PointEnv().observation_space, PointEnv().action_space


def load(name: str, folder: Path) -> Any:
    """:return: the model (or policy) as it was saved, with its environments and buffer"""
    if name == "flow_map_policy":
        return FlowMapPolicy.load(str(folder / "policy.pth"), device="cpu")
    if name == "rql_policy":
        return RQL.policy_aliases["MlpPolicy"].load(str(folder / "policy.pth"), device="cpu")
    case = MODELS[name]
    env = case.env()
    if case.normalised:
        env = VecNormalize.load(str(file(folder, "vecnormalize_")), env)
    model = case.algorithm.load(file(folder, ""), env, device="cpu")
    if name in OFFLINE_TO_ONLINE:
        model.load_replay_buffer(file(folder, "replay_buffer_"))
        model.set_offline_dataset(dataset(name, folder))
    return model


def close(model: Any) -> None:
    if isinstance(model, AsyncPPO):
        model.close()


def go_on(name: str, model: Any) -> dict[str, np.ndarray]:
    """
    :param name: of the case
    :param model: as :func:`load` returns it; trained by a few updates
    :return: all that training changed, and actions, by name
    """
    th.manual_seed(11)
    if name == "flow_map_policy":
        model.learn_behaviour(dataset(name), 3, batch_size=16)
    elif name in MODELS:
        model.learn(2 * (6 if name in OFFLINE_TO_ONLINE else 32), reset_num_timesteps=False)
        if name in OFFLINE_TO_ONLINE:
            model.learn_offline(model.replay_buffer.offline_dataset, 3)
        close(model)
    found: dict[str, Any] = {"parameters": model.get_parameters() if name in MODELS else model.state_dict()}
    normaliser = model.get_vec_normalize_env() if name in MODELS else None
    if normaliser is not None:
        found["statistics"] = [normaliser.ret_rms.var]
        rms = normaliser.obs_rms
        found["statistics"] += [(one.mean, one.var) for one in (rms.values() if isinstance(rms, dict) else [rms])]
    observation = sample(model.observation_space, np.random.default_rng(0))
    masks = {"action_masks": np.tile([True, False, True], (3, 1))} if name == "maskable_ppo" else {}
    for deterministic in (True, False):
        found[f"actions {deterministic}"] = model.predict(observation, deterministic=deterministic, **masks)[0]
    return dict(flat("", found))


def sample(space: spaces.Space, rng: np.random.Generator) -> Any:
    """:return: three observations"""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, rng) for key, part in space.items()}
    return rng.uniform(0, 1, (3, *space.shape)).astype(np.float32)  # type: ignore[misc]


def flat(prefix: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of what is nested in dictionaries and lists."""
    if isinstance(value, dict | list | tuple):
        for key, part in sorted(value.items(), key=str) if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{prefix}/{key}", part)
    elif isinstance(value, th.Tensor):
        yield prefix, value.detach().cpu().double().numpy()
    elif value is not None:
        yield prefix, np.asarray(value, dtype=np.float64)


def printable(space: spaces.Space) -> spaces.Space:
    """:return: the same space, made anew: one version of Gymnasium cannot print a Box that another version pickled"""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: printable(part) for key, part in space.items()})
    return spaces.Box(space.low, space.high, space.shape, space.dtype.type) if isinstance(space, spaces.Box) else space


def settings(model: Any) -> dict[str, str]:
    """:return: arguments of the constructor that the model keeps as attributes, and what else must be as it was, as text"""
    names = {"num_timesteps", "offline_updates", "n_envs", "chosen_backend", "noise_seed", "policy_version", "action_space"}
    for one in type(model).__mro__:
        if "__init__" in vars(one):
            parameters = inspect.signature(one.__init__).parameters.values()
            names |= {given.name for given in parameters if given.kind not in (given.VAR_POSITIONAL, given.VAR_KEYWORD)}
    if hasattr(model, "policy"):
        names |= {f"policy.{name}" for name in settings(model.policy) if name != "lr_schedule"}
    found = {}
    for name in sorted(names - {"env", "policy", "args", "kwargs", "self", "device", "tensorboard_log"}):
        value = model
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, nn.Module):
            continue
        if isinstance(value, spaces.Space):
            value = printable(value)
        if callable(value) and not isinstance(value, type):
            value = [value(progress) for progress in (1.0, 0.5, 0.0)]
        # an object's address, and the module of a class, are no setting
        found[name] = re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", re.sub(r" at 0x\w+", "", str(value)))
    return found


def machine() -> dict[str, str]:
    """:return: what decides how numbers are rounded"""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "capability": th.backends.cpu.get_cpu_capability(),
        "torch": th.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def write(name: str, folder: Path) -> None:
    """Write the files of a case, and the record of what comes of them."""
    with one_thread():
        save(name, folder)
        model = load(name, folder)
        before = settings(model)
        arrays = go_on(name, model)
    record = {"machine": machine(), "settings": before, "shapes": {key: one.shape for key, one in arrays.items()}}
    values = np.concatenate([one.ravel() for one in arrays.values()])
    np.savez_compressed(folder / "resumed.npz", record=json.dumps(record), values=values)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """:return: what :func:`write` recorded: machine and settings; and the arrays by name"""
    with np.load(folder / "resumed.npz") as stored:
        record, values = json.loads(str(stored["record"])), stored["values"]
    ends = np.cumsum([int(np.prod(shape)) for shape in record["shapes"].values()])
    parts = np.split(values, ends[:-1])
    return record, {key: one.reshape(shape) for (key, shape), one in zip(record["shapes"].items(), parts, strict=True)}


if __name__ == "__main__":
    for case_name in (*MODELS, *POLICIES):
        write(case_name, Path(sys.argv[1]) / case_name)
        print(case_name, sum(one.stat().st_size for one in (Path(sys.argv[1]) / case_name).rglob("*") if one.is_file()))
