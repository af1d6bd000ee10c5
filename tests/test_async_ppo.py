"""AsyncPPO: what it shares with PPO to the last bit, how old its rollouts are, and that nothing is left of its process."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from async_environments import Clock, clock_processes, clocks
from on_policy import ACTION_SPACES, DICT, assert_same_weights, learned, walks
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from sb3_flow import PPO, AsyncPPO
from sb3_flow.collect import CollectorError
from sb3_flow.collect.memory import Layout, attach, reserve
from sb3_flow.collect.weights import PublishedWeights
from sb3_flow.kernels import compute_vtrace

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu", "learning_rate": 3e-3}


def processes() -> dict[int, int]:
    """:return: the parent of each process that has not ended"""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def forked(pid: int) -> bool:
    """:return: whether a process is the fork server, a collector, or was forked from one"""
    with contextlib.suppress(OSError):
        return b"sb3_flow.collect.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def children(pid: int) -> set[int]:
    """
    :return: processes that this one started, with the collectors that the fork server made in the place of the server, which
        stays, and without the helpers that Python's multiprocessing leaves behind
    """
    found = set()
    for child in [child for child, parent in processes().items() if parent == pid]:
        with contextlib.suppress(OSError):
            if forked(child) and not forked(pid):
                found |= children(child)
            elif b"from multiprocessing." not in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(child)
    return found


def shared_blocks(pid: int | str = "self") -> int:
    """:return: number of blocks of the collectors' shared memory, which has no names, that are open or mapped"""
    mapped = Path(f"/proc/{pid}/maps").read_text().count("memfd:sb3_flow")
    opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()]
    return mapped + sum("memfd:sb3_flow" in one for one in opened)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, blocks = children(os.getpid()), shared_blocks()
    yield
    gc.collect()
    assert children(os.getpid()) <= before
    assert shared_blocks() <= blocks


def gone(pid: int, seconds: float = 8.0) -> bool:
    """:return: whether a process has ended, after waiting for that"""
    until = time.monotonic() + seconds
    while pid in processes() and time.monotonic() < until:
        time.sleep(0.05)
    return pid not in processes()


class Watched(AsyncPPO):
    """Keeps the weights of each version, and of each rollout what the update begins with."""

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        self.history = getattr(self, "history", {})
        self.history[self.policy_version] = {k: v.clone() for k, v in self.policy.state_dict().items()}
        return super().collect_rollouts(*args, **kwargs)

    def train(self) -> None:
        buffer = self.rollout_buffer
        buffer.prepare()
        names = ("observations", "actions", "values", "log_probs", "advantages", "returns", "raw_rewards", "terminated",
                 "truncated", "final_values", "last_values", "final_observations")  # fmt: skip
        one = {name: getattr(buffer, name) for name in names}
        one |= {name: one[name].ravel() for name in ("values", "log_probs", "advantages", "returns")}
        one |= {"versions": self.rollout_versions, "version": self.policy_version, "last": self._last_obs}
        self.kept = [*getattr(self, "kept", []), one]
        super().train()

    def check_behaviour(self) -> None:
        """What acted was, step by step, one policy: values and log-probabilities are those of its version."""
        for one in self.kept:
            for version in np.unique(one["versions"]):
                policy = PPO("MlpPolicy", self.env, **SMALL).policy
                policy.load_state_dict(self.history[version])
                rows = (one["versions"] == version).T.ravel()  # flat is environment by environment
                with th.no_grad():
                    values, log_probs, _ = policy.evaluate_actions(
                        th.from_numpy(one["observations"][rows]), th.from_numpy(one["actions"][rows]).flatten()
                    )
                np.testing.assert_allclose(one["values"][rows], values.numpy().flatten(), atol=1e-5)
                np.testing.assert_allclose(one["log_probs"][rows], log_probs.numpy(), atol=1e-5)


