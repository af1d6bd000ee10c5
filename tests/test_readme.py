"""Every fenced block of the front page and of the manual runs as it is printed, only with smaller numbers."""

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hub_stand_in import stand_in
from manual import BLOCKS, PAGES, ROOT, shortened
from stable_baselines3.common import evaluation
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from tasks import PointEnv, collect
from zoo_commands import TAXI

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
    MaskablePPO,
    MaskableRecurrentPPO,
    OfflineDataset,
    RecurrentPPO,
)
from sb3_flow.data.generate import generate

# the blocks of add_an_algorithm.md are files of one program, which tests/test_add_an_algorithm.py runs; the blocks of
# integrations.md follow one another, and tests/test_integrations.py compares what they print with the page
INTEGRATIONS = "docs/guide/integrations.md"
ELSEWHERE = ("docs/development/add_an_algorithm.md", INTEGRATIONS)
SCRIPTS = [(page, text) for page, kind, text in BLOCKS if kind == "python" and page not in ELSEWHERE]
LINES = [line.split("  #")[0].strip() for _, kind, text in BLOCKS if kind == "sh" for line in text.strip().splitlines()]
COMMANDS = list(dict.fromkeys(LINES))  # each once, also where two pages print it
SPHINX = {"{include} ../README.md", "{include} ../CHANGELOG.md", "{toctree}", "{eval-rst}"}


def test_blocks_are_marked():
    assert {kind for _, kind, _ in BLOCKS} == {"python", "sh", "text"} | SPHINX
    pages = {page for page, kind, _ in BLOCKS if kind == "text"}  # a map, a diagram, a list of versions; what scripts print
    assert pages == {"docs/development/how_it_is_built.md", "docs/development/releases.md", INTEGRATIONS}


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv(length=30))


@pytest.fixture
def hubs():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def repositories():
    """Commands load from the Hub what earlier commands have pushed."""
    return {}


