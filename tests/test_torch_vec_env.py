"""Environments of tensors: PPO learns from them what it learns through NumPy, and never from a step that only resets."""

import copy
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize

from sb3_flow import GRPO, PPO, RecurrentPPO
from sb3_flow.envs import JaxVecEnv, TensorStep, TorchEnvAdapter, TorchVecEnv
from sb3_flow.on_policy import tensor_collection

N = 5
BOX, DISCRETE = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)
PART = spaces.Box(-10.0, 10.0, (3,))
DICT = spaces.Dict({"one": PART, "other": spaces.Box(-1.0, 1.0, (1,))})


class Walk:
    """
    Walks of known lengths, with the interface of Gymnasium's vector environments on tensors: environment i's episode k has
    ``2 + (i + 3 k) % 7`` steps, and is cut if k is odd, or else ends by itself.

    :param late: resets a step late
    :param tells: infos name the last observations (resets within the step)
    """

    def __init__(
        self, late: bool, action: Any = BOX, nested: bool = False, tells: str | None = "final_obs", cuts: bool = True
    ):
        self.num_envs, self.single_action_space, self.tells, self.cuts = N, action, tells, cuts
        self.single_observation_space = DICT if nested else PART
        self.nested, self.late = nested, late
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP if late else gym.vector.AutoresetMode.SAME_STEP}
        self.seeds: list[Any] = []

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append((seed, options))
        self.episode, self.age = th.zeros(N, dtype=th.int64), th.zeros(N, dtype=th.int64)
        self.ended, self.place = th.zeros(N, dtype=th.bool), th.zeros(N)
        return self._see(), {}

    def _see(self) -> Any:
        seen = th.stack([self.place, self.age / 4.0, (th.arange(N) + self.episode) / 5.0], dim=1)
        return {"one": seen, "other": th.sin(seen[:, :1])} if self.nested else seen

    def _begin(self, which: th.Tensor) -> None:
        self.episode, self.age = self.episode + which, th.where(which, 0, self.age)
        self.place = th.where(which, 0.0, self.place)

    def step(self, actions: th.Tensor) -> tuple[Any, th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        assert isinstance(actions, th.Tensor)
        push = actions[:, 0] if actions.dim() == 2 else actions.float() - 1.0
        before = self.ended
        self.place, self.age = self.place + th.where(before, 0.0, push), self.age + ~before
        rewards = th.where(before, 100.0, -((self.place - 1.0) ** 2))  # a reset step's reward must not be seen
        if self.late:
            self._begin(before)
        over = (self.age >= 2 + (th.arange(N) + 3 * self.episode) % 7) & (self.age > 0)
        cut = over & (self.episode % 2 == 1) if self.cuts else th.zeros(N, dtype=th.bool)
        infos: dict[str, Any] = {}
        if self.late:
            self.ended = over
        elif over.any():
            if self.tells:
                infos = {self.tells: self._see()}
            self._begin(over)
        return self._see(), rewards, over & ~cut, cut, infos

    def close(self) -> None:
        self.closed = True


class ThroughNumPy(VecEnvWrapper):
    """Hides that the environments take tensors."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


SETTINGS: dict[str, Any] = {"n_steps": 16, "batch_size": 20, "n_epochs": 2, "seed": 3, "device": "cpu"}


def weights(model: PPO) -> np.ndarray:
    return th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()]).numpy()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("action", "nested"), [(BOX, False), (DISCRETE, False), (BOX, True)])
@pytest.mark.parametrize(("advantage", "cuts"), [("gae", False), ("gae", True), ("vtrace", True)])
def test_ppo_learns_what_it_learns_through_numpy(backend: Any, action: Any, nested: bool, advantage: Any, cuts: bool) -> None:
    models = []
    for wrap in (ThroughNumPy, lambda env: env):
        env = wrap(TorchEnvAdapter(Walk(late=False, action=action, nested=nested, cuts=cuts)))
        policy = "MultiInputPolicy" if nested else "MlpPolicy"
        model = PPO(policy, env, backend=backend, advantage=advantage, **SETTINGS)
        model.learn(3 * 16 * N)
        models.append(model)
    through, direct = models
    assert direct.tensor_rollout is not None and through.tensor_rollout is None
    # all last observations of a rollout pass together here, and those of a step there; matrix products round differently
    tolerance = 1e-5 if cuts else 0.0
    np.testing.assert_allclose(weights(direct), weights(through), rtol=tolerance, atol=tolerance)
    assert direct.num_timesteps == through.num_timesteps
    told = [[(one["l"], pytest.approx(one["r"])) for one in model.ep_info_buffer] for model in models]
    assert len(told[0]) > 20 and told[0] == told[1]


@pytest.mark.parametrize("nested", [False, True])
def test_observations_of_a_device_stay_tensors(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for arrays in (True, False):  # there may be no other device here, so the CPU stands for one
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        policy = "MultiInputPolicy" if nested else "MlpPolicy"
        model = PPO(policy, TorchEnvAdapter(Walk(late=True, nested=nested)), backend="torch", **SETTINGS)
        model.learn(3 * 16 * N)
        seen = model.rollout_buffer.observations
        assert isinstance(seen["one"] if nested else seen, np.ndarray if arrays else th.Tensor)
        assert isinstance(next(iter(model._last_obs.values())) if nested else model._last_obs, np.ndarray)
        found.append(weights(model))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_obs": False}, {"norm_reward": False, "clip_obs": 0.7}, {"training": False}])
def test_vec_normalize(nested: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(VecNormalize):
        """Another class may do anything, so it is stepped through NumPy."""

    models = []
    for arrays, wrapper in ((True, Other), (True, VecNormalize), (False, VecNormalize)):
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        keys = {"norm_obs_keys": ["one"]} if nested and options.get("norm_obs", True) else {}
        env = wrapper(TorchEnvAdapter(Walk(late=False, nested=nested)), **options, **keys)
        model = PPO("MultiInputPolicy" if nested else "MlpPolicy", env, backend="torch", **SETTINGS)
        model.learn(3 * 16 * N)
        model.learn(16 * N, reset_num_timesteps=False)
        models.append(model)
    through, *direct = models
    assert through.tensor_rollout is None
    theirs = through.env
    for model in direct:
        assert model.tensor_rollout is not None
        np.testing.assert_allclose(weights(model), weights(through), atol=1e-5)
        ours = model.env
        pairs = [(ours.ret_rms, theirs.ret_rms)]
        if ours.norm_obs:
            pairs += [(ours.obs_rms["one"], theirs.obs_rms["one"])] if nested else [(ours.obs_rms, theirs.obs_rms)]
        for one, other in pairs:
            assert one.count == other.count and isinstance(one.count, float)
            np.testing.assert_allclose(one.mean, other.mean, atol=1e-6)
            np.testing.assert_allclose(one.var, other.var, rtol=1e-6)
        np.testing.assert_allclose(ours.returns, theirs.returns, rtol=1e-4, atol=1e-4)


def test_statistics_of_rewards_leave_resets_out() -> None:
    env = VecNormalize(TorchEnvAdapter(Walk(late=True)))
    model, kept = PPO("MlpPolicy", env, **SETTINGS), Kept()
    model.learn(4 * 16 * N, callback=kept)
    steps = sum(int(rollout["alive"].sum()) for rollout in kept.rollouts)
    assert env.ret_rms.count == pytest.approx(steps + 1e-4) and steps < 4 * 16 * N
    assert env.ret_rms.var < 500  # a reset step pays 100
    assert env.obs_rms.count == pytest.approx((4 * 16 + 1) * N + 1e-4)


class Kept(BaseCallback):
    """Keeps what the buffer holds after each rollout, before it is flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[dict[str, Any]] = []
        self.seen: list[Any] = []

    def _on_step(self) -> bool:
        self.seen.append(
            {key: np.array(self.locals[key]) for key in ("rewards", "dones", "new_obs")} | {"infos": self.locals["infos"]}
        )
        return True

    def _on_rollout_end(self) -> None:
        buffer: Any = self.model.rollout_buffer
        names = "raw_rewards rewards values advantages returns terminated truncated alive observations episode_starts".split()
        kept = {name: copy.deepcopy(getattr(buffer, name)) for name in names}
        model: Any = self.model
        with th.no_grad():
            kept["last_values"] = model.policy.predict_values(th.as_tensor(model._last_obs)).numpy().flatten()
            kept["rows"] = buffer.rows
            kept["value_of"] = copy.deepcopy(model.policy)
        self.rollouts.append(kept)


def by_episodes(kept: dict[str, Any], late: bool, told: bool) -> np.ndarray:
    """:return: GAE of each row that counts, else 0: an episode at a time, in float64"""
    rewards, values = kept["raw_rewards"].astype(np.float64), kept["values"].astype(np.float64)
    found = np.zeros_like(rewards)
    n_steps, gamma, lam = len(rewards), 0.99, 0.95
    for env in range(N):
        rows: list[int] = []
        for step in range(n_steps):
            if not kept["alive"][step, env]:
                continue
            rows.append(step)
            terminated, truncated = kept["terminated"][step, env], kept["truncated"][step, env]
            if not (terminated or truncated or step == n_steps - 1):
                continue
            if terminated:
                after = 0.0
            elif truncated and not late and not told:
                after = values[step, env]
            elif step == n_steps - 1 and (late or not truncated):
                after = kept["last_values"][env]
            else:
                seen = kept["final"][(step, env)] if truncated and not late else kept["observations"][step + 1, env]
                with th.no_grad():
                    after = float(kept["value_of"].predict_values(th.as_tensor(seen)[None]))
            advantage = 0.0
            for row in reversed(rows):
                follows = after if row == rows[-1] else values[row + 1, env]
                delta = rewards[row, env] + gamma * follows - values[row, env]
                advantage = delta + gamma * lam * advantage
                found[row, env] = advantage
            rows = []
    return found


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
@pytest.mark.parametrize(("late", "tells"), [(True, None), (False, "final_obs"), (False, "final_observation"), (False, None)])
def test_estimates_and_what_is_learned_from(late: bool, tells: str | None, advantage: Any) -> None:
    env = TorchEnvAdapter(Walk(late=late, tells=tells))
    model, kept = PPO("MlpPolicy", env, advantage=advantage, **SETTINGS), Kept()
    finals = []
    original = tensor_collection.last_observations

    def noting(*arguments: Any) -> Any:
        rows = original(*arguments)
        finals.append({place: row for *place, row in zip(*arguments[-2:], rows, strict=True) for place in [tuple(place)]})
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_collection, "last_observations", noting)
        model.learn(4 * 16 * N, callback=kept)
    assert len(kept.rollouts) == len(finals) == 4
    steps_of_resets = 0
    for rollout, final in zip(kept.rollouts, finals, strict=True):
        rollout["final"] = final
        alive = rollout["alive"]
        steps_of_resets += int((~alive).sum())
        assert rollout["truncated"].sum() > 3 and rollout["terminated"].sum() > 3
        assert (rollout["raw_rewards"][alive] <= 0).all() and (rollout["raw_rewards"][~alive] == 100).all()
        expected = by_episodes(rollout, late, tells is not None)
        np.testing.assert_allclose(rollout["advantages"][alive], expected[alive], rtol=2e-4, atol=2e-4)
        if late:
            flat = np.flatnonzero(alive.swapaxes(0, 1).ravel())
            np.testing.assert_array_equal(rollout["rows"], flat)
        else:
            assert rollout["rows"] is None
    assert steps_of_resets > 10 if late else steps_of_resets == 0
    lengths = [one["l"] for one in model.ep_info_buffer]
    assert set(lengths) <= set(range(2, 9)) and len(lengths) > 30
    assert all(len(step["infos"]) == N for step in kept.seen)