class Record(BaseCallback):
    """Counts, and keeps what the steps bring; ends training, raises or does something at a step."""

    def __init__(self, at: int = -1, action: Any = None):
        super().__init__()
        self.at, self.action = at, action
        self.steps, self.rewards, self.dones, self.numbers, self.terminal = 0, [], [], [], []
        self.rollouts = 0

    def _on_rollout_end(self) -> None:
        self.rollouts += 1

    def _on_step(self) -> bool:
        self.steps += 1
        assert self.num_timesteps == self.steps * self.training_env.num_envs
        self.rewards.append(self.locals["rewards"].copy())
        self.dones.append(self.locals["dones"].copy())
        self.numbers.append([info["number"] for info in self.locals["infos"]])
        self.terminal += [info["terminal_observation"] for info in self.locals["infos"] if "terminal_observation" in info]
        assert self.locals["new_obs"].shape == (2, 2)
        return self.action(self.model) is not False if self.steps == self.at else True


# --- sync


@pytest.mark.parametrize("case", ["discrete", "discrete-torch", "normalised-sde", "dict"])
def test_sync_is_ppo_to_the_last_bit(case: str) -> None:
    def make() -> tuple[str, Any, dict[str, Any]]:
        if case.startswith("discrete"):
            backend = "torch" if case == "discrete-torch" else "native"
            return "MlpPolicy", walks(3, ACTION_SPACES["discrete"]), {"backend": backend}
        if case == "dict":
            return "MultiInputPolicy", VecMonitor(walks(2, ACTION_SPACES["multi_binary"], DICT)), {}
        return "MlpPolicy", VecNormalize(walks(2, ACTION_SPACES["box"])), {"use_sde": True, "sde_sample_freq": 4}

    found = []
    for kind in (PPO, AsyncPPO):
        policy, env, kwargs = make()
        if kind is AsyncPPO:
            kwargs |= {"mode": "sync"}
        model = kind(policy, env, **SMALL, **kwargs)
        size = model.n_steps * model.n_envs
        weights, logged = learned(model, 5 * size)
        model.learn(size, reset_num_timesteps=False)  # goes on where the environments stand
        model.learn(size)  # resets them
        weights = {**model.policy.state_dict(), "generator": th.get_rng_state()}
        weights["actions"] = th.tensor(0.0 if model.native is None else model._actions_generator.random())
        if isinstance(env, VecNormalize):
            weights |= {"mean": th.tensor(env.obs_rms.mean), "var": th.tensor(env.ret_rms.var)}
        found.append((weights, logged))
    assert_same_weights(found[1][0], found[0][0])
    assert len(found[0][1]) == len(found[1][1])
    for theirs, mine in zip(found[0][1], found[1][1], strict=True):
        assert theirs == {key: value for key, value in mine.items() if not key.startswith("async/")}
        assert mine["async/lag_max"] == 0


def test_buffers_and_callbacks_may_change_rewards() -> None:
    class Doubled(RolloutBuffer):
        def add(self, obs: Any, action: Any, reward: Any, *others: Any) -> None:
            super().add(obs, action, 2 * reward, *others)

    class Halved(BaseCallback):
        def _on_step(self) -> bool:
            self.locals["rewards"] *= 0.25
            return True

    found = []
    for kind, kwargs in ((PPO, {}), (AsyncPPO, {"mode": "sync"})):
        model = kind("MlpPolicy", walks(3, ACTION_SPACES["box"]), rollout_buffer_class=Doubled, **SMALL, **kwargs)
        model.learn(48, callback=Halved())
        buffer = model.rollout_buffer
        found.append({**model.policy.state_dict(), "raw": th.tensor(buffer.raw_rewards), "paid": th.tensor(buffer.rewards)})
    assert_same_weights(found[1], found[0])
    assert found[0]["raw"][0, 0] == 0.25 and found[0]["paid"][0, 0] == 0.5


# --- lockstep


