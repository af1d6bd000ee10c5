"""AsyncPPO whose collectors are Ray actors: equal to processes, and what happens when actors, nodes and the head are lost."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_environments import clocks
from gymnasium import spaces
from on_policy import DICT, assert_same_weights, learned, walks
from ray_cluster import ray_cluster
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from test_async_ppo import SMALL, Record, Watched, check_lag_bounds, gone, without_times

from sb3_flow import PPO, AsyncPPO
from sb3_flow.collect import CollectorError, ray_pool

__all__ = ["ray_cluster"]
pytestmark = pytest.mark.usefixtures("ray_cluster")
TWO: dict[str, Any] = {**SMALL, "n_collectors": 2, "collectors": "ray"}


def pids(model: AsyncPPO) -> list[int]:
    """:return: the process ids of the actors"""
    return [int(re.search(r"pid (\d+)", one.name)[1]) for one in model._collectors._pool.collectors]


def test_ray_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'`collectors="ray"` needs the package ray: pip install \'sb3-flow\[ray\]\''):
        AsyncPPO("MlpPolicy", lambda: clocks(1), **TWO)
    AsyncPPO("MlpPolicy", lambda: clocks(1), **{**TWO, "collectors": "process"})


def test_arguments_of_ray() -> None:
    with pytest.raises(ValueError, match=r"`min_collectors` must be at most `n_collectors` \(2\), but it is 3"):
        AsyncPPO("MlpPolicy", lambda: clocks(1), min_collectors=3, **TWO)
    with pytest.raises(ValueError, match="`collectors` must be"):
        AsyncPPO("MlpPolicy", lambda: clocks(1), **{**TWO, "collectors": "threads"})
    with pytest.raises(ValueError, match="`lifetime` in `ray_options` cannot be chosen"):
        AsyncPPO("MlpPolicy", lambda: clocks(1), ray_options={"lifetime": "detached"}, **TWO)
    with pytest.warns(UserWarning, match='`ray_options` has no effect here: `collectors` is "process"'):
        AsyncPPO("MlpPolicy", lambda: clocks(1), ray_options={"num_cpus": 2}, **{**TWO, "collectors": "process"})


def test_actors_learn_what_processes_learn() -> None:
    """To the last bit, with normalised Dict observations."""

    def make() -> VecNormalize:
        return VecNormalize(walks(2, spaces.Box(-1, 1, (2,), np.float32), DICT), norm_obs_keys=["a"])

    found = []
    for collectors in ("process", "ray"):
        kwargs = {**TWO, "collectors": collectors, "policy_kwargs": {"net_arch": [8]}}
        model = AsyncPPO("MultiInputPolicy", make, **kwargs)
        learned(model, 2 * 64)
        weights, logged = learned(model, 2 * 64)
        logged = [{name: value for name, value in without_times(one).items() if name != "async/lost"} for one in logged]
        statistics = model.get_vec_normalize_env()
        found.append((weights, logged, statistics.obs_rms["a"].mean.tolist(), float(statistics.ret_rms.var)))
        model.close()
    assert_same_weights(found[1][0], found[0][0])
    assert found[1][1:] == found[0][1:]


def test_one_actor_in_sync_is_ppo() -> None:
    found = []
    for kind, kwargs in ((PPO, {}), (AsyncPPO, {"mode": "sync", "collectors": "ray"})):
        model = kind("MlpPolicy", walks(3, spaces.Discrete(3)), **SMALL, **kwargs)
        weights, logged = learned(model, 4 * 48)
        found.append((weights, [{key: one[key] for key in one if not key.startswith("async/")} for one in logged]))
    assert_same_weights(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def test_lag_never_exceeds_its_bound() -> None:
    make = lambda: clocks(1, sleep=2e-4)  # noqa: E731
    check_lag_bounds(Watched("MlpPolicy", make, mode="free", n_slots=3, max_policy_lag=1, **TWO), 6)


class UntilAllWork(Record):
    """Ends training when all collectors work, some of them in place of lost ones."""

    def __init__(self, lost: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.lost = lost

    def _on_step(self) -> bool:
        pool = self.model._collectors._pool
        again = pool.lost == self.lost and all(one.works for one in pool.collectors)
        return super()._on_step() and not (again and self.num_timesteps % 32 == 0)


def test_actors_stay_are_made_anew_when_lost_and_end_with_the_model() -> None:
    """Rollouts stay whole, losses are counted, and later all collect again."""
    model = Watched("MlpPolicy", lambda: VecMonitor(clocks(1, sleep=1e-3)), collector_timeout=2.0, **TWO)
    stopped = Record(at=20, action=lambda _: False)
    model.learn(10 * 32, callback=stopped)
    before = pids(model)
    assert stopped.steps == 20 and model._collectors.outstanding == []
    model.learn(3 * 32)
    assert model.num_timesteps == 3 * 32 and pids(model) == before
    causes = {signal.SIGKILL: "The actor died", signal.SIGSTOP: "its environments made no step for 2 seconds"}
    for lost, (number, cause) in enumerate(causes.items(), start=1):
        victim = pids(model)[1]

        def end(_: Any, victim: int = victim, number: int = number) -> bool:
            os.kill(victim, number)
            return True

        with pytest.warns(UserWarning, match=rf"collector 1 \(pid {victim} on .*was lost: {cause}"):
            model.learn(10**6, callback=UntilAllWork(lost, at=40, action=end))
        assert model._collectors.lost == lost and victim not in pids(model) and gone(victim, 20)
    model.check_behaviour()
    for one in model.kept:
        assert np.isfinite(one["returns"]).all() and one["observations"].shape == (32, 2)
    timesteps, after = model.num_timesteps, pids(model)
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == timesteps + 64 and model._collectors.lost == 2 and after[0] == before[0]
    del model, stopped  # which has a reference to the model
    gc.collect()
    assert all(gone(pid, 20) for pid in after)


def test_an_exception_in_an_environment_is_not_a_loss() -> None:
    model = AsyncPPO("MlpPolicy", lambda: clocks(1, trouble="raise"), **{**TWO, "n_collectors": 1})
    with pytest.raises(CollectorError, match="ZeroDivisionError: the wheel is off") as caught:
        model.learn(10 * 32)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and model._collectors is None


def test_environments_that_kill_their_actor_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def suicide() -> Any:
        env = clocks(1)
        env.envs[0].step = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        return env

    monkeypatch.setattr(ray_pool, "MAX_FAILURES", 2)
    model = AsyncPPO("MlpPolicy", suicide, **{**TWO, "n_collectors": 1})
    message = "2 collectors were lost in this place"
    with pytest.warns(UserWarning, match="was lost"), pytest.raises(CollectorError, match=message):
        model.learn(10 * 32)


def test_a_lost_node(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do its work; if too few are left, an error names the missing; a new node is used."""
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"here": 1}) for _ in range(2)]
    options = {"resources": {"here": 1}}
    make = lambda: clocks(1, sleep=1e-3)  # noqa: E731
    model = AsyncPPO("MlpPolicy", make, ray_options=options, min_collectors=1, collector_timeout=10.0, **TWO)
    try:
        model.learn(2 * 32)
        ray_cluster.remove_node(nodes.pop())
        with pytest.warns(UserWarning, match="was lost"):
            model.learn(20 * 32, reset_num_timesteps=False)
        pool = model._collectors._pool
        assert model.num_timesteps == 22 * 32 and pool.lost == 1 and [one.works for one in pool.collectors].count(True) == 1
        nodes.append(ray_cluster.add_node(num_cpus=1, resources={"here": 1}))

        class Until(Record):
            def _on_step(self) -> bool:
                return not all(one.works for one in pool.collectors)

        model.learn(10**6, callback=Until(), reset_num_timesteps=False)
        monkeypatch.setattr(pool, "_patience", 4.0)
        monkeypatch.setattr(pool, "min_collectors", 2)
        ray_cluster.remove_node(nodes.pop())
        message = (
            r"1 of 2 collectors are there, `min_collectors` is 2; for 4 seconds these did not start: collector \d.*was lost"
        )
        with pytest.warns(UserWarning, match="was lost"), pytest.raises(CollectorError, match=message):
            model.learn(10**6, reset_num_timesteps=False)
        assert model._collectors is None
    finally:
        for node in nodes:
            ray_cluster.remove_node(node)


