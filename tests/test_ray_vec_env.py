"""RayVecEnv: the episodes, infos and answers of SB3's DummyVecEnv, with environments in actors of a cluster of two nodes."""

import ast
import copy
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from on_policy import assert_same_weights
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from tasks import PointEnv, collect

from sb3_flow import FMQ, PPO, RQL, GroupedStart
from sb3_flow.common import ray_runtime
from sb3_flow.envs import RayVecEnv, ray_vec_env
from sb3_flow.grpo.grouped_starts import group_starts, has_grouped_starts
from tests.ray_cluster import ray_cluster  # noqa: F401

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")
OFF_POLICY = {"learning_starts": 4, "batch_size": 8, "seed": 3, "device": "cpu"}


class Broken(Exception):
    """An exception with arguments of its own."""

    def __init__(self, part: str, number: int):
        super().__init__(part, number)
        self.part, self.number = part, number

    def __str__(self) -> str:
        return f"the {self.part} is broken"


class Point(PointEnv):
    """A point that changes its action in place, has arrays in its infos, paints pictures and breaks when it is told to."""

    render_mode = "rgb_array"
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, number: int = 0):
        super().__init__("dict", 5 + number)
        self.number, self.trouble = number, None
        self.lock = threading.Lock()  # cannot be sent

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        observation, _ = super().reset(seed=seed)
        return observation, {"start": self.x.copy(), "options": options}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        np.clip(action, -1, 1, out=action)
        if self.trouble is not None:
            error, self.trouble = self.trouble, None
            raise error
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "place": self.x.copy()}

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), 10 * self.number + self.t, np.uint8)

    def break_down(self, error: Exception) -> None:
        self.trouble = error

    def add_number(self, array: np.ndarray, by: int = 1) -> np.ndarray:
        array += 0  # arguments are not read-only
        return array + by * self.number

    def pid(self) -> int:
        return os.getpid()


class Pair(gym.Env):
    """Observes its seed and its step in a tuple, and can end its process."""

    observation_space = spaces.Tuple((spaces.Discrete(1000), spaces.Box(0, 100, (2,), np.float32)))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.start, self.t = seed or 0, 0
        return (self.start, np.zeros(2, np.float32)), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.t += 1
        return (self.start, np.full(2, self.t, np.float32)), float(action), False, self.t == 3, {}

    def pid(self) -> int:
        return os.getpid()


FUNCTIONS = [lambda number=number: GroupedStart(Monitor(Point(number))) for number in range(5)]


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[RayVecEnv]:
    """:return: five points in two actors"""
    request.getfixturevalue("ray_cluster")
    env = RayVecEnv(FUNCTIONS, n_actors=2)
    yield env
    env.close()


@pytest.fixture
def points(shared: RayVecEnv) -> Iterator[RayVecEnv]:
    """:return: the shared points, without a group"""
    yield shared
    shared.reset()
    shared.env_method("join_group", 0, 0, None)


@pytest.fixture
def twin() -> VecEnv:
    """:return: the same points in this process"""
    return DummyVecEnv(FUNCTIONS)


def without_times(infos: Any) -> list[Any]:
    """:return: infos without the seconds that Monitor measured"""
    infos = copy.deepcopy(list(infos))
    for info in infos:
        info.get("episode", {}).pop("t", None)
    return infos


def spoil(found: Any) -> None:
    """Overwrite all arrays, which users may do."""
    if isinstance(found, np.ndarray):
        found[...] = 77
    elif isinstance(found, dict | list | tuple):
        for part in found.values() if isinstance(found, dict) else found:
            spoil(part)


