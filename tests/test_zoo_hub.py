"""``push_to_hub`` and ``load_from_hub`` of the zoo: a run goes to the Hub and comes back to where ``enjoy`` finds it."""

import inspect
import io
import json
import os
import re
import shlex
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import rl_zoo3.train
import yaml
from hub_stand_in import hub as hub
from rl_zoo3.load_from_hub import download_from_hub as theirs
from zoo_commands import SMALL, environment, mistake, train, zoo

from sb3_flow.zoo import ALGORITHMS
from sb3_flow.zoo.hub_commands import download_from_hub, training_command

NORMALIZED = ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "normalize:True", "-n", "200"]
RUNS = {"rql": NORMALIZED, "flow_ppo": SMALL["flow_ppo"], "ppo": ["-params", "n_steps:64", "-n", "128"]}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder in which three algorithms were trained; the last is the zoo's own."""
    folder = tmp_path_factory.mktemp("logs")
    for algo in RUNS:
        train(algo, folder, *RUNS[algo], "--eval-freq", 100, "--eval-episodes", 2)
    return folder


def push(algo, folder, *arguments):
    which = ["--algo", algo, "--env", environment(algo), "-f", folder, "-orga", "me", "--device", "cpu"]
    zoo("push_to_hub", *which, *arguments)


def fetch(algo, folder, *arguments):
    zoo("load_from_hub", "--algo", algo, "--env", environment(algo), "-f", folder, "-orga", "me", *arguments)


def run_of(folder, algo, number=1):
    return folder / algo / f"{environment(algo)}_{number}"


