"""Images of tensors with the channels last: transposed on the device, as SB3's VecTransposeImage transposes arrays."""

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize, VecTransposeImage, is_vecenv_wrapped

from sb3_flow import GRPO, PPO
from sb3_flow.envs import TorchEnvAdapter
from sb3_flow.on_policy import tensor_collection
from sb3_flow.on_policy.tensor_normalising import of_tensors

N, SIZE = 3, 36
PICTURE = spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
MODES = {True: gym.vector.AutoresetMode.NEXT_STEP, False: gym.vector.AutoresetMode.SAME_STEP}


class Pictures:
    """
    Noise that follows from environment, episode, step and action, with the interface of Gymnasium's vector environments:
    environment i's episode k has ``3 + (i + k) % 3`` steps, and the last one of each second episode is cut.

    :param late: resets a step late
    :param nested: pictures beside a number
    :param first: the same pictures with the channels first
    :param cuts: episodes are cut
    """

    def __init__(self, late: bool, nested: bool = False, first: bool = False, cuts: bool = True):
        self.num_envs, self.late, self.nested, self.first, self.cuts = N, late, nested, first, cuts
        picture = spaces.Box(0, 255, (3, SIZE, SIZE), np.uint8) if first else PICTURE
        number = spaces.Box(-10.0, 10.0, (1,))
        self.single_observation_space = spaces.Dict({"picture": picture, "number": number}) if nested else picture
        self.single_action_space = spaces.Discrete(3)
        self.metadata = {"autoreset_mode": MODES[late]}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.age, self.last = (th.zeros(N, dtype=th.int64) for _ in range(3))
        self.ended = th.zeros(N, dtype=th.bool)
        return self._see(), {}

    def _see(self) -> Any:
        key = 1 + th.arange(N) + 7 * self.episode + 31 * self.age + 101 * self.last
        places = th.arange(SIZE * SIZE * 3).reshape(1, SIZE, SIZE, 3)
        picture = (places * key[:, None, None, None] * 2654435761 % 65521 % 256).to(th.uint8)
        picture = picture.permute(0, 3, 1, 2) if self.first else picture
        return {"picture": picture, "number": self.age[:, None] / 3.0} if self.nested else picture

    def step(self, actions: th.Tensor) -> tuple[Any, th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        before = self.ended
        self.age, self.last = self.age + ~before, th.where(before, 0, actions)
        rewards = th.where(before, 100.0, self.last - 1.0)
        if self.late:
            self._begin(before)
        over = (self.age >= 3 + (th.arange(N) + self.episode) % 3) & (self.age > 0)
        cut = over & (self.episode % 2 == 1) if self.cuts else th.zeros(N, dtype=th.bool)
        infos: dict[str, Any] = {}
        if self.late:
            self.ended = over
        elif over.any():
            infos = {"final_obs": self._see()}
            self._begin(over)
        return self._see(), rewards, over & ~cut, cut, infos

    def _begin(self, which: th.Tensor) -> None:
        self.episode, self.age = self.episode + which, th.where(which, 0, self.age)
        self.last = th.where(which, 0, self.last)

    def close(self) -> None:
        pass


class ThroughNumPy(VecEnvWrapper):
    """Hides that the environments take tensors."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


def parts(observations: Any) -> dict[str, np.ndarray]:
    """:return: arrays by name"""
    found = observations if isinstance(observations, dict) else {"picture": observations}
    return {key: np.asarray(part) for key, part in found.items()}


def assert_equal(one: Any, other: Any) -> None:
    one, other = parts(one), parts(other)
    assert one.keys() == other.keys()
    for key, part in one.items():
        assert part.dtype == other[key].dtype
        np.testing.assert_array_equal(part, other[key])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore:.*one step late")
def test_a_step_is_that_of_the_wrapper(late: bool, nested: bool) -> None:
    arrays = VecTransposeImage(TorchEnvAdapter(Pictures(late, nested)))
    wrapped = VecTransposeImage(TorchEnvAdapter(Pictures(late, nested)))
    seen: Any = of_tensors(wrapped)
    assert_equal(seen.reset(), arrays.reset())
    rng, ends = np.random.default_rng(0), 0
    for _ in range(30):
        actions = rng.integers(3, size=N)
        expected, rewards, dones, infos = arrays.step(actions)
        found = seen.step_tensors(th.from_numpy(actions))
        assert_equal(found.observations, expected)
        assert_equal(seen.observations, expected)
        np.testing.assert_array_equal(found.rewards, rewards)
        np.testing.assert_array_equal(found.dones, dones)
        for number in np.flatnonzero(dones):
            last = found.observations if late else found.final_observations
            last = {key: part[number] for key, part in last.items()} if nested else last[number]
            assert_equal(last, infos[number]["terminal_observation"])
            ends += 1
    assert ends > 15


SETTINGS: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 3, "device": "cpu"}


def learned(env: Any, nested: bool, algorithm: Any = PPO, **options: Any) -> PPO:
    """:return: a model that has learned from two rollouts, without a warning that a wrapper of SB3 goes through NumPy"""
    small = {"features_extractor_kwargs": {"cnn_output_dim" if nested else "features_dim": 16}}
    policy = "MultiInputPolicy" if nested else "CnnPolicy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*ThroughNumPy.* takes it through NumPy")
        model: PPO = algorithm(policy, env, policy_kwargs=small, **SETTINGS, **options)
        return model.learn(2 * 16 * N)


def weights(model: PPO) -> np.ndarray:
    return th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()]).numpy()


def episodes(model: PPO) -> list[Any]:
    """:return: returns and lengths"""
    return [(one["r"], one["l"]) for one in model.ep_info_buffer]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("cuts", [False, True])
def test_ppo_learns_what_it_learns_through_numpy(nested: bool, cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    through = learned(ThroughNumPy(TorchEnvAdapter(Pictures(False, nested, cuts=cuts))), nested)
    assert through.tensor_rollout is None and is_vecenv_wrapped(through.env, VecTransposeImage)
    for arrays in (True, False):  # there may be no other device here, so the CPU stands for one
        monkeypatch.setattr(tensor_collection, "seen_as_arrays", lambda _, arrays=arrays: arrays)
        direct = learned(TorchEnvAdapter(Pictures(False, nested, cuts=cuts)), nested)
        assert direct.tensor_rollout is not None and is_vecenv_wrapped(direct.env, VecTransposeImage)
        assert_equal(direct.rollout_buffer.observations, through.rollout_buffer.observations)
        # all last observations of a rollout pass together here, and those of a step there: sums round differently
        np.testing.assert_allclose(weights(direct), weights(through), rtol=0, atol=1e-4 if cuts else 0)
        assert episodes(direct) == episodes(through) and len(episodes(direct)) > 15


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("algorithm", "options"), [(PPO, {}), (GRPO, {"group_by": "none"})])
def test_environments_that_reset_late(nested: bool, algorithm: Any, options: dict[str, Any]) -> None:
    """Those that have the channels first need no wrapper, so they tell what is expected."""
    last, first = (
        learned(TorchEnvAdapter(Pictures(True, nested, first=first)), nested, algorithm, **options) for first in (False, True)
    )
    assert is_vecenv_wrapped(last.env, VecTransposeImage) and not is_vecenv_wrapped(first.env, VecTransposeImage)
    assert_equal(last.rollout_buffer.observations, first.rollout_buffer.observations)
    np.testing.assert_array_equal(weights(last), weights(first))
    assert (~last.rollout_buffer.alive).any() and episodes(last) == episodes(first)


@pytest.mark.parametrize("inside", [False, True])
def test_beside_a_normaliser(inside: bool) -> None:
    def of(env: Any) -> VecEnvWrapper:
        if inside:  # SB3 puts the transposition around it
            return VecNormalize(env, norm_obs_keys=["number"])
        return VecNormalize(VecTransposeImage(env), norm_obs_keys=["number"])

    def statistics(model: PPO) -> list[Any]:
        normaliser: Any = model.get_vec_normalize_env()
        return [normaliser.obs_rms["number"], normaliser.ret_rms]

    through, direct = (
        learned(of(wrap(TorchEnvAdapter(Pictures(False, True, cuts=False)))), True, backend="torch")
        for wrap in (ThroughNumPy, lambda env: env)
    )
    assert direct.tensor_rollout is not None and through.tensor_rollout is None
    np.testing.assert_array_equal(*(model.rollout_buffer.observations["picture"] for model in (direct, through)))
    np.testing.assert_allclose(weights(direct), weights(through), atol=1e-4)
    for one, other in zip(statistics(direct), statistics(through), strict=True):
        assert one.count == other.count
        np.testing.assert_allclose([one.mean, one.var], [other.mean, other.var], rtol=1e-6, atol=1e-6)