def assert_same_rollouts(one: VecEnv, other: VecEnv, n_steps: int) -> list[int]:
    """:return: in how many steps each environment ended an episode"""
    space, ends = copy.deepcopy(other.action_space), np.zeros(one.num_envs, dtype=int)
    space.seed(5)
    assert one.seed(11) == other.seed(11)
    found, expected = one.reset(), other.reset()
    np.testing.assert_equal(found, expected)
    np.testing.assert_equal(one.reset_infos, other.reset_infos)
    for _ in range(n_steps):
        spoil(found)
        actions = np.array([space.sample() for _ in range(one.num_envs)])
        expected, rewards, dones, infos = other.step(actions.copy())
        one.step_async(actions)
        spoil(actions)  # they are on their way
        found, rewards_found, dones_found, infos_found = one.step_wait()
        np.testing.assert_equal(found, expected)
        for ours, theirs in ((rewards_found, rewards), (dones_found, dones)):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        assert isinstance(infos_found, list)
        np.testing.assert_equal(without_times(infos_found), without_times(infos))
        np.testing.assert_equal(without_times(one.reset_infos), without_times(other.reset_infos))
        assert ["terminal_observation" in info for info in infos_found] == dones.tolist()
        spoil(infos_found)
        ends += dones
    return ends.tolist()


def assert_ended(pids: list[int]) -> None:
    """Wait for the end of processes."""
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


# ------------------------------------------------------------- the same as in this process


def test_points_see_what_they_see_in_one_process(points: RayVecEnv, twin: VecEnv) -> None:
    assert points.num_envs == 5 and points.observation_space == twin.observation_space
    assert points.action_space == twin.action_space and points.metadata["render_modes"] == ["human", "rgb_array"]
    assert min(assert_same_rollouts(points, twin, 30)) >= 3


def test_cart_poles_see_what_they_see_in_one_process_until_they_are_closed() -> None:
    env = make_vec_env("CartPole-v1", n_envs=3, vec_env_cls=RayVecEnv, vec_env_kwargs={"n_actors": 2})
    assert min(assert_same_rollouts(env, make_vec_env("CartPole-v1", n_envs=3), 100)) >= 2
    pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in env._actors]
    assert len({os.getpid(), *pids}) == 3
    env.step_async(np.zeros(3, dtype=int))
    env.close()
    env.close()
    assert_ended(pids)
    for call in (env.reset, lambda: env.step(np.zeros(3, dtype=int)), lambda: env.get_attr("spec"), lambda: env.has_attr("x")):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_seeds_and_options(points: RayVecEnv, twin: VecEnv) -> None:
    for env in (points, twin):
        env.seed(7)
        env._seeds[3] = 70  # not in sequence
    np.testing.assert_equal(points.reset(), twin.reset())
    assert (points.reset()["position"] == twin.reset()["position"]).all()  # the streams go on
    np.random.seed(2)
    seeds = points.seed()
    np.random.seed(2)
    assert seeds == twin.seed() and None not in seeds
    for options in ({"hello": 1}, [{"number": i} for i in range(5)], None):
        points.set_options(options)
        points.reset()
        expected = options if isinstance(options, list) else [options] * 5
        assert [info["options"] for info in points.reset_infos] == expected
        points.reset()
        assert [info["options"] for info in points.reset_infos] == [None] * 5  # used only once


@pytest.mark.parametrize(
    "indices", [None, 3, -1, np.int64(4), [0, 2], (4, 0, 2, 0), [-1, 1], range(1, 4), np.array([3, 2]), {1}, []], ids=str
)
def test_indices_and_their_order(points: RayVecEnv, twin: DummyVecEnv, indices: Any) -> None:
    plain = int(indices) if isinstance(indices, np.integer) else indices  # SB3's class does not take NumPy's integers
    expected = twin.get_attr("number", plain)
    assert points.get_attr("number", indices) == expected
    found = points.env_method("add_number", np.zeros(2), indices=indices, by=10)
    assert [array.tolist() for array in found] == [[10.0 * number] * 2 for number in expected]
    assert points.env_is_wrapped(Monitor, indices) == [True] * len(expected)
    points.set_attr("mark", 0)
    points.set_attr("mark", 1, indices)
    assert points.get_attr("mark") == [int(number in expected) for number in range(5)]