def test_the_last_observation_is_that_of_the_episode() -> None:
    env = TorchEnvAdapter(Walk(late=False))
    env.seed(7)
    env.set_options({"a": 1})
    env.reset()
    assert env.envs.seeds == [(7, {"a": 1})] and env.env_is_wrapped(Monitor) == [True] * N
    ages = np.zeros(N)
    for _ in range(20):
        seen, rewards, dones, infos = env.step(np.zeros((N, 2), np.float32))
        ages += 1
        assert rewards.dtype == np.float32 and dones.dtype == bool and isinstance(infos, list)
        for number in range(N):
            if not dones[number]:
                assert "terminal_observation" not in infos[number] and seen[number][1] == ages[number] / 4
                continue
            assert infos[number]["terminal_observation"][1] == ages[number] / 4 and seen[number][1] == 0
            assert infos[number]["episode"]["l"] == ages[number]
            assert infos[number]["episode"]["r"] == pytest.approx(-ages[number])
            ages[number] = 0


def test_numpy_warns_of_late_resets_and_evaluation_does_not_count_them() -> None:
    env, same = TorchEnvAdapter(Walk(late=True)), TorchEnvAdapter(Walk(late=False))
    model = PPO("MlpPolicy", env, **SETTINGS)
    with pytest.warns(UserWarning, match="resets its environments one step late"):
        late = evaluate_policy(model, env, n_eval_episodes=25, return_episode_rewards=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = evaluate_policy(model, same, n_eval_episodes=25, return_episode_rewards=True)
    # other environments take a turn each when an episode ends at once, so the order differs, not the episodes
    assert sorted(late[1]) == sorted(expected[1])
    np.testing.assert_allclose(sorted(late[0]), sorted(expected[0]), rtol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_grpo_compares_whole_episodes(late: bool) -> None:
    model = GRPO(
        "MlpPolicy", TorchEnvAdapter(Walk(late=late, action=DISCRETE)), group_by="none", **(SETTINGS | {"n_steps": 12})
    )
    kept = Kept()
    model.learn(60, callback=kept)
    for rollout in kept.rollouts:
        alive = rollout["alive"]
        assert alive.sum(axis=0).tolist() == [2 + number % 7 for number in range(N)]  # the first episode of each
        assert len(alive) == 6  # the longest of them
    assert all((np.diff(rollout["alive"].astype(int), axis=0) <= 0).all() for rollout in kept.rollouts)


def test_files_and_going_on(tmp_path: Any) -> None:
    model = PPO("MlpPolicy", TorchEnvAdapter(Walk(late=True)), **SETTINGS)
    model.learn(2 * 16 * N)
    model.save(tmp_path / "model")
    again = PPO.load(tmp_path / "model", env=TorchEnvAdapter(Walk(late=True)), device="cpu")
    np.testing.assert_array_equal(weights(again), weights(model))
    model.learn(16 * N, reset_num_timesteps=False)  # the environments go on
    assert len(model.env.envs.seeds) == 1
    again.learn(16 * N, reset_num_timesteps=False)
    assert model.num_timesteps == again.num_timesteps == 3 * 16 * N
    copied = copy.deepcopy(model)
    copied.learn(16 * N)
    assert (weights(copied) != weights(model)).any()


def test_actions_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arrays in (True, False):
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        model = PPO("MlpPolicy", TorchEnvAdapter(Walk(late=True)), backend="torch", **SETTINGS)
        with th.no_grad():
            model.policy.action_net.bias.fill_(float("inf"))
        with pytest.raises(FloatingPointError, match="actions that are not finite"):
            model.learn(16 * N)


class Isaac:
    """Isaac Lab's interface, as its documentation has it: Dict observations, no autoreset mode, no last observations."""

    def __init__(self) -> None:
        self.inner = Walk(late=False, tells=None)
        self.num_envs, self.single_action_space = N, spaces.Box(-np.inf, np.inf, (2,))
        self.single_observation_space = spaces.Dict({"policy": PART, "critic": PART})
        self.device = "cpu"
        self.metadata = {"render_modes": [None, "human", "rgb_array"]}

    @property
    def unwrapped(self) -> Any:
        return self

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        seen, infos = self.inner.reset(seed, options)
        return {"policy": seen, "critic": seen}, infos

    def step(self, actions: th.Tensor) -> Any:
        seen, *others = self.inner.step(actions)
        return {"policy": seen, "critic": seen}, *others


class ManiSkill(Walk):
    """ManiSkill's vector interface, as its documentation has it: it says ``auto_reset``, and "final_observation"."""

    auto_reset = True

    def __init__(self) -> None:
        super().__init__(late=False, tells="final_observation")
        self.metadata = {}


ISAAC: dict[str, Any] = {"autoreset": "same_step", "observation_key": "policy", "action_bounds": (-1.0, 1.0)}


def test_stand_ins_of_simulators_learn() -> None:
    for env in (TorchEnvAdapter(Isaac(), **ISAAC), TorchEnvAdapter(ManiSkill())):
        model = PPO("MlpPolicy", env, **SETTINGS)
        model.learn(2 * 16 * N)
        assert model.num_timesteps == 2 * 16 * N and model.observation_space == PART


def test_attributes() -> None:
    env = TorchEnvAdapter(Walk(late=True))
    assert env.get_attr("late") == [True] * N and env.get_attr("late", [0, 1]) == [True] * 2
    env.set_attr("late", False)
    assert env.envs.late is False
    env.env_method("reset", 4)
    assert env.envs.seeds == [(4, None)]
    with pytest.raises(ValueError, match="`indices` must be None"):
        env.set_attr("late", True, indices=0)
    with pytest.raises(AttributeError, match="Walk has no attribute 'nonsense'"):
        env.get_attr("nonsense")
    env.close()
    assert env.envs.closed


def test_bad_environments_are_named() -> None:
    def of(**changes: Any) -> Walk:
        walk = Walk(late=False)
        vars(walk).update(changes)
        return walk

    with pytest.raises(ValueError, match=r"but Pendulum.* has no num_envs, single_observation_space, single_action_space"):
        TorchEnvAdapter(gym.make("Pendulum-v1").unwrapped)
    with pytest.raises(ValueError, match='`autoreset` must be "same_step" or "next_step", but None was given'):
        TorchEnvAdapter(of(metadata={}))
    with pytest.raises(ValueError, match=r"but AutoresetMode.DISABLED was found"):
        TorchEnvAdapter(of(metadata={"autoreset_mode": gym.vector.AutoresetMode.DISABLED}))
    with pytest.raises(ValueError, match="`autoreset` must be"):
        TorchEnvAdapter(of(), autoreset="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`observation_key` must be a part of the observations"):
        TorchEnvAdapter(of(), observation_key="policy")
    for bounds in (None, (1.0, -1.0), (0.0, np.inf)):
        with pytest.raises(ValueError, match="`action_bounds` must be two finite numbers"):
            TorchEnvAdapter(Isaac(), **(ISAAC | {"action_bounds": bounds}))
    with pytest.raises(ValueError, match="`action_bounds` must be None, since actions are Discrete"):
        TorchEnvAdapter(of(single_action_space=DISCRETE), action_bounds=(0, 1))
    arrays = of()
    arrays._see = lambda: np.zeros((N, 3))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"tensors with {N} rows, but observations are ndarray"):
        TorchEnvAdapter(arrays).reset()


class Own(TorchVecEnv):
    """A user's class: counts down."""

    def __init__(self) -> None:
        super().__init__(3, spaces.Box(0, 9, (1,)), DISCRETE)

    def _reset(self, seed: Any, options: Any) -> Any:
        self.left = th.full((3, 1), 9.0)
        return self.left.clone()

    def _step(self, actions: th.Tensor) -> TensorStep:
        self.left = self.left - actions[:, None]
        over = self.left[:, 0] <= 0
        final, self.left = self.left, th.where(over[:, None], 9.0, self.left)
        return TensorStep(self.left, actions.float(), over, th.zeros_like(over), final)


def test_a_class_of_ones_own() -> None:
    model = PPO("MlpPolicy", Own(), n_steps=64, batch_size=64, seed=0, device="cpu", learning_rate=3e-3)
    model.learn(64 * 3 * 10)
    assert np.mean([one["l"] for one in list(model.ep_info_buffer)[-20:]]) < 6.5  # always 2 is the best: 5 steps


class Careless(Own):
    """Does to its tensors what the test says."""

    def __init__(self, do: Any = None, late: bool = False, space: Any = None):
        super().__init__()
        self.do, self.resets_late, self.number = do, late, 0
        self.action_space = space or self.action_space

    def _step(self, actions: th.Tensor) -> TensorStep:
        self.number += 1
        found = super()._step((actions if actions.dim() == 1 else actions[:, 0]).clone().clamp(0, 2))
        if self.do:
            self.do(found, actions, self.number)
        return found


QUICK: dict[str, Any] = {"n_steps": 16, "batch_size": 48, "n_epochs": 1, "seed": 0, "device": "cpu"}


def set_to(**values: Any) -> Any:
    """:return: a change of a step that sets fields"""
    return lambda found, actions, number: [setattr(found, name, make(found)) for name, make in values.items()]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (set_to(truncated=lambda found: th.tensor(False)), r"`truncated` of a step must be a tensor of shape \(3,\)"),
        (set_to(rewards=lambda found: found.rewards[:, None]), r"`rewards` of a step .* shape \(3, 1\)"),
        (set_to(terminated=lambda found: [False] * 3), r"`terminated` of a step .* gave \[False"),
        (
            lambda found, _, number: setattr(
                found, "observations", found.observations.to(th.float64 if number > 3 else th.float32)
            ),
            "`observations` must keep shape and type",
        ),
    ],
)
def test_steps_of_other_shapes_are_refused(do: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO("MlpPolicy", Careless(do), **QUICK).learn(48)


def test_types_of_numbers_do_not_matter() -> None:
    def first_whole(found: TensorStep, actions: th.Tensor, number: int) -> None:
        found.rewards = found.rewards.long() if number == 1 else found.rewards * 0.3
        found.terminated = found.terminated.to(th.uint8)

    model = PPO("MlpPolicy", Careless(first_whole), **QUICK)
    model.learn(48)
    assert set(np.round(10 * model.rollout_buffer.raw_rewards[1:]).ravel()) == {0.0, 3.0, 6.0}
    assert model.rollout_buffer.raw_rewards.dtype == np.float32
    assert all(isinstance(one["r"], float) and one["l"] > 3 for one in model.ep_info_buffer) and model.ep_info_buffer


@pytest.mark.parametrize("space", [DISCRETE, spaces.MultiDiscrete([5, 5]), spaces.MultiBinary(2)])
def test_environments_may_change_the_actions_that_they_are_given(space: Any) -> None:
    found = []
    for do in (None, lambda found, actions, number: actions.fill_(1)):
        model = PPO("MlpPolicy", Careless(do, space=space), **QUICK)
        model.learn(48)
        found.append(model.rollout_buffer.actions)
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) > 1