def test_lockstep() -> None:
    models, callbacks = [], []
    for _ in range(2):
        model, callback = Watched("MlpPolicy", VecMonitor(clocks()), **SMALL), Record()
        weights, logged = learned_with(model, 5 * 32, callback)
        models.append((model, weights, logged))
        callbacks.append(callback)
    (model, weights, logged), (_, again, logged_again) = models
    # twice the same
    assert_same_weights(weights, again)
    for one, other in zip(logged, logged_again, strict=True):
        assert without_times(one) == without_times(other)
    # exactly one update of lag
    assert [one["async/lag_max"] for one in logged] == [0, 1, 1, 1, 1] == [one["async/lag_mean"] for one in logged]
    for number, one in enumerate(model.kept):
        assert one["version"] == number
        assert (one["versions"] == max(number - 1, 0)).all()
    assert logged[1]["train/rho_clipped_share"] > 0 and logged[-1]["async/dropped"] == 0
    model.check_behaviour()
    check_ends(model, callbacks[0])
    check_estimates(model)
    # callbacks, step by step
    callback = callbacks[0]
    assert (callback.steps, callback.rollouts) == (5 * 16, 5) and model.num_timesteps == 5 * 32
    assert (np.array(callback.rewards) == np.array(callback.numbers)).all()

    # ended by a callback, with a rollout on its way
    pid = model._collectors.pids[0]
    stopped = Record(at=20, action=lambda _: False)
    model.learn(10 * 32, callback=stopped)
    assert (stopped.steps, stopped.rollouts, model.num_timesteps) == (20, 1, 40) and model._collectors.outstanding == []
    # again, in the same process
    before = model.policy_version
    model.learn(3 * 32)
    assert model.policy_version == before + 3 and model._collectors.pids[0] == pid
    assert [int(one["version"] - one["versions"].max()) for one in model.kept[-3:]] == [0, 1, 1]
    assert children(pid) == set()
    model.close()
    assert gone(pid)


def learned_with(model: AsyncPPO, total: int, callback: BaseCallback) -> tuple[dict[str, th.Tensor], list[dict[str, Any]]]:
    learn = model.learn
    model.learn = lambda steps: learn(steps, callback=callback)  # type: ignore[assignment, method-assign]
    try:
        return learned(model, total)
    finally:
        del model.learn


def without_times(logged: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in logged.items() if not key.startswith("async/wait")}


def check_ends(model: Watched, callback: Record) -> None:
    """Terminations, time limits and the observations there are what the clock shows (faults a and b)."""
    observations = [one["observations"].reshape(2, 16, 2) for one in model.kept]
    for env in range(2):
        seen = np.concatenate([one[env] for one in observations])
        rewards = np.concatenate([one["raw_rewards"][:, env] for one in model.kept])
        terminated = np.concatenate([one["terminated"][:, env] for one in model.kept])
        truncated = np.concatenate([one["truncated"][:, env] for one in model.kept])
        np.testing.assert_array_equal(rewards, seen[:, 1] + 1)
        ends = seen[:, 1] + 1 == 3 + seen[:, 0] % 3
        np.testing.assert_array_equal(terminated, ends & (seen[:, 0] % 2 == 0))
        np.testing.assert_array_equal(truncated, ends & (seen[:, 0] % 2 == 1))
        assert terminated.any() and truncated.any()
    for one, seen in zip(model.kept, observations, strict=True):
        assert len(one["final_observations"]) == one["truncated"].sum() > 0
        for final in one["final_observations"]:
            episode, number = seen[final.env, final.step]
            np.testing.assert_array_equal(final.observation, [episode, number + 1])
    assert len(callback.terminal) == np.sum(callback.dones)
    assert all(number == 3 + episode % 3 for episode, number in callback.terminal)


