"""Pictures of flows, and the callback that draws during training: drawing changes nothing."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from matplotlib.image import imread
from on_policy import ACTION_SPACES, walks
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from tasks import PointEnv, collect
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_flow import DSRL, FMQ, FQL, PPO, QAM, RLPD, RQL, FlowMapPolicy
from sb3_flow.plotting import FlowVisualisationCallback
from sb3_flow.plotting.flows import action_flow, flow_values

SMALL = {"policy_kwargs": {"net_arch": [16]}, "batch_size": 8, "learning_starts": 0, "n_candidates": 2, "seed": 0}
ON_POLICY = {"n_steps": 16, "policy_kwargs": {"net_arch": [8]}, "seed": 0, "learning_rate": 0.01}
OBSERVATION = np.array([0.7, 0.5], np.float32)
OWN = {RQL: {}, FMQ: {}, FQL: {"actor_type": "best_of_n"}, RLPD: {"n_critics": 2}, DSRL: {}, QAM: {"edit_scale": 0.5}}


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
@pytest.mark.parametrize("horizon_length", [1, 3])
def test_path_ends_in_what_acts_and_its_value(algorithm, horizon_length):
    model = algorithm("MlpPolicy", PointEnv(), horizon_length=horizon_length, **SMALL, **OWN[algorithm])
    policy = model.policy
    observation, noise = th.randn(2, 2), th.randn(2, 5, policy.noise_dim)
    with th.no_grad():
        times, points = policy.flow_path(observation, noise)
        values = policy.path_values(observation, times, points)
        start = policy.steered(observation, noise) if algorithm is DSRL else noise
        actions = policy.samples(observation, noise)
        expected = th.stack([th.cat(policy.critic(observation, actions[:, i]), dim=1) for i in range(5)])  # (n, B, K)
    assert (times[0], times[-1]) == (0, 1)
    n_points = 2 if algorithm is RLPD else 11  # its actor takes one step
    assert points.shape == (n_points, 2, 5, 2 * horizon_length)
    assert values.shape == (policy.n_critics, n_points, 2, 5)
    assert th.equal(points[0], start[..., : 2 * horizon_length])
    th.testing.assert_close(points[-1], actions, rtol=1e-5, atol=1e-6)  # acting is one kernel, it rounds differently
    assert th.allclose(values[:, -1], expected.permute(2, 1, 0), atol=1e-6)


def test_values_on_the_way():
    model = RQL("MlpPolicy", PointEnv(), flow_steps=4, **SMALL)
    observation, noise = th.randn(1, 2), th.randn(1, 3, 2)
    with th.no_grad():
        times, points = model.policy.flow_path(observation, noise)
        values = model.policy.path_values(observation, times, points)
        expected = model.critic.bind(observation.expand(3, -1))(points[1, 0], th.full((3, 1), 0.25))
    assert th.allclose(values[:, 1, 0], expected.squeeze(-1), atol=1e-6)
    fmq = FMQ("MlpPolicy", PointEnv(), **SMALL).policy
    with th.no_grad():
        times, points = fmq.flow_path(observation, noise)
        values = fmq.path_values(observation, times, points)
        jumped = fmq.actor.act(observation, noise)
        assert th.allclose(values[:, 0], fmq.critic.bind(observation)(jumped), atol=1e-6), "of the one-step action"
    fql = FQL("MlpPolicy", PointEnv(), flow_steps=4, **SMALL, **OWN[FQL]).policy
    with th.no_grad():
        times, points = fql.flow_path(observation, noise)
        values = fql.path_values(observation, times, points)
        u = fql.actor.velocity(observation.expand(3, -1))(points[1, 0], th.full((3, 1), 0.25))
        heads_for = (points[1, 0] + 0.75 * u).clamp(-1, 1)
        assert th.allclose(values[:, 1], fql.critic.bind(observation)(heads_for[None]), atol=1e-6)


def test_the_distilled_actor_goes_there_in_one_step():
    policy = FQL("MlpPolicy", PointEnv(), **SMALL).policy
    observation, noise = th.randn(2, 2), th.randn(2, 5, 2)
    with th.no_grad():
        times, points = policy.flow_path(observation, noise)
        values = policy.path_values(observation, times, points)
        actions = policy.actor.act(observation, noise)
        q = policy.critic.bind(observation)(actions)
    assert times.tolist() == [0, 1] and th.equal(points[0], noise) and th.equal(points[1], actions)
    th.testing.assert_close(values, th.stack([q, q], dim=1), rtol=1e-5, atol=1e-6)
    figure = action_flow(policy, OBSERVATION, n_samples=7)
    assert len(figure.axes[0].collections[0].get_segments()) == 7


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
def test_pictures_of_a_flow(algorithm, tmp_path):
    model = algorithm("MlpPolicy", PointEnv(), **SMALL, **OWN[algorithm])
    figure = action_flow(model, OBSERVATION, n_samples=7, path=tmp_path / "flow.png")
    left, right = figure.axes[:2]
    assert left.get_xlabel() == right.get_xlabel() == "action[0]"
    assert len(left.collections[0].get_segments()) == (1 if algorithm is RLPD else 10) * 7
    star = right.collections[-1].get_offsets()[0]
    assert np.allclose(star, model.predict(OBSERVATION, deterministic=True)[0], atol=1e-6), "in the units of the actions"
    field = right.collections[0].get_array()
    assert field.shape == (41, 41), "values of all actions"
    with th.no_grad():  # row y, column x
        corner = th.stack(model.critic(th.as_tensor(OBSERVATION)[None], th.tensor([[1.0, -1.0]]))).mean()
    assert field[0, -1] == pytest.approx(float(corner), abs=1e-6)
    values = flow_values(model, OBSERVATION, n_samples=7, path=tmp_path / "values.png")
    assert len(values.axes[0].collections[0].get_segments()) == 7
    assert np.ptp(imread(tmp_path / "values.png")) > 0
    assert imread(tmp_path / "flow.png").shape[:2] == (630, 1425)


def test_a_step_of_a_chunk_and_one_component():
    model = RQL("MlpPolicy", PointEnv(), horizon_length=3, **SMALL)
    figure = action_flow(model, OBSERVATION, dimensions=(1, 0), chunk_step=2, n_samples=4)
    assert figure.axes[0].get_xlabel() == "action[1] (step 3 of a chunk of 3)"
    assert len(figure.axes[1].collections[0].get_offsets()) == 4, "no background: a chunk has more than two components"
    figure = action_flow(model, OBSERVATION, dimensions=(1,), n_samples=4)
    assert len(figure.axes[0].lines) == 4
    assert figure.axes[1].get_xlabel() == "action[1] (step 1 of a chunk of 3)"


def test_one_dimensional_actions_and_no_critic():
    policy = FlowMapPolicy(*(spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,)), lambda _: 1e-3), net_arch=[8], n_critics=0)
    figure = action_flow(policy, np.zeros(3, np.float32), n_samples=6)
    assert figure.axes[1].get_ylabel() == "samples"
    with pytest.raises(ValueError, match="n_critics=0"):
        flow_values(policy, np.zeros(3, np.float32))
    clone = RQL("MlpPolicy", PointEnv(), objective="bc", n_critics=2, policy_kwargs={"net_arch": [8]})
    with pytest.raises(ValueError, match='has no values to draw: with `objective="bc"`'):
        flow_values(clone, np.zeros(2, np.float32))


@pytest.mark.parametrize(("kind", "policy"), [("dict", "MultiInputPolicy"), ("image", "CnnPolicy")])
def test_other_observations(kind, policy):
    env = PointEnv(kind)
    kwargs = {"net_arch": [8], **({"features_extractor_kwargs": {"features_dim": 8}} if kind == "image" else {})}
    model = RQL(policy, env, **{**SMALL, "policy_kwargs": kwargs})
    assert action_flow(model, env.reset(seed=0)[0], n_samples=2).axes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dimensions": (0, 2)}, ValueError, "`dimensions` must name one or two of the 2 components"),
        ({"dimensions": ()}, ValueError, "`dimensions` must name one or two"),
        ({"chunk_step": 1}, ValueError, "`chunk_step` must be from 0 to 0, but 1"),
        ({"n_samples": 0}, ValueError, "`n_samples` must be at least 1"),
        ({"observation": np.zeros((2, 2), np.float32)}, ValueError, "`observation` must be a single observation, but 2"),
        (
            {"model": PPO("MlpPolicy", PointEnv())},
            TypeError,
            "must be RQL, FMQ, FQL, RLPD, DSRL, QAM or their policy, but a ActorCritic",
        ),
    ],
)
def test_flows_that_cannot_be_drawn(arguments, error, message):
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    with pytest.raises(error, match=message):
        action_flow(**{"model": model, "observation": OBSERVATION, **arguments})


# ------------------------------------------------------------------------- callback


def images(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    return {tag: [event.step for event in accumulator.Images(tag)] for tag in accumulator.Tags()["images"]}


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
def test_pictures_of_both_phases(algorithm, tmp_path):
    dataset, weights = collect(PointEnv()), []
    for drawn in (False, True):
        env = VecNormalize(make_vec_env(PointEnv, seed=0))
        model = algorithm(
            *("MlpPolicy", env), offline_dataset=dataset, offline_steps=4, tensorboard_log=str(tmp_path / "tb"), **SMALL
        )
        callback = FlowVisualisationCallback(3, save_path=tmp_path / "png") if drawn else None
        model.learn(3, callback=callback, tb_log_name=f"run{drawn}")
        weights.append(model.policy.state_dict())
    assert all(th.equal(weights[0][name], weights[1][name]) for name in weights[0]), "drawing changes nothing"
    # the callback's own count, as with SB3's callbacks: calls 3 and 6
    assert images(tmp_path / "tb" / "runTrue_offline_1") == {"pictures/action_flow": [3], "pictures/flow_values": [3]}
    assert images(tmp_path / "tb" / "runTrue_1") == {"pictures/action_flow": [2], "pictures/flow_values": [2]}
    places = ("offline_3", "online_2")
    names = [f"{algorithm.__name__}_{name}_{place}_steps.png" for name in ("action_flow", "flow_values") for place in places]
    assert sorted(file.name for file in (tmp_path / "png").iterdir()) == sorted(names)
    expected = env.normalize_obs(dataset.observations[0])
    assert np.array_equal(callback._observation(), expected), "the start of the data, as the policy sees it now"


def test_a_clone_is_drawn_without_values(tmp_path):
    model = RQL("MlpPolicy", PointEnv(), objective="bc", offline_dataset=collect(PointEnv()), **SMALL)
    model.learn_offline(model.offline_dataset, 2, callback=FlowVisualisationCallback(2, save_path=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["RQL_action_flow_offline_2_steps.png"]


def test_pictures_of_ratios(tmp_path):
    weights = []
    for drawn in (False, True):
        model = PPO("MlpPolicy", walks(2, ACTION_SPACES["discrete"]), batch_size=8, tensorboard_log=str(tmp_path), **ON_POLICY)
        callback = FlowVisualisationCallback(16, save_path=tmp_path / "png") if drawn else None
        model.learn(64, callback=callback, tb_log_name=f"run{drawn}")
        weights.append(model.policy.state_dict())
    assert all(th.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert images(tmp_path / "runTrue_1") == {"pictures/importance_ratios": [32, 64]}
    assert len(list((tmp_path / "png").iterdir())) == 2


def test_callback_without_a_place_or_a_flow(tmp_path):
    with pytest.raises(ValueError, match="nowhere to put pictures"):
        RQL("MlpPolicy", PointEnv(), **SMALL).learn(1, callback=FlowVisualisationCallback())
    with pytest.raises(TypeError, match="but `model` is a SAC"):
        SAC("MlpPolicy", PointEnv(), buffer_size=10).learn(1, callback=FlowVisualisationCallback(save_path=tmp_path))
    with pytest.raises(ValueError, match="`plot_freq` must be at least 1"):
        FlowVisualisationCallback(0)
