"""
The package without any extra: it imports and learns, errors name the extra that is missing, and compiled loops work where the
installation cannot be written. `tests.release.wheel` runs this file before it installs the extras.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import sb3_flow
from sb3_flow import PPO, RQL, AsyncPPO, FlowMapPolicy, OfflineDataset, export
from sb3_flow.data.generate import generate
from sb3_flow.envs import EnvPoolVecEnv, RayVecEnv
from sb3_flow.hub import push_to_hub
from sb3_flow.plotting import learning_curves
from sb3_flow.zoo import register
from tests.release.lowest import FOR_CONTRIBUTORS, OPTIONAL

PACKAGE = Path(sb3_flow.__file__).parent
POINT_MAZE = "pointmaze-medium-navigate-singletask-v0"


def dataset():
    rng, n = np.random.default_rng(0), 40
    arrays = rng.normal(size=(n, 3)), rng.uniform(-2, 2, (n, 1)), rng.normal(size=n), np.zeros(n), np.arange(n) % 20 == 19
    return OfflineDataset.from_arrays(*arrays, action_space=gym.spaces.Box(-2, 2, (1,)))


def clone_with_progress_bar():
    data = dataset()
    policy = FlowMapPolicy(data.observation_space, data.action_space, lambda _: 1e-3, net_arch=[8])
    policy.learn_behaviour(data, 2, progress_bar=True)


def learn_offline_with_progress_bar():
    model = RQL("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [8]}, n_critics=2)
    model.learn_offline(dataset(), 2, progress_bar=True)


def load(location):
    Path("data.file").touch()
    return OfflineDataset.load(location)


CALLS = [
    ("d4rl", "h5py", lambda: load("d4rl:data.file")),
    ("d4rl", "h5py", lambda: load("robomimic:data.file")),
    ("minari", "minari", lambda: load("minari:D4RL/pointmaze/umaze-v2")),
    ("ogbench", "ogbench", lambda: load(f"ogbench:{POINT_MAZE}@data.file")),
    ("ogbench", "ogbench", lambda: generate("pointmaze-medium-navigate", 2, out="data")),
    ("ogbench", "ogbench", lambda: gym.make(f"sb3_flow.envs:{POINT_MAZE}")),
    ("envpool", "envpool", lambda: EnvPoolVecEnv("CartPole-v1", 2)),
    ("ray", "ray", lambda: RayVecEnv([lambda: gym.make("CartPole-v1")])),
    ("ray", "ray", lambda: AsyncPPO("MlpPolicy", "CartPole-v1", collectors="ray")),
    ("onnx", "onnx", lambda: export(PPO("MlpPolicy", "CartPole-v1"), "policy.onnx")),
    ("plots", "matplotlib", lambda: learning_curves({"logs": "logs"})),
    ("plots", "tqdm", clone_with_progress_bar),
    ("plots", "tqdm", learn_offline_with_progress_bar),
    ("plots", "tqdm", lambda: PPO("MlpPolicy", "CartPole-v1").learn(2, progress_bar=True)),
    ("hub", "huggingface.hub", lambda: push_to_hub(PPO("MlpPolicy", "CartPole-v1"), "me/ppo", gym.make("CartPole-v1"))),
    ("zoo", "rl.zoo3", register),
]


@pytest.mark.parametrize(("extra", "package", "call"), CALLS)
def test_errors_name_the_extra(extra, package, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_spec(package.replace(".", "_")) is None
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'sb3-flow\[{extra}\]'"):
        call()


def test_every_extra_is_tried():
    # `gymnasium.make_vec` raises Gymnasium's own error without JAX, before anything of this package is called
    assert {extra for extra, *_ in CALLS} == OPTIONAL.keys() - FOR_CONTRIBUTORS - {"jax"}


@pytest.mark.parametrize("command", ["train", "enjoy", "plot", "push_to_hub", "load_from_hub", "bench", "sweep"])
def test_commands_name_the_extra(command, tmp_path):
    ended = subprocess.run([sys.executable, "-m", "sb3_flow.zoo", command], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "error: sb3_flow.zoo needs rl-zoo3: pip install 'sb3-flow[zoo]' (No module named 'rl_zoo3')\n"


LOOP = """
import numpy as np
import sb3_flow
from pathlib import Path
from sb3_flow.kernels import compute_gae
try:
    (Path(sb3_flow.__file__).parent / "compiled" / "new_file").touch()
except OSError:
    print(*compute_gae(np.ones(3), np.ones(4), gamma=0.5, gae_lambda=0.0)[1])
"""
COMPUTED = "1.5 1.5 1.5\n"


@pytest.fixture
def read_only():
    """No file of the installed package can be written, and none has compiled loops."""
    for kept in (PACKAGE / "compiled" / "__pycache__").glob("numba-*"):
        shutil.rmtree(kept)
    modes = {path: path.stat().st_mode for path in (PACKAGE, *PACKAGE.rglob("*"))}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


def run(home, **variables):
    # root may write anywhere by its capabilities; without them root is a user like others
    as_user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    others = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    command = [*as_user, sys.executable, "-c", LOOP]
    ended = subprocess.run(command, env={**others, "HOME": str(home), **variables}, capture_output=True, text=True)
    assert ended.stdout == COMPUTED, ended.stderr
    return ended.stderr


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_read_only_installation_keeps_compiled_loops_in_the_home_folder(read_only, tmp_path):
    assert run(tmp_path) == ""
    kept = written(tmp_path / ".cache" / "sb3_flow")
    assert kept
    assert run(tmp_path) == "" and written(tmp_path / ".cache" / "sb3_flow") == kept


def test_a_read_only_installation_without_a_home_folder(read_only, tmp_path):
    home, given = tmp_path / "home", tmp_path / "given"
    home.mkdir(mode=0o555)
    warning = run(home)
    assert warning.count("cannot be kept on disk") == 1 and "NUMBA_CACHE_DIR" in warning
    assert run(home, NUMBA_CACHE_DIR=str(given)) == ""
    kept = written(given)
    assert kept
    assert run(home, NUMBA_CACHE_DIR=str(given)) == "" and written(given) == kept
    assert written(home) == {}