def check_estimates(model: Watched) -> None:
    """The update begins with V-trace by the present networks, bootstrapped from the final observations, once."""
    for one in model.kept:
        policy = PPO("MlpPolicy", model.env, **SMALL).policy
        policy.load_state_dict(model.history[one["version"]])
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(
                th.from_numpy(one["observations"]), th.from_numpy(one["actions"]).flatten()
            )
            final_values = np.zeros((16, 2), np.float32)
            for final in one["final_observations"]:
                final_values[final.step, final.env] = policy.predict_values(th.tensor(final.observation[None])).item()
            last_values = policy.predict_values(th.from_numpy(one["last"])).numpy().flatten()
        log_rhos = log_probs.numpy() - one["log_probs"]
        returns, advantages, _ = compute_vtrace(
            np.ascontiguousarray(log_rhos.reshape(2, 16).T),
            one["raw_rewards"],
            np.ascontiguousarray(values.numpy().reshape(2, 16).T),
            last_values=last_values,
            terminated=one["terminated"],
            truncated=one["truncated"],
            final_values=final_values,
            gamma=0.99,
            gae_lambda=0.95,
            rho_bar=1.0,
            c_bar=1.0,
        )
        np.testing.assert_allclose(one["advantages"].reshape(2, 16).T, advantages, atol=1e-4)
        np.testing.assert_allclose(one["returns"].reshape(2, 16).T, returns, atol=1e-4)


# --- free


class Pause(BaseCallback):
    """Makes an update longer by as many seconds as the model's ``pause``."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        time.sleep(self.model.pause)


def check_lag_bounds(model: Watched, n_rollouts: int) -> list[tuple[int, list[int]]]:
    """
    Learn in mode "free" under several bounds.

    :return: the bounds, and the lag of each rollout
    """
    found = []
    for bound, pause in [(0, 0.1), (1, 0.1), (3, 0.05), (0, 0.0), (2, 0.0)]:
        model.max_policy_lag, model.pause, model.kept = bound, pause, []
        before = model.dropped_rollouts
        model.learn(n_rollouts * 32, callback=Pause())
        assert model.num_timesteps == n_rollouts * 32 and len(model.kept) == n_rollouts
        lags = [int(one["version"] - one["versions"].min()) for one in model.kept]
        assert max(lags) <= bound
        found.append((bound, lags))
        if pause:  # the collector is ahead by all slots
            assert (model.dropped_rollouts > before) == (bound < 3)
        model.check_behaviour()
    assert {0, 1} <= {lag for _, lags in found for lag in lags}
    return found


def test_lag_never_exceeds_its_bound() -> None:
    model = Watched("MlpPolicy", clocks(sleep=2e-4), mode="free", n_slots=3, max_policy_lag=0, **SMALL)
    found = check_lag_bounds(model, 8)
    assert max(dict(found)[3]) > 1
    # the collector waits for slots meanwhile, or writes into one
    model._request(0)
    since = time.monotonic()
    model.close()
    assert time.monotonic() - since < 4


# --- failures


def test_an_exception_in_the_collector_is_raised_in_learn(tmp_path: Path) -> None:
    env = clocks()
    env.set_attr("trouble", "raise", indices=[1])
    model = AsyncPPO("MlpPolicy", env, **SMALL)
    with pytest.raises(CollectorError, match="ZeroDivisionError: the wheel is off") as caught:
        model.learn(10 * 32)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and "in step" in str(caught.value)
    assert model._collectors is None and children(os.getpid()) == set()
    # as good as new
    model.save(tmp_path / "model")
    env.set_attr("trouble", None)
    model.learn(2 * 32)
    assert evaluate_policy(model, clocks(1), n_eval_episodes=2)[0] > 0
    model.close()


def test_a_killed_collector_is_named() -> None:
    model = AsyncPPO("MlpPolicy", clocks(sleep=1e-3), **SMALL)
    since = []

    def kill(model: AsyncPPO) -> None:
        since.append(time.monotonic())
        os.kill(model._collectors.pids[0], signal.SIGKILL)

    with pytest.raises(CollectorError, match=r"collector process \(pid \d+\) died: it was killed by SIGKILL"):
        model.learn(20 * 32, callback=Record(at=20, action=kill))
    assert time.monotonic() - since[0] < 5
    assert children(os.getpid()) == set()
    model.predict(np.zeros((1, 2), np.float32))


def test_a_hanging_collector_is_named() -> None:
    model = AsyncPPO("MlpPolicy", clocks(trouble="hang"), collector_timeout=1.0, **SMALL)
    since = time.monotonic()
    with pytest.raises(CollectorError, match=r"hangs: the environments made no step for 1 seconds"):
        model.learn(20 * 32)
    assert time.monotonic() - since < 20 and children(os.getpid()) == set()


SCRIPT = """
# no `if __name__ == "__main__"`: the collector does not import this file
import os, signal, sys, time
import gymnasium as gym
import numpy as np
from async_environments import Clock, clocks
from sb3_flow import AsyncPPO