def test_no_graph_of_a_differentiable_simulator_is_kept() -> None:
    def lasting(found: TensorStep, actions: th.Tensor, number: int) -> None:
        found.observations = found.observations * th.ones(1, requires_grad=True)
        found.rewards = found.rewards * th.ones(1, requires_grad=True)

    model = PPO("MlpPolicy", Careless(lasting), **QUICK)
    model.learn(96)
    assert not model.tensor_rollout.observations.requires_grad and not model.env.observations.requires_grad


def test_late_resets_are_not_learned_from_through_numpy() -> None:
    late = TorchEnvAdapter(Walk(late=True))
    for model in (PPO("MlpPolicy", ThroughNumPy(late), **SETTINGS), RecurrentPPO("MlpLstmPolicy", late, **SETTINGS)):
        with pytest.raises(ValueError, match=f"`env` resets one step late .* and {type(model).__name__} steps it through"):
            model.learn(16 * N)
    with pytest.warns(UserWarning, match="but ThroughNumPy takes it through NumPy"):
        PPO("MlpPolicy", ThroughNumPy(TorchEnvAdapter(Walk(late=False))), **SETTINGS).learn(16 * N)


def test_what_is_not_told_is_known_through_numpy() -> None:
    env = TorchEnvAdapter(Walk(late=False, tells=None))
    seen = env.reset()
    for _ in range(12):
        before = seen
        seen, _, dones, infos = env.step(np.ones((N, 2), np.float32))
        for number in np.flatnonzero(dones):
            np.testing.assert_array_equal(infos[number]["terminal_observation"], before[number])


