"""Every fenced block of the README runs as it is printed, only with smaller numbers."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common import evaluation
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from tasks import PointEnv, collect

from sb3_flow import FMQ, GRPO, GSPO, PPO, RQL, AsyncPPO
from sb3_flow.data.generate import generate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
SCRIPTS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [line.split("  #")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.strip().splitlines()]


def shortened(text):
    """Numbers with a thousands separator are amounts of training."""
    return re.sub(r"\b\d{1,3}(_\d{3})+\b", "4", text)


def test_blocks_are_marked():
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "text"}


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv(length=30))


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_scripts(script, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what the text around a block speaks of
    env = make_vec_env("CartPole-v1", n_envs=2) if "AsyncPPO" in script else PointEnv(length=30)
    names = {"env": env, "dataset": dataset, "observation": np.zeros(2, np.float32)}
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
    exec(compile(shortened(script), "README.md", "exec"), names)
    for name in re.findall(r"path=\"(.*?)\"|model.save\(\"(.*?)\"", script):
        assert list(tmp_path.glob(f"{''.join(name)}*")), name
    model = names.get("model")
    assert model is None or model.num_timesteps or model.offline_updates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Later commands look at what earlier ones left."""
    return tmp_path_factory.mktemp("readme")


# of a command: what is appended to it or, after "=", replaced in it
SMALLER = {
    "sb3_flow.data.generate": ["200=2", "--workers 2=--workers 1"],
    "sb3_flow.zoo train --algo rql": ["-n 20 --eval-freq 20 --eval-episodes 1", "-params=-params offline_steps:2"],
    "sb3_flow.zoo train": ["-n 600 --eval-freq 300 --eval-episodes 2"],
    "sb3_flow.zoo enjoy": [],
    "sb3_flow.zoo optimize": ["50=2", "-n 300 --n-startup-trials 1 --n-evaluations 1 --no-optim-plots --storage study.log"],
    "sb3_flow.zoo plot": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, folder, monkeypatch, capsys):
    if command.startswith("make "):
        # the recipes themselves are run by CI (test) and test_the_demo
        planned = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert {"make demo": "examples/demo.py", "make test": "tests.sb3_suite.run RQL", "make doc": "sphinx"}[
            command
        ] in planned
        return
    name, *_ = [name for name in SMALLER if command.startswith(f"python -m {name} ")]
    for change in SMALLER[name]:
        old, separator, new = change.partition("=")
        command = command.replace(old, new) if separator else f"{command} {change}"
    _, _, module, *arguments = shlex.split(command)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    before = {path for path in folder.rglob("*") if path.is_file()}
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    if "enjoy" in arguments:
        assert "Mean reward" in capsys.readouterr().out
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
    assert capsys.readouterr().out.count("+-") == 6  # the rows of the table


def test_classes_are_those_of_the_package():
    table = README.split("## Which class do I want?")[1].split("##")[0]
    for one in (RQL, FMQ, PPO, GRPO, GSPO, AsyncPPO):
        assert f"`{one.__name__}`" in table