class Named(gym.Wrapper):
    pass

def tell(local, _):
    if local["self"].num_timesteps > 4 * 64:  # llvmlite loses a KeyboardInterrupt while it compiles
        if "FORKING" in os.environ:
            child = os.fork()
            if child == 0:  # has the learner's descriptors
                time.sleep(120)
                os._exit(0)
            os.write(1, b"forked %d\\n" % child)
            del os.environ["FORKING"]
        # not `print`, which Ctrl-C can part from its line's end
        os.write(1, b"learning %d\\n" % local["self"]._collectors.pids[0])
    return True

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
model = AsyncPPO("MlpPolicy", Named(Clock(sleep=1e-3)), n_steps=64, n_epochs=1, seed=0, device="cpu")
try:
    model.learn(10**6, callback=tell)
except KeyboardInterrupt:
    print("interrupted", model._collectors, flush=True)
model.learn(10**6, callback=tell)
"""


@contextlib.contextmanager
def learner_of_script(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """:return: a process that learns, which tells its collector's process id"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    learner = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    watchdog = threading.Timer(120.0, learner.kill)  # a failure, not a hang
    watchdog.start()
    try:
        yield learner
    finally:
        watchdog.cancel()
        learner.kill()
        learner.wait()
        learner.stdout.close()


def test_ctrl_c_and_the_death_of_the_learner_leave_no_process(tmp_path: Path) -> None:
    with learner_of_script(tmp_path) as learner:
        assert learner.stdout is not None
        first = int(learner.stdout.readline().split()[1])
        learner.send_signal(signal.SIGINT)
        line = next(line for line in learner.stdout if not line.startswith("learning"))
        assert line == "interrupted None\n" and gone(first, 1)
        second = int(learner.stdout.readline().split()[1])
        assert second != first and children(learner.pid) == {second}
        assert not list(Path("/dev/shm").glob("*sb3*"))
        server = processes()[second]
        learner.kill()
        learner.wait()
        assert gone(second) and gone(server)


def test_a_fork_of_the_learner_does_not_keep_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKING", "1")
    with learner_of_script(tmp_path) as learner:
        assert learner.stdout is not None
        fork, collector = (int(learner.stdout.readline().split()[1]) for _ in range(2))
        try:
            learner.kill()
            learner.wait()
            assert gone(collector, 20) and fork in processes()
        finally:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when someone wakes it")
def test_a_collector_that_was_stopped_does_not_outlive_the_learner(tmp_path: Path) -> None:
    with learner_of_script(tmp_path) as learner:
        assert learner.stdout is not None
        collector = int(learner.stdout.readline().split()[1])
        os.kill(collector, signal.SIGSTOP)
        try:
            learner.kill()
            learner.wait()
            assert gone(collector)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(collector, signal.SIGKILL)


# --- environments


def test_environments_that_cannot_be_moved_come_as_a_function() -> None:
    env = clock_processes()
    with pytest.raises(TypeError, match=r"SubprocVecEnv cannot be moved.*function was expected"):
        AsyncPPO("MlpPolicy", env, **SMALL)
    env.close()

    class Locked(Clock):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TypeError, match="DummyVecEnv cannot be moved"):
        AsyncPPO("MlpPolicy", Locked(), **SMALL)

    model = AsyncPPO("MlpPolicy", lambda: VecNormalize(clock_processes()), **SMALL)
    model.learn(2 * 32)
    (collector,) = model._collectors.pids
    processes = children(collector)
    assert len(processes) == 2
    assert model.get_vec_normalize_env().obs_rms.count > 2 * 32  # came back
    model.close()
    assert all(gone(pid) for pid in (collector, *processes))
    model.env.close()