def test_last_observations_are_told_always_or_never() -> None:
    walk = Walk(late=False)
    step, number = walk.step, iter(range(10_000))

    def forgetful(actions: th.Tensor) -> Any:
        *others, infos = step(actions)
        return *others, infos if next(number) < 10 else {}

    walk.step = forgetful  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="told the last observations of some episodes only"):
        PPO("MlpPolicy", TorchEnvAdapter(walk), **SETTINGS).learn(3 * 16 * N)


def test_successes_and_episodes_before_a_stop() -> None:
    walk = ManiSkill()
    step = walk.step
    walk.step = lambda actions: (lambda *found: (*found[:4], {**found[4], "success": found[2] & (th.arange(N) < 2)}))(
        *step(actions)
    )

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 12

    model = PPO("MlpPolicy", TorchEnvAdapter(walk), **SETTINGS)
    model.learn(16 * N, callback=Stop())
    assert len(model.ep_info_buffer) == len(model.ep_success_buffer) > 5
    assert 0 < sum(model.ep_success_buffer) < len(model.ep_success_buffer)


def test_callbacks_find_what_they_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Looks(BaseCallback):
        def _on_step(self) -> bool:
            found, env = self.locals, self.training_env
            assert found["env"] is self.model.env and found["self"] is self.model
            shapes = {name: found[name].shape for name in ("new_obs", "rewards", "dones", "actions", "clipped_actions")}
            assert shapes == {"new_obs": (N, 3), "rewards": (N,), "dones": (N,), "actions": (N, 2), "clipped_actions": (N, 2)}
            if isinstance(found["new_obs"], np.ndarray):
                np.testing.assert_allclose(env.normalize_obs(env.get_original_obs()), found["new_obs"], rtol=1e-4, atol=1e-4)
                np.testing.assert_array_equal(env.normalize_reward(env.get_original_reward()), found["rewards"])
            self.model.save(tmp_path / "model")
            return True

    for arrays in (True, False):
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        env = VecNormalize(TorchEnvAdapter(Walk(late=True)))
        model = PPO("MlpPolicy", env, backend="torch", **(SETTINGS | {"n_steps": 4, "batch_size": 4 * N}))
        model.learn(2 * 4 * N, callback=Looks())
        assert isinstance(PPO.load(tmp_path / "model", device="cpu")._last_obs, np.ndarray)