def test_attributes(points: RayVecEnv) -> None:
    assert points.has_attr("lock") and not points.has_attr("no_such_thing")
    with pytest.raises(TypeError, match="cannot pickle"):
        points.get_attr("lock")
    with pytest.raises(AttributeError, match="no_such_thing"):
        points.get_attr("no_such_thing")
    for outside in (5, [0, -6]):
        with pytest.raises(IndexError, match="`indices` must be below 5"):
            points.get_attr("number", outside)
    points.set_attr("notes", np.zeros(3))
    for notes in points.get_attr("notes"):
        notes += 1  # a copy
    assert sum(notes.sum() for notes in points.get_attr("notes")) == 0
    assert points.env_is_wrapped(VecNormalize) == [False] * 5
    assert list(points._get_indices(None)) == list(range(5)) and points.unwrapped is points


def test_pictures(points: RayVecEnv, twin: VecEnv) -> None:
    for env in (points, twin):
        env.seed(0)
        env.reset()
        env.step(np.zeros((5, 2), np.float32))
    np.testing.assert_array_equal(points.get_images(), twin.get_images())
    np.testing.assert_array_equal(points.render(), twin.render("rgb_array"))
    with pytest.warns(UserWarning, match="render mode"):
        points.render("something else")


# ------------------------------------------------------------- messages


class Counting:
    """Stand before an actor, and write down the messages to it."""

    def __init__(self, actor: Any, number: int, log: list[tuple[int, str]]):
        self.actor, self.number, self.log = actor, number, log

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)

        class Counted:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                self.log.append((self.number, name))
                return method.remote(*arguments)

        return Counted


def test_one_message_for_each_actor_and_call(points: RayVecEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[int, str]] = []
    actors = [Counting(actor, number, log) for number, actor in enumerate(points._actors)]
    monkeypatch.setattr(points, "_actors", actors)
    for call, expected in (
        (points.reset, [(0, "reset"), (1, "reset")]),
        (lambda: points.step(np.zeros((5, 2))), [(0, "step"), (1, "step")]),
        (lambda: points.get_attr("number"), [(0, "call"), (1, "call")]),
        (lambda: points.env_method("pid", indices=[4, 0, 3]), [(1, "call"), (0, "call")]),
        (lambda: points.set_attr("mark", 1, [0, 1, 2]), [(0, "call")]),
        (lambda: points.has_attr("mark"), [(0, "has_attr"), (1, "has_attr")]),
        (lambda: points.get_attr("mark", []), []),
    ):
        call()
        assert log == expected
        log.clear()
    points.step_async(np.zeros((5, 2)))
    assert log == [(0, "step"), (1, "step")]  # both, before any answer
    points.step_wait()
    assert len(log) == 2
    pids = points.env_method("pid")
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3]  # consecutive environments
    assert len({actor.actor._actor_id for actor in actors}) == 2


def test_the_order_of_calls(points: RayVecEnv, twin: VecEnv) -> None:
    points.reset()
    with pytest.raises(RuntimeError, match="after `step_async`"):
        points.step_wait()
    for actions in (np.zeros((4, 2)), np.zeros((6, 2)), []):
        with pytest.raises(ValueError, match=f"one for each of 5 environments, but {len(actions)} were given"):
            points.step_async(actions)
    points.step_async(np.ones((5, 2)))
    with pytest.raises(RuntimeError, match="`step_wait` comes before"):
        points.step_async(np.ones((5, 2)))
    for env in (points, twin):
        env.seed(1)
    np.testing.assert_equal(points.reset(), twin.reset())  # the step is forgotten
    with pytest.raises(RuntimeError, match="after `step_async`"):
        points.step_wait()


def test_copies_are_refused(points: RayVecEnv) -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="RayVecEnv live in actors, and can be neither copied nor pickled"):
            way(points)
    model = PPO("MultiInputPolicy", points, n_steps=4, batch_size=20, device="cpu", backend="torch")
    with pytest.raises(TypeError, match="copy it while `env` is None"):
        copy.deepcopy(model)
    points.reset()


# ------------------------------------------------------------- algorithms


