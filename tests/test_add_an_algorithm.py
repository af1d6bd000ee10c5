"""The algorithm on the page "Add an algorithm" trains, acts, logs, saves and refuses as the algorithms of the package do."""

import importlib
import math
import re
import sys

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from tasks import PointEnv, collect
from test_readme import ROOT, shortened

from sb3_flow.data import PrioritizedReplayBuffer

PAGE = (ROOT / "docs/development/add_an_algorithm.md").read_text()
FILE, SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
SMALL = {"policy_kwargs": {"net_arch": [16]}, "learning_starts": 4, "batch_size": 16, "seed": 0, "device": "cpu"}


@pytest.fixture
def awfm(tmp_path, monkeypatch):
    (tmp_path / "awfm.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "awfm", raising=False)
    return importlib.import_module("awfm").AWFM


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def same(one, other):
    pairs = zip(one.policy.state_dict().values(), other.policy.state_dict().values(), strict=True)
    return all(th.equal(*pair) for pair in pairs)


def test_the_script_of_the_page(awfm):
    assert 60 <= len(FILE.splitlines()) <= 90
    exec(compile(shortened(SCRIPT), "page", "exec"), {})


def test_errors_for_prioritised_replay(awfm, dataset, tmp_path, monkeypatch):
    """The file as it stands is refused; with the line that the page names it learns by priorities."""
    prioritized = {"replay_buffer_class": PrioritizedReplayBuffer, "horizon_length": 2, **SMALL}
    with pytest.raises(ValueError, match="an update of AWFM told none"):
        awfm("MlpPolicy", PointEnv(), **prioritized).learn_offline(dataset, 3)
    assert FILE.count("(batch.valid *") == 1 and "`self.row_weights(batch, q, y)` in place of `batch.valid`" in PAGE
    (tmp_path / "telling.py").write_text(FILE.replace("(batch.valid *", "(self.row_weights(batch, q, y) *"))
    telling = importlib.import_module("telling").AWFM
    model = telling("MlpPolicy", PointEnv(), **prioritized).learn_offline(dataset, 3)
    assert len(set(model.replay_buffer.priorities_of_dataset()[0].tolist())) > 10
    plain, same_draws = (each("MlpPolicy", PointEnv(), horizon_length=2, **SMALL) for each in (awfm, telling))
    for each in (plain, same_draws):
        each.learn_offline(dataset, 3)
    assert same(plain, same_draws)


def test_both_phases_and_a_reload(awfm, dataset):
    make = lambda: awfm("MlpPolicy", PointEnv(), horizon_length=2, flow_steps=3, **SMALL)  # noqa: E731
    model = make().learn_offline(dataset, 10)
    assert model.policy.flow_steps == model.actor.flow_steps == 3
    model.save("half")
    resumed = awfm.load("half", env=PointEnv())
    assert resumed.temperature == model.temperature and same(model, resumed)
    for each in (model, resumed):
        each.learn_offline(dataset, 10)
        assert each.offline_updates == 20 and not each.is_offline
    assert same(model, resumed), "resumed to the last bit"
    before = make().policy.state_dict()
    after = model.policy.state_dict()
    moved = {name.split(".")[0] for name in before if not th.equal(before[name], after[name])}
    assert moved == {"actor", "critic", "critic_target"}
    model.learn(30)
    assert model.num_timesteps == 30 and model._n_updates > 20


def test_acting(awfm, dataset):
    model = awfm("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, 5)
    observations = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    found = {}
    for mode in ("sample", "zero", "best_of_n"):
        model.set_acting_mode(mode)
        found[mode], _ = model.predict(observations, deterministic=True)
        np.testing.assert_array_equal(found[mode], model.predict(observations, deterministic=True)[0])
        model.save(mode)
        np.testing.assert_array_equal(found[mode], awfm.load(mode).predict(observations, deterministic=True)[0])
    assert not np.array_equal(found["sample"], found["zero"])
    with pytest.raises(ValueError, match="`acting_mode` must be one of"):
        model.set_acting_mode("mean")


def test_metrics_are_logged(awfm, dataset, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = awfm("MlpPolicy", PointEnv(), tensorboard_log=str(tmp_path / "runs"), **SMALL)
    model.learn_offline(dataset, 4, log_interval=2)
    events = EventAccumulator(str(tmp_path / "runs" / "AWFM_offline_1"))
    events.Reload()
    for name in ("actor_loss", "critic_loss", "weight"):
        values = [event.value for event in events.Scalars(f"train/{name}")]
        assert len(values) == 2 and all(map(math.isfinite, values))


def test_arguments(awfm):
    for given in ({"temprature": 2.0}, {"policy_kwargs": {"flow_step": 2}}):
        with pytest.raises(TypeError, match=r"did you mean `(temperature|flow_steps)`\?"):
            awfm("MlpPolicy", PointEnv(), **given)
    with pytest.raises(ValueError, match="`flow_steps` was given twice"):
        awfm("MlpPolicy", PointEnv(), flow_steps=3, policy_kwargs={"flow_steps": 2})
    with pytest.raises(ValueError, match="`storage` must be one of 'auto', 'cpu', 'device', but 'gpu'"):
        awfm("MlpPolicy", PointEnv(), storage="gpu")


def test_better_actions_weigh_more(awfm, dataset):
    """The critics are exchanged for Q = -|a|, of which the weights are known."""
    model = awfm("MlpPolicy", PointEnv(), temperature=0.5, **SMALL)
    model.replay_buffer.set_offline(dataset)
    batch, noise = model.replay_buffer.sample(16), th.zeros(16, 8, 2)
    model.critic.bind = lambda observations: lambda a: -a.norm(dim=-1).expand(2, *a.shape[:-1])
    with th.no_grad():
        own = -model.actor.act(batch.observations, noise).norm(dim=-1).mean(dim=1)
        advantage = -batch.actions.norm(dim=1) - own
    th.testing.assert_close(model.weights(batch, noise)[:, 0], (advantage / 0.5).exp().clamp(max=100))


class Stop(BaseCallback):
    def _on_step(self) -> bool:
        assert self.model.is_offline == (self.model.phase.name == "offline")
        return self.n_calls < 3


def test_a_callback_stops_either_phase(awfm, dataset):
    model = awfm("MlpPolicy", PointEnv(), **SMALL)
    model.learn_offline(dataset, 10, Stop())
    assert model.offline_updates == 3 and model.phase.name == "online"
    model.learn(10, Stop())
    assert model.num_timesteps == 3