def test_too_few_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "START_TIMEOUT", 2.0)
    model = AsyncPPO("MlpPolicy", lambda: clocks(1), collector_timeout=2.0, ray_options={"num_cpus": 64}, **TWO)
    with pytest.raises(CollectorError, match=r"0 of 2 collectors are there.*'num_cpus': 64.*the cluster has \d CPUs"):
        model.learn(32)


HEADLESS = """
import os, signal, sys, time
import ray
from ray.cluster_utils import Cluster
from async_environments import clocks
from stable_baselines3.common.callbacks import CheckpointCallback
from sb3_flow import AsyncPPO
from sb3_flow.collect import CollectorError, ray_pool

ray_pool.HEAD_TIMEOUT = 4.0
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
of_workers = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=of_workers)
make = lambda: clocks(1, sleep=1e-3)
model = AsyncPPO("MlpPolicy", make, n_collectors=2, collectors="ray", n_steps=16, batch_size=16, seed=0)

class Ending(CheckpointCallback):
    def _on_step(self):
        if self.n_calls == 40:
            time.sleep(0.5)  # the next rollout is there, so that the next thing is to send weights
            for name, processes in cluster.head_node.all_processes.items():
                for one in processes if name != "raylet" else []:  # which is this program's own node: Ray would end it
                    os.kill(one.process.pid, signal.SIGKILL)
            self.since = time.monotonic()
        return super()._on_step()

callback = Ending(16, sys.argv[1])
try:
    model.learn(10**6, callback=callback)
except CollectorError as error:
    print("ERROR", error, time.monotonic() - callback.since, flush=True)
loaded = AsyncPPO.load(os.path.join(sys.argv[1], "rl_model_64_steps"))
print("LOADED", loaded.num_timesteps, flush=True)
cluster.shutdown()
"""


def test_a_killed_head_ends_in_an_error_in_bounded_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEADLESS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, text=True, capture_output=True, timeout=150, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("ERROR", "LOADED"))]
    assert len(told) == 2, (time.monotonic() - since, done.stdout[-2000:], done.stderr[-3000:])
    assert "has not answered for 4 seconds. This program has left the cluster." in told[0]
    assert float(told[0].split()[-1]) < 30 and told[1] == "LOADED 64"