def test_save_load_and_evaluate(tmp_path: Path) -> None:
    model = AsyncPPO("MlpPolicy", "CartPole-v1", policy_loss="decoupled", max_policy_lag=7, mode="free", **SMALL)
    model.learn(4 * 16)
    evaluate_policy(model, model.get_env(), n_eval_episodes=1)
    model.save(tmp_path / "model")
    loaded = AsyncPPO.load(tmp_path / "model", env=DummyVecEnv([lambda: gym.make("CartPole-v1")]), device="cpu")
    assert (loaded.mode, loaded.max_policy_lag, loaded.policy_version) == ("free", 7, 4) and loaded._collectors is None
    observation = np.zeros((5, 4), np.float32)
    np.testing.assert_array_equal(*(one.predict(observation, deterministic=True)[0] for one in (model, loaded)))
    model.policy.log_std_is_new = True  # attributes that are not weights do not matter
    parameters = model.get_parameters()
    model.learn(2 * 16)
    model.set_parameters(parameters)
    model.learn(16)  # from these weights
    pid = model._collectors.pids[0]
    model.set_env(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    assert gone(pid)


def test_arguments_are_checked() -> None:
    for wrong, message in [
        ({"mode": "fast"}, "`mode` must be one of"),
        ({"advantage": "group"}, "`advantage` must be one of"),
        ({"n_slots": 1}, "`n_slots` must be at least 2"),
        ({"max_policy_lag": -1}, "`max_policy_lag` must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            AsyncPPO("MlpPolicy", "CartPole-v1", **wrong)


# --- weights


def published(module: th.nn.Module) -> tuple[PublishedWeights, Layout, Any]:
    layout = Layout()
    PublishedWeights.reserve(module, layout)
    block = attach(reserve(layout.size), layout.size)
    writer = PublishedWeights(module, layout, block)
    writer.write(5)
    return writer, layout, block


class Net(th.nn.Module):
    def __init__(self, names: str = "ab", shape: tuple[int, ...] = (2, 3)):
        super().__init__()
        for name in names:
            self.register_parameter(name, th.nn.Parameter(th.randn(shape)))
        self.register_buffer("count", th.tensor(2**53 + 1))


def test_weights_arrive_by_name() -> None:
    writer, layout, block = published(Net("ab"))
    reader = PublishedWeights(Net("ba"), layout, block)  # another order in the module
    for version in (5, 6, 7):
        with th.no_grad():
            for parameter in writer.module.parameters():
                parameter.normal_()
        writer.write(version)
        assert reader.changed and reader.read() == version and not reader.changed
        assert_same_weights(dict(reader.module.state_dict()), dict(writer.module.state_dict()))


@pytest.mark.parametrize("other", [Net("ac"), Net("ab", (3, 2)), Net("ab", (6,)), Net("abc"), Net("a"), Net("ab").double()])
def test_weights_of_other_names_or_shapes_are_refused(other: Net) -> None:
    writer, layout, block = published(Net())
    with pytest.raises(ValueError, match="published weights"):
        PublishedWeights(other, layout, block).read()
    writer.module = other
    with pytest.raises(ValueError, match="published weights"):
        writer.write(6)


def test_weights_are_refused_when_the_policy_was_changed() -> None:
    model = AsyncPPO("MlpPolicy", clocks(), **SMALL)
    model.learn(32)
    model.policy.value_net = th.nn.Linear(64, 1).double()
    with pytest.raises(ValueError, match="names, shapes or types"):
        model.learn(32)
    assert model._collectors is None