def test_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 5

    for arrays in (True, False):
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        model = PPO("MlpPolicy", TorchEnvAdapter(Walk(late=False)), backend="torch", **SETTINGS)
        model.learn(32 * N)
        model.learn(16 * N, callback=Stop())  # in the middle of a rollout
        model.set_env(TorchEnvAdapter(Walk(late=False, tells=None)))
        model.learn(32 * N)
        model.set_env(ThroughNumPy(TorchEnvAdapter(Walk(late=False))))
        model.learn(16 * N)
        assert model.tensors_seen is None and model.num_timesteps == 16 * N  # SB3 counts from 0 again


def test_a_new_environment_without_a_reset() -> None:
    model = PPO("MlpPolicy", Own(), **QUICK)
    model.learn(48)
    model.set_env(Own(), force_reset=False)
    model.learn(48, reset_num_timesteps=False)
    assert model.num_timesteps == 96


def test_options_and_rows_of_methods() -> None:
    env = TorchEnvAdapter(Walk(late=False))
    env.set_options([{"a": number} for number in range(N)])
    with pytest.raises(ValueError, match="Options of all environments must be equal"):
        env.reset()
    env.envs.masks = lambda: th.arange(N)[:, None] > th.arange(3)
    assert [row.tolist() for row in env.env_method("masks")] == [[number > k for k in range(3)] for number in range(N)]
    env.envs.number = lambda: 3
    assert env.env_method("number") == [3] * N
    with pytest.raises(ValueError, match='`autoreset` is "next_step", but Walk says "same_step"'):
        TorchEnvAdapter(Walk(late=False), autoreset="next_step")