def test_members_of_a_group_start_alike(points: RayVecEnv) -> None:
    assert has_grouped_starts(points)
    points.seed(3)  # dropped
    group_starts(points, np.array([9]), group_size=5)
    starts = points.reset()["position"]
    assert (starts == starts[0]).all()
    second: dict[int, np.ndarray] = {}
    while len(second) < 5:  # the lengths of episodes differ
        observation, _, dones, _ = points.step(np.zeros((5, 2)))
        for number in np.flatnonzero(dones):
            second.setdefault(int(number), observation["position"][number].copy())
    assert all((start == second[0]).all() for start in second.values()) and (second[0] != starts[0]).all()


def test_our_ppo_learns_what_it_learns_in_one_process(points: RayVecEnv, twin: VecEnv) -> None:
    kwargs: dict[str, Any] = {"n_steps": 16, "batch_size": 20, "n_epochs": 2, "seed": 3, "device": "cpu"}
    kwargs |= {"policy_kwargs": {"net_arch": [8]}, "backend": "torch"}
    model, other = (PPO("MultiInputPolicy", env, **kwargs).learn(240) for env in (points, twin))
    for name in ("actions", "rewards", "values", "advantages"):
        ours, theirs = (getattr(one.rollout_buffer, name) for one in (model, other))
        np.testing.assert_array_equal(ours, theirs)
    assert_same_weights(model.policy.state_dict(), other.policy.state_dict())
    episodes, expected = ([episode["r"] for episode in one.ep_info_buffer or ()] for one in (model, other))
    assert episodes == expected and len(episodes) > 20


def test_sac(points: RayVecEnv) -> None:
    env = VecNormalize(points)
    model = SAC("MultiInputPolicy", env, buffer_size=100, policy_kwargs={"net_arch": [8]}, **OFF_POLICY).learn(60)
    assert model._n_updates > 5 and len(model.ep_info_buffer or ()) > 5
    rewards, lengths = evaluate_policy(model, env, 5, return_episode_rewards=True)
    assert len(rewards) == 5 and min(lengths) >= 1


@pytest.mark.parametrize("algorithm", [RQL, FMQ])
def test_offline_to_online(points: RayVecEnv, twin: VecEnv, algorithm: Any) -> None:
    """What is learned in one process is learned here, to the last bit."""
    dataset, learned = collect(PointEnv("dict"), episodes=5), []
    for env in (points, twin):
        model = algorithm("MultiInputPolicy", env, policy_kwargs={"net_arch": [8]}, **OFF_POLICY).learn_offline(dataset, 3)
        updates = model._n_updates
        model.learn(40)
        assert model.num_timesteps == 40 and model._n_updates > updates and len(model.ep_info_buffer) > 3
        learned.append(model.policy.state_dict())
    assert_same_weights(*learned)


# ------------------------------------------------------------- errors


def test_an_exception_of_an_environment_arrives_as_it_is(points: RayVecEnv) -> None:
    points.reset()
    points.env_method("break_down", ZeroDivisionError("the wheel is off"), indices=4)
    with pytest.raises(ZeroDivisionError, match="the wheel is off") as caught:
        points.step(np.zeros((5, 2)))
    assert "in step" in str(caught.value) and "raise error" in str(caught.value)  # where
    assert points.reset()["position"].shape == (5, 2) and points.step(np.zeros((5, 2)))[1].shape == (5,)
    points.env_method("break_down", Broken("handle", 7), indices=0)
    points.step_async(np.zeros((5, 2)))
    with pytest.raises(Broken, match="the handle is broken") as broken:
        points.step_wait()
    assert broken.value.number == 7


