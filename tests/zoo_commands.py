"""Running the commands of ``python -m sb3_flow.zoo`` in tests."""

import runpy
import subprocess
import sys

import gymnasium as gym
import pytest

from sb3_flow.zoo import ALGORITHMS

ALGOS = sorted(ALGORITHMS)
MAZE = "pointmaze-medium-navigate-singletask-v0"
# smaller than in the configurations, and just enough of it
SMALL = {
    "rql": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "fmq": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "fql": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "rlpd": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "dsrl": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "qam": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "n_critics:2", "learning_starts:100", "-n", "200"],
    "flow_ppo": ["-n", "300"],
    "recurrent_ppo": ["-n", "300"],
    "maskable_ppo": ["-params", "n_envs:1", "n_steps:300", "-n", "300"],
    "maskable_recurrent_ppo": ["-params", "n_envs:1", "n_steps:100", "policy_kwargs:dict(lstm_hidden_size=8)", "-n", "300"],
    "grpo": ["-params", "n_envs:8", "group_size:4", "n_steps:50", "-n", "300"],
    "gspo": ["-params", "n_envs:8", "group_size:4", "n_steps:50", "-n", "300"],
    "async_ppo": ["-n", "300"],
}


TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"  # by the version of Gymnasium


def environment(algo):
    if algo.startswith("maskable"):
        return TAXI
    return "Pendulum-v1" if algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam") else "CartPole-v1"


def zoo(*arguments):
    """``python -m sb3_flow.zoo ...`` in this process."""
    before = sys.argv
    sys.argv = ["python -m sb3_flow.zoo", *map(str, arguments)]
    try:
        runpy.run_module("sb3_flow.zoo", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def mistake(*arguments):
    """:return: what the command ends with"""
    with pytest.raises(SystemExit) as ended:
        zoo(*arguments)
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


def train(algo, folder, *arguments):
    zoo("train", "--algo", algo, "--env", environment(algo), "-f", folder, "--seed", 1, "--device", "cpu", *arguments)


def python(code):
    """A process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