def test_gymnasiums_environments_on_jax() -> None:
    pytest.importorskip("flax")
    env = JaxVecEnv("phys2d/CartPole-v1", num_envs=4)
    assert env.resets_late and env.observation_space.shape == (4,)
    model, kept = PPO("MlpPolicy", env, **(SETTINGS | {"n_steps": 64})), Kept()
    model.learn(2 * 64 * 4, callback=kept)
    ends = sum(int(rollout["terminated"].sum()) for rollout in kept.rollouts)
    left_out = sum(int((~rollout["alive"]).sum()) for rollout in kept.rollouts)
    assert ends >= left_out >= ends - 4 and left_out > 3
    assert all(one["r"] == one["l"] for one in model.ep_info_buffer)  # CartPole pays 1 for each step
    assert JaxVecEnv("phys2d/Pendulum-v0", num_envs=2).resets_late


def test_gymnasiums_environments_on_jax_are_reset_once() -> None:
    pytest.importorskip("flax")
    env, left = JaxVecEnv("phys2d/CartPole-v1"), np.zeros(1, np.int64)
    found = []
    for _ in range(2):
        env.seed(7)
        env.reset()
        found.append(env.step(left)[0])
        while not env.step(left)[2][0]:  # the next reset comes right after the end of an episode
            pass
    np.testing.assert_array_equal(*found)