def test_pairs_see_what_they_see_in_one_process_until_an_actor_is_lost() -> None:
    env = RayVecEnv([Pair] * 3, n_actors=2)
    assert assert_same_rollouts(env, DummyVecEnv([Pair] * 3), 7) == [2, 2, 2]
    assert env.render_mode is None
    with pytest.warns(UserWarning, match="render mode is None"):
        assert env.get_images() == [None] * 3
    with pytest.warns(UserWarning, match="no `render_mode`"):
        assert env.render() is None
    first, _, last = pids = env.env_method("pid")
    assert pids == [first, first, last]
    os.kill(last, signal.SIGKILL)
    for call in (lambda: env.step([0, 1, 0]), env.reset, lambda: env.get_attr("t", 2), lambda: env.has_attr("t")):
        with pytest.raises(RuntimeError, match=r"Actor 1 of RayVecEnv is lost.* the environments 2 to 2\. .* Ray says"):
            call()
    assert env.env_method("pid", indices=[1, 0]) == [first, first]
    with pytest.raises(RuntimeError, match="Actor 1"):
        env.step_async([0, 0, 0])
        env.step_wait()
    env.close()
    env.close()
    assert_ended(pids)


def test_actors_end_when_nothing_refers_to_them() -> None:
    env = RayVecEnv([Pair])
    pids = env.env_method("pid")
    assert len(env._actors) == 1  # as many as environments
    del env
    gc.collect()
    assert_ended(pids)


def test_an_environment_that_cannot_be_made_leaves_nothing() -> None:
    def fail() -> gym.Env:
        raise Broken(str(os.getpid()), 3)

    with pytest.raises(Broken) as caught:
        RayVecEnv([Pair, fail], n_actors=1)
    assert caught.value.number == 3
    assert_ended([int(caught.value.part)])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("`env_fns` must be a list of functions", {"env_fns": []}),
        ("`env_fns` must be a list of functions", {"env_fns": "CartPole-v1"}),
        (r"`env_fns` must be a list of functions.*Pair", {"env_fns": [Pair()]}),
        ("`env_fns` must be a list of functions", {"env_fns": Pair}),
        ("`n_actors` must be at least 1, but 0", {"n_actors": 0}),
        ("`n_actors` must be a whole number, but 1.5", {"n_actors": 1.5}),
        (r"`n_actors` must be at most 6, .* 7 was given", {"n_actors": 7}),
        ("`n_actors` is 5, which needs 5 CPUs, but the cluster has 4", {"n_actors": 5}),
        ("`n_actors` is 1, which needs 9 CPUs, but the cluster has 4", {"actor_options": {"num_cpus": 9}}),
        ("`num_cpus` must be at least 0, but -1", {"actor_options": {"num_cpus": -1}}),
        ("`actor_options` must be a dictionary", {"actor_options": 3}),
        ("`max_restarts` in `actor_options` cannot be chosen", {"actor_options": {"max_restarts": 3}}),
        ("num_cpu", {"actor_options": {"num_cpu": 3}}),
        ("`start_timeout` must be at least 0", {"start_timeout": -1}),
    ],
)
def test_errors_name_the_argument(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        RayVecEnv(**{"env_fns": [Pair] * 6, **arguments})


@pytest.mark.parametrize("options", [{"num_cpus": 1.5}, {"resources": {"crane": 1}}])
def test_actors_that_cannot_start_are_not_waited_for_without_end(shared: RayVecEnv, options: dict[str, Any]) -> None:
    """The shared points take a CPU of each node, or two of one."""
    with pytest.raises(RuntimeError, match=r"started [01] of 2 actors within 0\.5 seconds.* the cluster has 4, of which"):
        RayVecEnv([Pair] * 2, n_actors=2, actor_options=options, start_timeout=0.5)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"RayVecEnv needs the package ray: pip install 'sb3-flow\[ray\]'"):
        RayVecEnv([Pair])


@pytest.mark.parametrize("module", [ray_vec_env, ray_runtime])
def test_ray_is_imported_when_it_is_needed(module: Any) -> None:
    imports = [one for one in ast.parse(inspect.getsource(module)).body if isinstance(one, ast.Import | ast.ImportFrom)]
    names = [alias.name for one in imports if isinstance(one, ast.Import) for alias in one.names]
    names += [one.module or "" for one in imports if isinstance(one, ast.ImportFrom)]
    assert names and "ray" not in [name.split(".")[0] for name in names]
