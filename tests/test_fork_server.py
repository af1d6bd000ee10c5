"""The process that makes collectors: what a collector takes over from the learner, and who outlives whom."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch as th
from async_environments import Clock
from stable_baselines3.common.policies import ActorCriticPolicy
from test_async_ppo import SMALL, gone, processes

from sb3_flow import AsyncPPO
from sb3_flow.collect.fork_server import fork_server


class Reporter(gym.Wrapper):
    """Prints at each reset what the process that steps it has."""

    def reset(self, **kwargs):
        import on_the_way  # a module of a folder that is on the learner's path alone

        loaded = "torch._dynamo" in sys.modules  # takes a second
        print("collector", os.environ.get("ANSWER"), os.getcwd(), on_the_way.NAME, loaded, file=sys.stderr, flush=True)
        return super().reset(**kwargs)


def test_a_collector_takes_over_what_the_learner_has_now(tmp_path, monkeypatch, capfd):
    AsyncPPO("MlpPolicy", Clock(), **SMALL).learn(16)  # the server runs now, and knows nothing of the following
    server = fork_server().pid
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "on_the_way.py").write_text("NAME = 'here'\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("ANSWER", "42")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    model = AsyncPPO("MlpPolicy", lambda: Reporter(Clock()), **SMALL)
    model.learn(16)
    pid = model._collectors.pids[0]
    model.close()
    assert f"collector 42 {tmp_path} here False\n" in capfd.readouterr().err
    assert processes()[server] == os.getpid() and gone(pid) and fork_server().pid == server


class OwnOptimizer(ActorCriticPolicy):
    """Names its optimizer itself, so that nobody else may."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, optimizer_class=th.optim.RMSprop, **kwargs)


@pytest.mark.parametrize(
    ("policy", "options"), [(OwnOptimizer, {}), ("MlpPolicy", {"policy_kwargs": {"optimizer_class": th.optim.RMSprop}})]
)
def test_a_policy_with_another_optimizer_collects(policy, options):
    model = AsyncPPO(policy, Clock(), **SMALL, **options)
    assert isinstance(model.policy.optimizer, th.optim.RMSprop)
    model.learn(32)
    assert model.num_timesteps == 32


def test_a_model_learns_on_without_the_server():
    model = AsyncPPO("MlpPolicy", Clock(), **SMALL)
    model.learn(16)
    collector, server = model._collectors.pids[0], fork_server().pid
    assert processes()[collector] == server
    os.kill(server, signal.SIGKILL)
    assert gone(server)
    model.learn(2 * 16)
    assert model._collectors.pids[0] == collector
    other = AsyncPPO("MlpPolicy", Clock(), **SMALL)
    other.learn(16)
    assert processes()[other._collectors.pids[0]] == fork_server().pid != server
    for one in (model, other):
        pid = one._collectors.pids[0]
        one.close()
        assert gone(pid, 1)


HEADER = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from async_environments import Clock
from sb3_flow import AsyncPPO
from sb3_flow.collect.fork_server import fork_server

def learn():
    model = AsyncPPO("MlpPolicy", Clock(), n_steps=16, n_epochs=1, device="cpu")
    model.learn(64)
    with open(sys.argv[1], "a") as file:
        print(fork_server().pid, model.num_timesteps, file=file)
"""
WITHOUT_OUTPUT = """
for descriptor in (0, 1, 2):
    os.close(descriptor)
learn()
"""
FORKED = """
learn()
pid = os.fork()
learn()  # the parent with its server, the child with another
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
learn()
"""


def servers_of(program: str, folder: Path) -> list[int]:
    """:return: the server at each ``learn`` of a program"""
    told = folder / "told"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch with several threads hangs in a fork
    subprocess.run([sys.executable, "-c", HEADER + program, told], check=True, timeout=120, env=environment)
    servers, steps = zip(*(map(int, line.split()) for line in told.read_text().splitlines()), strict=True)
    assert set(steps) == {64}
    return list(servers)


def test_a_program_without_output_leaves_no_server(tmp_path):
    assert gone(*servers_of(WITHOUT_OUTPUT, tmp_path))


def test_a_fork_of_the_learner_has_a_server_of_its_own(tmp_path):
    servers = servers_of(FORKED, tmp_path)
    (others,) = set(servers) - {servers[0]}
    assert servers[0] == servers[-1] and servers.count(others) == 1
    assert gone(servers[0]) and gone(others)
