"""What users of SB3 try: an environment of Gymnasium's make_vec, and a progress bar in a notebook or without its packages."""

import io
import sys
from typing import Any

import gymnasium as gym
import pytest
from stable_baselines3.common import callbacks
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from tasks import PointEnv, collect

from sb3_flow import GRPO, PPO, RQL, AsyncPPO, OfflineDataset

SMALL: dict[str, Any] = {"n_critics": 2, "policy_kwargs": {"net_arch": [8]}, "seed": 0}


@pytest.fixture(scope="module")
def dataset() -> OfflineDataset:
    return collect(PointEnv(length=5), 4)


@pytest.mark.parametrize("algorithm", [RQL, PPO, GRPO, AsyncPPO])
def test_vector_environments_of_gymnasium_are_refused(algorithm: Any) -> None:
    env = gym.make_vec("Pendulum-v1", num_envs=2)
    with pytest.raises(ValueError, match=r"a VecEnv of SB3, but .*SyncVectorEnv.* was given: .*n_envs=2"):
        algorithm("MlpPolicy", env)
    env.close()


def test_also_later(dataset: OfflineDataset) -> None:
    env = gym.make_vec("Pendulum-v1", num_envs=2)
    model = RQL("MlpPolicy", None, offline_dataset=dataset, **SMALL)
    for attempt in (lambda: model.set_env(env), lambda: model.learn_offline(dataset, 1, eval_env=env)):
        with pytest.raises(ValueError, match="a VecEnv of SB3, but a vector environment of Gymnasium"):
            attempt()
    assert model.env is None and not model.offline_updates
    env.close()


def test_the_packages_of_the_progress_bar_are_named(dataset: OfflineDataset, monkeypatch: Any) -> None:
    monkeypatch.setattr(callbacks, "tqdm", None)
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    for attempt in (
        lambda: model.learn_offline(dataset, 1, progress_bar=True),
        lambda: model.learn(1, progress_bar=True),
        lambda: PPO("MlpPolicy", PointEnv(), n_steps=4, batch_size=4).learn(4, progress_bar=True),
    ):
        with pytest.raises(ImportError, match=r"needs the packages tqdm and rich: pip install 'sb3-flow\[plots\]'"):
            attempt()
    assert not model.is_offline and model.learn_offline(dataset, 1).offline_updates == 1


class Bar:
    """Stands in for tqdm's bar."""

    def __init__(self, total: int):
        self.n_closed = 0
        made.append(self)

    def update(self, n: int) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        self.n_closed += 1


made: list[Bar] = []


def test_an_interrupted_progress_bar_is_closed(dataset: OfflineDataset, monkeypatch: Any) -> None:
    monkeypatch.setattr(callbacks, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        RQL("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, 2, progress_bar=True)
    assert made[-1].n_closed == 1


class NotebookBar(BaseCallback):
    """Puts a stream of its own in the place of stdout, which lines no longer pass, as rich's bar does in a notebook."""

    def _on_training_start(self) -> None:
        self.before, self.shown = sys.stdout, io.StringIO()
        sys.stdout = self.shown

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        sys.stdout = self.before


def test_evaluations_count_gradient_steps_in_a_notebook(dataset: OfflineDataset, capsys: Any) -> None:
    bar, evaluation = NotebookBar(), EvalCallback(PointEnv(length=5), eval_freq=1, n_eval_episodes=1, verbose=1)
    before = sys.stdout
    RQL("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, 2, callback=[bar, evaluation])
    assert [line for line in bar.shown.getvalue().splitlines() if line.startswith("Eval gradient_steps=2, ")]
    assert "Eval num_timesteps" not in bar.shown.getvalue() + capsys.readouterr().out
    assert sys.stdout is before