@pytest.fixture(autouse=True)
def no_ray_is_left():
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize(("page", "script"), SCRIPTS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(SCRIPTS)])
def test_scripts(page, script, dataset, tmp_path, monkeypatch, hubs):
    monkeypatch.chdir(tmp_path)
    # the objects that the text around a block speaks of
    env = make_vec_env("CartPole-v1", n_envs=2) if "AsyncPPO" in script else PointEnv(length=30)
    names = {"__name__": "script", "env": env, "dataset": dataset, "observation": np.zeros(2, np.float32)}
    if "log.npz" in script:
        rows = {name: getattr(dataset, name) for name in re.findall(r'log\["(\w+)"\]', script)}
        np.savez("log.npz", **rows)
    if "_hub" in script:
        hub = hubs.enter_context(stand_in(monkeypatch, tmp_path))  # of this machine's own
        if "load_from_hub" in script:
            PPO("MlpPolicy", env := gym.make("CartPole-v1")).learn(4).save("trained")
            hub.put("me/ppo-CartPole-v1", **{"ppo-CartPole-v1.zip": Path("trained.zip").read_bytes()})
    if "my_files" in script:
        Path("my_files").mkdir()
        fields = ("observations", "rewards", "terminated", "trajectory_ends", "next_observations")
        rows = {name: getattr(dataset, name) for name in fields}
        for number in range(2):
            np.savez(f"my_files/{number}.npz", actions=dataset.actions / 2, **rows)
    if "import ogbench" in script:
        assert len(script.strip().splitlines()) <= 12
        generate("pointmaze-medium-navigate", 2, out=tmp_path / "data", episode_length=60, progress_bar=False)
        # one step is enough here
        monkeypatch.setattr(evaluation, "evaluate_policy", lambda model, env, **_: model.predict(env.reset()))
    if "learning_curves" in script or "compare_acting" in script:
        names["model"] = RQL("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, n_critics=2).learn_offline(dataset, 2)
        names["ppo"] = PPO("MlpPolicy", "CartPole-v1", n_steps=64).learn(64)
        for folder in (Path("logs", name, seed) for name in ("rql", "fmq") for seed in "01"):
            folder.mkdir(parents=True)
            results = {name: np.random.rand(2, 3) for name in ("results", "ep_lengths", "successes")}
            np.savez(folder / "evaluations.npz", timesteps=[10, 20], **results)
    if "latest_checkpoint" in script:
        small = {"policy_kwargs": {"net_arch": [8]}, "n_critics": 2}
        RQL("MlpPolicy", env, **small).learn_offline(dataset, 2, CheckpointCallback(2, "checkpoints"))
    exec(compile(shortened(script), page, "exec"), names)
    for name in re.findall(r"path=\"(.*?)\"|\.save\(\"(.*?)\"", script):
        assert list(tmp_path.glob(f"{''.join(name)}*")), name
    model = names.get("model")
    assert model is None or model.num_timesteps or model.offline_updates or "export" in script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Later commands look at the files of earlier commands. A small suite and a dataset of the bench are there."""
    folder = tmp_path_factory.mktemp("manual")
    (folder / "small.yml").write_text(SMALL_SUITE)
    rng, n = np.random.default_rng(0), 40
    arrays = rng.normal(size=(n, 3)), rng.uniform(-2, 2, (n, 1)), rng.normal(size=n), np.zeros(n), np.arange(n) % 20 == 19
    OfflineDataset.from_arrays(*arrays, action_space=gym.spaces.Box(-2, 2, (1,))).save(folder / "my_dataset")
    return folder


SMALL_SUITE = """
offline_steps: 2
online_steps: 0
eval_freq: 2
n_final_episodes: 1
settings: {policy_kwargs: {net_arch: [8]}}
tasks: {Pendulum-v1: {dataset: "npz:my_dataset"}}
algorithms: {fql: {algo: fql}}
"""
OF_TRIALS = "--n-startup-trials 1 --n-evaluations 1 --no-optim-plots"
# of a command: what is appended to it or, after "=", replaced in it
SMALLER = {
    "sb3_flow.data.generate": ["200=2", "--workers 2=--workers 1"],
    "sb3_flow.zoo train --algo rql": ["-n 20 --eval-freq 20 --eval-episodes 1", "-params=-params offline_steps:2"],
    "sb3_flow.zoo train --algo flow_ppo --env CartPole-v1 --optimize": ["20=1", f"-n 300 {OF_TRIALS}"],
    "sb3_flow.zoo train": ["-n 600 --eval-freq 300 --eval-episodes 2"],
    "sb3_flow.zoo enjoy": [],
    "sb3_flow.zoo push_to_hub": ["-n 10"],
    "sb3_flow.zoo load_from_hub": [],
    "sb3_flow.zoo optimize --algo flow_ppo --env CartPole-v1 --study-name": ["100=1", f"-n 300 {OF_TRIALS}"],
    "sb3_flow.zoo optimize": ["50=2", f"-n 300 --storage study.log {OF_TRIALS}"],
    "sb3_flow.zoo sweep": [
        *("--seeds 5=--seeds 1", "--seeds 8=--seeds 1", "--seeds 3 7=--seeds 1", " Acrobot-v1=", "--workers 2=--workers 1"),
        *(
            "--algo ppo flow_ppo=--algo flow_ppo",
            "--ray-address auto --gpus-per-run 0.25=--workers 1",
            "--per-device 4=--workers 1",
            "--env=--out swept --env",
        ),
        "-n 600 --eval-freq 300 --eval-episodes 1",
    ],
    "sb3_flow.zoo plot": [],
    "sb3_flow.zoo bench": ["--suite cpu=--suite small.yml", "--workers 2=--workers 1"],
}
RECIPES = {
    "make demo": "examples/demo.py",
    "make test": "tests.sb3_suite.run RQL",
    "make suite": "tests.sb3_suite.run RQL",
    "make doc": "sphinx",
    "make dist": "-m build",
    "make test-wheel": "tests.release.wheel dist",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, folder, monkeypatch, capsys, hubs, repositories, tmp_path):
    if command.startswith("make "):
        # the recipes themselves are run by CI (test) and test_the_demo
        planned = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert RECIPES[command] in planned
        return
    if command.startswith("pip install "):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        requirement = shlex.split(command)[2]
        name, _, extras = requirement.partition(" @ ")[0].partition("[")
        assert name in ("torch", project["name"])
        assert set(extras.rstrip("]").split(",")) - {""} <= set(project["optional-dependencies"])
        return
    if command.startswith("optuna-dashboard "):
        return  # tests.integrations.run opens the study and asks for its trials
    # test_ranks.py runs torchrun
    command = re.sub(r"^torchrun --nproc-per-node=\d+", "python", command)
    name, *_ = [name for name in SMALLER if command.startswith(f"python -m {name} ")]
    for change in SMALLER[name]:
        old, separator, new = change.partition("=")
        command = command.replace(old, new) if separator else f"{command} {change}"
    command = command.replace("Taxi-v4", TAXI)  # which an older Gymnasium has by another name
    _, _, module, *arguments = shlex.split(command)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    if "_hub" in command:
        hubs.enter_context(stand_in(monkeypatch, tmp_path)).repositories = repositories
    before = {path for path in folder.rglob("*") if path.is_file()}
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    if "enjoy" in arguments:
        assert "Mean reward" in capsys.readouterr().out
    elif "push_to_hub" in arguments:
        assert repositories.keys() == {"me/flow_ppo-CartPole-v1"}
    else:
        assert {path for path in folder.rglob("*") if path.is_file()} > before


def test_the_demo(tmp_path, monkeypatch, capsys):
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    names, long = demo["main"].__globals__, demo["ENV_ID"]
    gym.register("short-v0", lambda **kwargs: gym.make(long, max_episode_steps=50, **kwargs), disable_env_checker=True)
    short = {"ENV_ID": "short-v0", "EPISODES": 2, "CURVE_EPISODES": 2}
    short["generate"] = lambda name, *_, out, **__: generate(name, 3, out=out, progress_bar=False, episode_length=100)
    for name, value in short.items():
        monkeypatch.setitem(names, name, value)
    steps = ["--offline-steps", "4", "--online-steps", "20", "--fmq-steps", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path), *steps])
    demo["main"]()
    del gym.registry["short-v0"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("+-") == 7  # the rows of the table


def test_the_front_page_is_short_and_names_every_class():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 170
    table = readme.split("## Which class do I want?")[1].split("##")[0]
    on_policy = PPO, MaskablePPO, RecurrentPPO, MaskableRecurrentPPO, GRPO, GSPO, AsyncPPO
    for algorithm in (RQL, FMQ, FQL, RLPD, DSRL, QAM, FlowMapPolicy, *on_policy):
        assert f"`{algorithm.__name__}`" in table