def written(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("algo", RUNS)
def test_a_run_goes_there_and_comes_back(algo, logs, hub, tmp_path, capsys):
    env_id = environment(algo)
    push(algo, logs, "--no-render")
    fetch(algo, tmp_path / "new")
    back, before = written(run_of(tmp_path / "new", algo)), written(run_of(logs, algo))
    assert back.pop(f"{env_id}/env_kwargs.yml") and {"best_model.zip", "evaluations.npz", f"{env_id}.zip"} <= back.keys()
    assert (f"{env_id}/vecnormalize.pkl" in back) == (algo == "rql")
    assert before.pop(f"{env_id}/command.txt")  # which has folders of this machine
    assert back == before  # to the last byte, with config.yml, args.yml and monitor files
    capsys.readouterr()
    seen = []
    for folder in (logs, tmp_path / "new"):
        for best in ([], ["--load-best"]):
            which = ["--algo", algo, "--env", env_id, "-f", folder, *best]
            zoo("enjoy", *which, "-n", 220, "--no-render", "--device", "cpu")
            seen.append(re.findall(r"^(?:Episode|Mean).*$", capsys.readouterr().out, re.M))
    assert seen[0] and seen[0] == seen[2] and seen[1] == seen[3]


def test_the_card_of_a_run(logs, hub, capsys):
    push("rql", logs, "--no-render", "--seed", 3)
    files = hub.files("me/rql-Pendulum-v1")
    results = json.loads(files["results.json"])
    head, body = files["README.md"].decode().split("---\n", 2)[1:]
    metric = yaml.safe_load(head)["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert metric == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}" and f"mean return {metric}" in (
        capsys.readouterr().out
    )
    assert results["n_eval_episodes"] == 10 and results["mean_reward"] < -100 and results["seed"] == 3
    assert (
        "1. Online: 200 environment steps in Pendulum-v1." in body
        and "'normalize': True" in body
        and "'n_timesteps': 200" in body
    )
    command = re.search(r"^python -m sb3_flow.zoo train .*$", body, re.M)[0]
    assert "--algo rql --env Pendulum-v1 --seed 1 -n 200" in command and "normalize:True" in command
    made = json.loads(files["config.json"])
    assert made["arguments"]["buffer_size"] > 1 and made["seed"] == 1 and made["algorithm"] == "RQL"


def test_the_commands_of_the_card_run(logs, hub, tmp_path, monkeypatch, capsys):
    push("rql", logs, "--no-render", "-name", "my-model")
    body = hub.files("me/my-model")["README.md"].decode()
    trained, loaded, enjoyed = re.findall(r"^python -m (sb3_flow\.zoo .*)$", body, re.M)
    assert "-name my-model" in loaded
    monkeypatch.chdir(tmp_path)
    zoo(*shlex.split(loaded)[1:])
    zoo(*shlex.split(enjoyed)[1:], "--no-render", "-n", 220)
    assert "Mean reward" in capsys.readouterr().out
    zoo(*shlex.split(trained)[1:], "--device", "cpu", "-f", "again", "--eval-freq", 100, "--eval-episodes", 2)
    again, first = (ALGORITHMS["rql"].load(run_of(folder, "rql") / "Pendulum-v1.zip") for folder in (Path("again"), logs))
    for one, other in zip(again.policy.parameters(), first.policy.parameters(), strict=True):
        np.testing.assert_array_equal(one.detach(), other.detach())
    names = {"env": __import__("gymnasium").make("Pendulum-v1")}
    exec(re.findall(r"```python\n(import os.*?)```", body, re.S)[0], names)
    assert names["model"].num_timesteps == 200


def test_the_zoos_own_arguments_are_known():
    for module, ours in (("push_to_hub", "_arguments_of_push"), ("load_from_hub", "load_from_hub")):
        flags = re.findall(r'"(--?[\w-]+)"', Path(rl_zoo3.__path__[0], f"{module}.py").read_text())
        source = inspect.getsource(vars(sys.modules["sb3_flow.zoo.hub_commands"])[ours])
        assert len(flags) > 8 and all(f'"{flag}"' in source for flag in flags), module
    assert inspect.signature(download_from_hub).parameters.keys() == inspect.signature(theirs).parameters.keys()


def test_a_command_is_that_of_the_run(monkeypatch, tmp_path):
    """What the zoo reads from the command is what it read from the user's."""
    seen = []

    class Stop(Exception):
        pass

    def note(args, *_, **__):
        seen.append(vars(args))
        raise Stop

    (tmp_path / "mine.yml").write_text("")
    monkeypatch.chdir(tmp_path)
    given = [
        "--algo",
        "rql",
        "--env",
        "Pendulum-v1",
        "--seed",
        "7",
        "-n",
        "30",
        "--vec-env",
        "subproc",
        "--conf-file",
        "mine.yml",
    ]
    given += ["--env-kwargs", "g:9.0", "-params", "policy_kwargs:dict(net_arch=[8])", "offline_dataset:'npz:a b'", "rho:None"]
    command = ["-m", "sb3_flow.zoo", "train", *given]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["zoo", *command[3:]])
        monkeypatch.setattr(rl_zoo3.train, "ExperimentManager", note)
        with pytest.raises(Stop):
            rl_zoo3.train.train()
        command = shlex.split(training_command(seen[-1]))[1:]
    assert seen[0] == seen[1]


def test_a_command_has_no_folders():
    location, names = "npz:/home/John Smith/d.npz", {"id": ["ALE/Pong-v5", "~ann/x"], "rate": 0.5}
    args = {"algo": "rql", "env": "ALE/Pong-v5", "seed": 1, "trained_agent": "logs/ann/x.zip", "conf_file": "../ann/mine.yml"}
    told = training_command({**args, "hyperparams": {"offline_dataset": location}, "env_kwargs": {"names": names}})
    assert "ann" not in told and "John" not in told
    words = shlex.split(told)
    assert {"x.zip", "mine.yml", "ALE/Pong-v5", "offline_dataset:'npz:d.npz'"} <= set(words)
    assert "names:{'id': ['ALE/Pong-v5', 'x'], 'rate': 0.5}" in words


def test_a_video(logs, hub):
    push("flow_ppo", logs, "-n", 10)
    assert hub.files("me/flow_ppo-CartPole-v1")["replay.mp4"][4:8] == b"ftyp"
    assert b"render_mode" not in hub.files("me/flow_ppo-CartPole-v1")["env_kwargs.yml"]


def test_a_checkpoint_or_the_best_model_is_pushed(logs, hub):
    push("flow_ppo", logs, "--no-render", "--load-best", "--stochastic")
    files = hub.files("me/flow_ppo-CartPole-v1")
    assert files["flow_ppo-CartPole-v1.zip"] == (run_of(logs, "flow_ppo") / "best_model.zip").read_bytes()
    assert json.loads(files["results.json"])["is_deterministic"] is False


def test_rl_zoo3_loads_what_we_push(logs, hub, tmp_path):
    """With statistics, without which its version 2.9.2 ends in an error that it does not expect."""
    from huggingface_sb3 import EnvironmentName

    push("rql", logs, "--no-render")
    theirs("rql", EnvironmentName("Pendulum-v1"), 0, str(tmp_path), "me")
    left_out = {"best_model.zip", "Pendulum-v1/command.txt"}
    assert written(run_of(tmp_path, "rql")).keys() >= written(run_of(logs, "rql")).keys() - left_out


def test_a_folder_that_is_there(logs, hub, tmp_path):
    push("flow_ppo", logs, "--no-render")
    for number in (1, 2):
        fetch("flow_ppo", tmp_path)  # into a new folder
        assert run_of(tmp_path, "flow_ppo", number).is_dir()
    (run_of(tmp_path, "flow_ppo", 1) / "old").touch()
    which = ("load_from_hub", "--algo", "flow_ppo", "--env", "CartPole-v1", "-f", tmp_path, "-orga", "me", "--exp-id")
    assert "is there already: --force replaces" in mistake(*which, 1)
    zoo(*which, 1, "--force")
    assert not (run_of(tmp_path, "flow_ppo", 1) / "old").exists() and run_of(tmp_path, "flow_ppo", 1).is_dir()
    assert "is there already: give another --folder" in mistake(*which, -1, "--force")  # it holds the other runs
    assert {path.name for path in (tmp_path / "flow_ppo").iterdir()} == {"CartPole-v1_1", "CartPole-v1_2"}


@pytest.mark.parametrize("file", ["flow_ppo-CartPole-v1.zip", "args.yml", "train_eval_metrics.zip"])
def test_a_connection_that_breaks_off_leaves_nothing(file, logs, hub, tmp_path, monkeypatch):
    push("flow_ppo", logs, "--no-render")
    hub.breaks_off = file
    monkeypatch.setattr("time.sleep", lambda _: None)
    which = ("load_from_hub", "--algo", "flow_ppo", "--env", "CartPole-v1", "-f", tmp_path / "new", "-orga", "me")
    assert "did not answer as expected about me/flow_ppo-CartPole-v1" in mistake(*which)
    assert not (tmp_path / "new").exists()


def test_mistakes(logs, hub, tmp_path, monkeypatch):
    which = ["--env", "CartPole-v1", "-f", tmp_path / "new", "-orga", "me"]
    assert "There is no me/flow_ppo-CartPole-v1 on the Hub" in mistake("load_from_hub", "--algo", "flow_ppo", *which)
    push("flow_ppo", logs, "--no-render")
    other = ["--algo", "grpo", *which, "-name", "flow_ppo-CartPole-v1"]
    assert "has no file 'grpo-CartPole-v1.zip'; it has" in mistake("load_from_hub", *other)
    hub.put(
        "me/flow_ppo-CartPole-v1", **{"grpo-CartPole-v1.zip": hub.files("me/flow_ppo-CartPole-v1")["flow_ppo-CartPole-v1.zip"]}
    )
    assert "was given a file that PPO saved" in mistake("load_from_hub", *other)
    hub.put("me/flow_ppo-CartPole-v1", config__yml=None)
    assert "has no file 'config.yml'" in mistake("load_from_hub", "--algo", "flow_ppo", *which)
    monkeypatch.delenv("TRUST_REMOTE_CODE")
    hub.asked.clear()
    assert "set the environment variable `TRUST_REMOTE_CODE`" in mistake("load_from_hub", "--algo", "flow_ppo", *which)
    assert hub.asked == [] and not (tmp_path / "new").exists()
    monkeypatch.delenv("HF_TOKEN")
    pushed = ["push_to_hub", "--algo", "flow_ppo", *which]
    pushed[pushed.index("-f") + 1] = logs
    assert "needs a token, but none was found" in mistake(*pushed)
    pushed[pushed.index("-f") + 1] = tmp_path
    assert "flow_ppo/CartPole-v1_0" in mistake(*pushed) or "not found" in mistake(*pushed)


def test_files_of_an_archive_stay_in_the_folder(logs, hub, tmp_path):
    push("flow_ppo", logs, "--no-render")
    with zipfile.ZipFile(evil := io.BytesIO(), "w") as archive:
        for name in ("../../outside.csv", "CartPole-v1.zip", "0.monitor.csv", "CartPole-v1/config.yml"):
            archive.writestr(name, "evil")
    hub.put("me/flow_ppo-CartPole-v1", train_eval_metrics__zip=evil.getvalue())
    fetch("flow_ppo", tmp_path / "new")
    changed = {name for name, content in written(tmp_path / "new").items() if content == b"evil"}
    assert changed == {"flow_ppo/CartPole-v1_1/0.monitor.csv"} and not list(tmp_path.rglob("outside.csv"))


def bomb():
    """An archive that tells a size of 2 GB."""
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("0.monitor.csv", b"few")
        archive.infolist()[0].file_size = 2 * 10**9
    return file.getvalue()


def damaged():
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.monitor.csv", bytes(range(256)) * 9)
    content = bytearray(file.getvalue())
    content[45:60] = b"\xff" * 15
    return bytes(content)


@pytest.mark.parametrize(("content", "why"), [(b"no archive", "not a zip"), (bomb(), "more than"), (damaged(), "")])
def test_curves_that_cannot_be_read_are_left_out(content, why, logs, hub, tmp_path):
    push("flow_ppo", logs, "--no-render")
    hub.put("me/flow_ppo-CartPole-v1", train_eval_metrics__zip=content)
    with pytest.warns(UserWarning, match=f"The curves of the run are left out.*{why}"):
        fetch("flow_ppo", tmp_path)
    back = written(run_of(tmp_path, "flow_ppo")).keys()
    assert {"CartPole-v1.zip", "best_model.zip"} <= back and "train_eval_metrics.zip" not in back


def test_a_folder_that_is_not_replaced_stays(logs, hub, tmp_path, monkeypatch):
    push("flow_ppo", logs, "--no-render")
    fetch("flow_ppo", tmp_path)
    run = run_of(tmp_path, "flow_ppo")
    (run / "notes").write_text("a user's own")
    rename, before = Path.rename, written(run)

    def fails(path, target):
        if target == run and path.name == run.name:
            raise PermissionError("the disk is full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    which = ("--algo", "flow_ppo", "--env", "CartPole-v1", "-f", tmp_path, "-orga", "me", "--exp-id", 1, "--force")
    assert mistake("load_from_hub", *which) == "error: the disk is full"
    assert written(run) == before and list(run.parent.iterdir()) == [run]


def test_enjoy_fetches_models_of_sb3(logs, hub, tmp_path, monkeypatch, capsys):
    """Without statistics, for which rl-zoo3 2.9.2 looks in vain."""
    push("ppo", logs, "--no-render")
    assert "vec_normalize.pkl" not in hub.files("me/ppo-CartPole-v1")
    hub.repositories["sb3/ppo-CartPole-v1"] = hub.repositories["me/ppo-CartPole-v1"]
    monkeypatch.chdir(tmp_path)
    zoo("enjoy", "--algo", "ppo", "--env", "CartPole-v1", "-n", 220, "--no-render", "--device", "cpu")
    assert "Mean reward" in capsys.readouterr().out and os.listdir("rl-trained-agents/ppo") == ["CartPole-v1_1"]
