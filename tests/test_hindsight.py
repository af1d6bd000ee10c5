"""Hindsight: relabelled windows against a plain transcription, SB3's buffer at one step, and what the models make of them."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch as th
from goal_tasks import Reach, success_rate, wandering
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer as SB3HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from stable_baselines3.her import GoalSelectionStrategy

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, HerReplayBuffer, OfflineDataset
from sb3_flow.common.torch_vec_env import TensorStep, TorchVecEnv
from sb3_flow.data.rows import StoredSteps

GOAL = spaces.Box(-np.inf, np.inf, (2,))
SPACE = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (1,)), "achieved_goal": GOAL, "desired_goal": GOAL})
ACTIONS = spaces.Box(-1, 1, (1,))
GAMMA, N_SAMPLED = 0.9, 3


# ------------------------------------------------------------------------------------------------ trajectories that tell all


def goal_of(trajectory, step):
    """The goal that is achieved before a step: no other step of any trajectory achieves it."""
    return np.array([trajectory, step], dtype=np.float32)


def wanted(trajectory):
    return np.array([-1.0, trajectory], dtype=np.float32)


def reward_of(achieved, desired, infos=None):
    """Depends on each of the four numbers, and on the infos where there are any."""
    rewards = np.sin(achieved @ np.array([3.1, 7.7]) + desired @ np.array([5.3, 2.9])).astype(np.float32)
    return rewards + np.array([info.get("bonus", 0.0) for info in infos], dtype=np.float32) if infos is not None else rewards


def ends_at(achieved, desired, infos=None):
    """Ends at the goal, and at a few other steps that depend on both."""
    return (achieved == desired).all(axis=-1) | (np.cos(13.0 * achieved @ np.ones(2) + 3.0 * desired @ np.ones(2)) > 0.9)


def bonus(trajectory, step):
    return 0.01 * trajectory + 0.1 * step


class Trajectories:
    """What is stored, written down plainly: steps of each trajectory by their numbers, and how each ended."""

    def __init__(self, buffer, rng, offline=0, n_steps=0):
        self.buffer, self.first, self.last, self.flags = buffer, {}, {}, {}
        if offline:
            self.add_offline(rng, offline)
        n_envs = buffer.n_envs
        self.number, self.step = np.arange(n_envs) + 1000, np.zeros(n_envs, dtype=int)
        self.written = []
        for _ in range(n_steps):
            self.add_online(rng)
        for rows in self.written[-buffer.buffer_size :]:
            for trajectory, step in rows:
                self.first.setdefault(trajectory, step)
                self.last[trajectory] = step

    def observation(self, trajectory, step):
        return {
            "observation": np.float32([trajectory * 100 + step]),
            "achieved_goal": goal_of(trajectory, step),
            "desired_goal": wanted(trajectory),
        }

    def add_offline(self, rng, n):
        rows, following, ends, flags = [], [], [], []
        for trajectory in range(n):
            length = int(rng.integers(self.buffer.horizon_length, 9)) if trajectory else 8
            self.first[trajectory], self.last[trajectory] = 0, length - 1
            for step in range(length):
                rows.append(self.observation(trajectory, step))
                following.append(self.observation(trajectory, step + 1))
                ends.append(step == length - 1)
                flags.append(bool(ends[-1] and rng.random() < 0.5))
                self.flags[trajectory, step] = flags[-1]
        stacked = [{key: np.stack([row[key] for row in part]) for key in SPACE} for part in (rows, following)]
        rewards = reward_of(stacked[1]["achieved_goal"], stacked[1]["desired_goal"])
        actions = np.linspace(-0.9, 0.9, len(rows))[:, None]
        self.dataset = OfflineDataset.from_arrays(
            *(stacked[0], actions, rewards, flags, ends, stacked[1]), observation_space=SPACE, action_space=ACTIONS
        )
        self.buffer.set_offline(self.dataset)

    def add_online(self, rng):
        here = [self.observation(*one) for one in zip(self.number, self.step, strict=True)]
        then = [self.observation(*one) for one in zip(self.number, self.step + 1, strict=True)]
        infos = [{"bonus": bonus(*one)} for one in zip(self.number, self.step, strict=True)]
        before, after = ({key: np.stack([part[key] for part in parts]) for key in SPACE} for parts in (here, then))
        rewards = reward_of(after["achieved_goal"], after["desired_goal"], infos if self.buffer.copy_info_dict else None)
        dones = rng.random(self.buffer.n_envs) < 0.2
        timeouts = dones & (rng.random(self.buffer.n_envs) < 0.5)
        for i, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(timeouts[i])
            self.flags[int(self.number[i]), int(self.step[i])] = bool(dones[i] and not timeouts[i])
        self.written.append([(int(number), int(step)) for number, step in zip(self.number, self.step, strict=True)])
        self.buffer.add(before, after, rng.uniform(-1, 1, (self.buffer.n_envs, 1)), rewards, dones, infos)
        self.number = np.where(dones, self.number + self.buffer.n_envs, self.number)
        self.step = np.where(dones, 0, self.step + 1)
        if rng.random() < 0.03:  # a reset amid the episodes
            self.buffer.cut_trajectories()
            self.number, self.step = self.number + self.buffer.n_envs, self.step * 0

    def check(self, samples):
        """Compare each window with the definition, and return how many are relabelled and where in the choice goals lie."""
        h, relabelled, places = self.buffer.horizon_length, 0, []
        strategy = self.buffer.goal_selection_strategy
        for i in range(len(samples.rewards)):
            here, then = ({key: value[i].numpy() for key, value in part.items()} for part in (samples[0], samples[2]))
            trajectory, start = (int(number) for number in here["achieved_goal"])
            first, last = self.first[trajectory], self.last[trajectory]
            assert first <= start <= last
            goal = here["desired_goal"]
            np.testing.assert_array_equal(then["desired_goal"], goal)
            is_new = not np.array_equal(goal, wanted(trajectory))
            relabelled += is_new
            if is_new:
                assert goal[0] == trajectory
                begin = {"FUTURE": start, "EPISODE": first, "FINAL": last}[strategy.name]
                assert begin + 1 <= goal[1] <= last + 1
                places.append((int(goal[1]) - 1 - begin, last - begin))
            total, bootstraps, alive = 0.0, True, True
            recomputes = is_new and self.buffer.compute_terminated is not False
            for j in range(h):
                step = min(start + j, last)
                after = goal_of(trajectory, step + 1)
                infos = [{"bonus": bonus(trajectory, step)}] if self.buffer.copy_info_dict and trajectory >= 1000 else None
                if start + j <= last and alive:
                    total += GAMMA**j * float(reward_of(after[None], goal[None], infos)[0])
                ends = bool(ends_at(after, goal)) if recomputes else self.flags[trajectory, step]
                if recomputes:
                    alive = alive and not ends
                    bootstraps = alive
                elif self.buffer.window_rule == "rql":
                    bootstraps = not ends
                else:
                    bootstraps = bootstraps and not ends
            np.testing.assert_allclose(samples.rewards[i].item(), total, atol=1e-5)
            np.testing.assert_allclose(samples.discounts[i].item(), GAMMA**h * bootstraps, rtol=1e-6)
            # a step that ended the task may go on under its new goal, so that the step's true successor counts
            is_true = self.buffer.window_rule == "q_chunking" or self.buffer.compute_terminated is not False
            successor = min(start + h, last + is_true)
            np.testing.assert_array_equal(then["achieved_goal"], goal_of(trajectory, successor))
            assert samples.valid[i].item() == (start + h - 1 <= last)
        return relabelled, places


def buffer_of(h=3, n_envs=2, size=40, **options):
    options = {"horizon_length": h, "gamma": GAMMA, "n_sampled_goal": N_SAMPLED, "compute_reward": reward_of, **options}
    buffer = HerReplayBuffer(size, SPACE, ACTIONS, None, "cpu", n_envs, **options)
    buffer.generator = th.Generator().manual_seed(0)
    return buffer


# --------------------------------------------------------------------------------------------- windows against the definition


@pytest.mark.parametrize("rule", ["rql", "q_chunking"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("source", ["offline", "online", "both", "wrapped"])
@pytest.mark.parametrize("seed", range(3))
def test_windows_are_as_defined(rule, strategy, source, seed):
    rng = np.random.default_rng(seed)
    buffer = buffer_of(
        h=int(rng.integers(1, 5)),
        n_envs=int(rng.integers(1, 4)),
        window_rule=rule,
        goal_selection_strategy=strategy,
        copy_info_dict=bool(rng.random() < 0.5),
        compute_terminated=ends_at if rng.random() < 0.5 else False,
        sampling=rng.choice(["trajectory", "transition"]),
        offline_fraction=rng.choice([None, 0.3]),
        storage=rng.choice(["cpu", "device"]),
    )
    n_steps = {"offline": 0, "online": 12, "both": 12, "wrapped": 90}[source]
    stored = Trajectories(buffer, rng, offline=0 if source == "online" else 6, n_steps=n_steps)
    relabelled, places = stored.check(buffer.sample(400))
    assert relabelled == 300  # 3 of 4
    assert min(place for place, _ in places) == 0 or strategy == "final"
    assert all(place == 0 for place, _ in places) == (strategy == "final")
    # every step of the choice is as probable as the others
    shares = [place / span for place, span in places if span > 0]
    assert not shares or 0.4 < np.mean(shares) < 0.6
    assert any(place == span for place, span in places)


def broken(monkeypatch, name):
    """Plant a mistake."""
    after, goals, relabel = StoredSteps.after, HerReplayBuffer._goals, HerReplayBuffer._relabel

    def only_first(self, parts):
        before = parts.next_observations["desired_goal"].clone()
        relabel(self, parts)
        parts.next_observations["desired_goal"].copy_(before)

    def old_rewards(self, parts):
        relabel(self, parts._replace(rewards=parts.rewards.clone()))

    if name == "achieved before the step":
        monkeypatch.setattr(
            StoredSteps,
            "after",
            lambda self, key, windows, steps, n: after(
                self, key, windows, th.maximum(steps - int(steps.shape[1] > 1), windows.first[:, None]), n
            ),
        )
    elif name == "goal of another trajectory":
        monkeypatch.setattr(HerReplayBuffer, "_goals", lambda *given: goals(*given).roll(1, dims=0))
    elif name == "only the first observation":
        monkeypatch.setattr(HerReplayBuffer, "_relabel", only_first)
    elif name == "stored rewards":
        monkeypatch.setattr(HerReplayBuffer, "_relabel", old_rewards)
    elif name == "goal from before the window":
        monkeypatch.setattr(
            HerReplayBuffer, "_goals", lambda self, windows: goals(self, windows._replace(start=windows.start - 1))
        )
    elif name == "goal before the step":
        monkeypatch.setattr(
            HerReplayBuffer,
            "_goals",
            lambda self, windows: goals(self, windows) - th.tensor([0.0, 1.0]),
        )
    elif name == "last step of the neighbour":
        monkeypatch.setattr(
            HerReplayBuffer, "_goals", lambda self, windows: goals(self, windows._replace(last=windows.last + 1))
        )
    elif name == "steps after the end pay":
        monkeypatch.setattr(th.Tensor, "__imul__", lambda self, other: self)


WRONG = (
    *("achieved before the step", "goal of another trajectory", "only the first observation", "stored rewards"),
    *("goal from before the window", "goal before the step", "last step of the neighbour", "steps after the end pay"),
)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("offline", [0, 6])
def test_wrong_variants_are_noticed(monkeypatch, name, offline):
    buffer = buffer_of(window_rule="q_chunking", compute_terminated=ends_at)
    stored = Trajectories(buffer, np.random.default_rng(0), offline, n_steps=0 if offline else 60)
    stored.check(buffer.sample(300))
    broken(monkeypatch, name)
    with pytest.raises((AssertionError, KeyError)):
        stored.check(buffer.sample(300))


def test_future_reaches_from_the_first_step_to_the_last():
    buffer = buffer_of(h=2, n_envs=1, window_rule="q_chunking")
    stored = Trajectories(buffer, np.random.default_rng(0), offline=1)
    samples = buffer.sample(4000)
    found = {}
    for here in zip(samples.observations["achieved_goal"].numpy(), samples.observations["desired_goal"].numpy(), strict=True):
        if here[1][0] >= 0:
            found.setdefault(int(here[0][1]), []).append(int(here[1][1]))
    last = stored.last[0]
    for start in range(last + 1):
        counts = np.bincount(np.array(found[start]) - start - 1, minlength=last + 1 - start)
        assert len(counts) == last + 1 - start
        expected = len(found[start]) / len(counts)
        assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_the_dataset_and_the_environment_have_the_same_share():
    """A batch holds the dataset's windows first."""
    buffer = buffer_of(n_envs=1, offline_fraction=0.5)
    Trajectories(buffer, np.random.default_rng(0), offline=6, n_steps=30)
    goals = buffer.sample(2000).observations["desired_goal"][:, 0]
    shares = [(part >= 0).float().mean().item() for part in (goals[:1000], goals[1000:])]
    assert shares == pytest.approx([0.75, 0.75], abs=0.05)


def test_windows_that_are_named_keep_their_goals():
    """``offline_windows`` is for comparisons on the same windows."""
    buffer = buffer_of()
    stored = Trajectories(buffer, np.random.default_rng(0), offline=3)
    assert stored.check(buffer.offline_windows(np.arange(len(stored.dataset))))[0] == 0


def test_no_hindsight_is_the_buffer_without_it():
    buffer = buffer_of(n_sampled_goal=0, compute_reward=None)
    assert Trajectories(buffer, np.random.default_rng(0), 4, 40).check(buffer.sample(200))[0] == 0


# ------------------------------------------------------------------------------------------------------ SB3's buffer, one step


class Answers(Reach):
    def compute_reward(self, achieved, desired, infos):
        return reward_of(achieved, desired, None if isinstance(infos, dict) else infos)


@pytest.mark.parametrize("copy_info_dict", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_transitions_of_one_step_are_those_of_sb3(monkeypatch, normalises, copy_info_dict, n_envs):
    venv = VecNormalize(DummyVecEnv([Answers] * n_envs), clip_obs=5.0, clip_reward=0.4)
    rng, options = np.random.default_rng(0), {"n_sampled_goal": N_SAMPLED, "copy_info_dict": copy_info_dict}
    theirs = SB3HerReplayBuffer(90, venv.observation_space, venv.action_space, venv, "cpu", n_envs, **options)
    ours = HerReplayBuffer(
        *(90, venv.observation_space, venv.action_space, venv, "cpu", n_envs),
        **options,
        window_rule="q_chunking",
        sampling="transition",
    )
    ours.generator = th.Generator().manual_seed(0)
    venv.reset()
    observations = venv.get_original_obs()
    for _ in range(75):
        actions = rng.uniform(-1, 1, (n_envs, 2)).astype(np.float32)
        _, _, dones, infos = venv.step(actions)
        following, rewards = venv.get_original_obs(), venv.get_original_reward()
        stored = {key: value.copy() for key, value in following.items()}
        for i, info in enumerate(infos):
            info["bonus"] = float(rng.random())
            if dones[i]:
                for key in stored:
                    stored[key][i] = venv.unnormalize_obs(info["terminal_observation"])[key]
        for buffer in (ours, theirs):
            buffer.add(observations, stored, actions, rewards, dones, infos)
        observations = following
    places, env = [], venv if normalises else None
    after = StoredSteps.after

    def noted(self, key, windows, steps, n_online):
        places.append((windows, steps))
        return after(self, key, windows, steps, n_online)

    monkeypatch.setattr(StoredSteps, "after", noted)
    found = ours.sample(200, env)
    (windows, goals), (_, steps) = places
    column, start = windows.column.numpy(), windows.start.numpy()
    assert (steps[:, 0].numpy() == start).all() and len(start) == 150
    rows = goals[:, 0].numpy() % ours.buffer_size
    monkeypatch.setattr(theirs, "_sample_goals", lambda *_: theirs.next_observations["achieved_goal"][rows, column])
    expected = theirs._get_virtual_samples(start % ours.buffer_size, column, env)

    def table(observations, next_observations, actions, rewards, going_on):
        parts = [*observations.values(), *next_observations.values(), actions, rewards, going_on]
        numbers = np.concatenate([np.asarray(part).reshape(len(rewards), -1) for part in parts], axis=1)
        return numbers[np.lexsort(numbers.T)]

    own = table(found.observations, found.next_observations, found.actions, found.rewards, found.discounts / 0.99)
    (o, a, n, d, r) = expected[:5]
    virtual = table(o, n, a, r, 1.0 - d)
    matching = [(np.abs(own - row).max(axis=1) < 1e-6).any() for row in virtual]
    assert all(matching)
    # and the others are SB3's real transitions
    running = np.arange(len(theirs.actions))[:, None] < theirs.pos
    everything = np.argwhere(np.broadcast_to(running | theirs.full, theirs.dones.shape))
    real = theirs._get_real_samples(everything[:, 0], everything[:, 1], env)
    both = np.concatenate([table(real[0], real[2], real[1], real[4], 1.0 - real[3]), virtual])
    assert all((np.abs(both - row).max(axis=1) < 1e-6).any() for row in own)


# ------------------------------------------------------------------------------------------------------------- in the models

FEW = {
    RQL: {"flow_steps": 2},
    FMQ: {"n_candidates": 2},
    FQL: {"flow_steps": 2},
    RLPD: {"n_critics": 2},
    DSRL: {"flow_steps": 2, "n_critics": 2},
    QAM: {"flow_steps": 2, "n_critics": 2},
}


def model_of(algorithm=RLPD, env=None, n_envs=1, **changes):
    env = DummyVecEnv([lambda: Reach(length=10)] * n_envs) if env is None else env
    options = {
        "horizon_length": 3,
        "replay_buffer_class": HerReplayBuffer,
        "policy_kwargs": {"net_arch": [8]},
        "batch_size": 8,
        "buffer_size": 200,
        "learning_starts": 20,
        "seed": 0,
        "device": "cpu",
    }
    return algorithm("MultiInputPolicy", env, **{**options, **FEW[algorithm], **changes})


def weights(model):
    return th.cat([parameter.flatten() for parameter in model.policy.parameters()])


@pytest.mark.parametrize("algorithm", FEW)
def test_every_algorithm_learns_offline_and_online(algorithm):
    model = model_of(algorithm, n_envs=2, replay_buffer_kwargs={"n_sampled_goal": 2, "goal_selection_strategy": "final"})
    before = weights(model)
    model.learn_offline(wandering(6, env=Reach(length=10)), 2)
    model.learn(40)
    assert not th.equal(before, weights(model))
    asked = []
    model.replay_buffer.compute_reward = lambda *given: asked.append(len(given[0])) or Reach().compute_reward(*given)
    model.train(1, 8)
    assert asked == [3 * int(8 * 2 / 3)]


def test_environments_in_processes_and_normalised():
    venv = VecNormalize(SubprocVecEnv([lambda: Reach(length=10)] * 2), norm_obs_keys=["observation"])
    model = model_of(env=venv, replay_buffer_kwargs={"compute_terminated": True})
    model.learn(40)
    venv.close()


def test_without_an_environment_a_function_computes_rewards():
    dataset = wandering(6, env=Reach(length=10))
    model = RLPD("MultiInputPolicy", None, replay_buffer_class=HerReplayBuffer, offline_dataset=dataset, horizon_length=3)
    with pytest.raises(ValueError, match=r"HerReplayBuffer needs `compute_reward`.*`env`, `set_env`.*compute_reward=\.\.\."):
        model.learn_offline(dataset, 1)
    functions = {"compute_reward": Reach().compute_reward, "compute_terminated": Reach().compute_terminated}
    model = RLPD(
        *("MultiInputPolicy", None),
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs=functions,
        offline_dataset=dataset,
        horizon_length=3,
    )
    before = weights(model)
    model.learn_offline(dataset, 1)
    assert not th.equal(before, weights(model))


def test_a_model_goes_on_from_its_file_exactly(tmp_path):
    dataset = wandering(6, env=Reach(length=10))
    model = model_of(replay_buffer_kwargs={"compute_reward": lambda *given: Reach().compute_reward(*given)})
    model.learn_offline(dataset, 2)
    model.save(tmp_path / "model")
    copied, loaded = copy.deepcopy(model), RLPD.load(tmp_path / "model", env=DummyVecEnv([Reach]))
    for one in (model, copied, loaded):
        one.learn_offline(dataset, 2)
    assert th.equal(weights(model), weights(loaded)) and th.equal(weights(model), weights(copied))
    assert copied.replay_buffer.env is copied.env is not model.env


def test_settings_are_those_of_the_model(tmp_path):
    """Also over the steps of a file, which holds no functions."""
    ends = Reach().compute_terminated
    given = {"n_sampled_goal": 1, "goal_selection_strategy": "final", "compute_terminated": ends}
    model, default = model_of(replay_buffer_kwargs=given), model_of()
    for name, each in {"given": model, "default": default}.items():
        each.learn(25)
        each.save_replay_buffer(tmp_path / name)
    model.load_replay_buffer(tmp_path / "default", truncate_last_traj=False)
    default.load_replay_buffer(tmp_path / "given", truncate_last_traj=False)
    buffers = model.replay_buffer, default.replay_buffer
    settings = [(each.her_ratio, each.goal_selection_strategy.name, each.compute_terminated) for each in buffers]
    assert settings == [(0.5, "FINAL", ends), (0.8, "FUTURE", False)]
    other = model_of(replay_buffer_kwargs={"copy_info_dict": True})
    with pytest.raises(ValueError, match="has `copy_info_dict=False`, but the model has `copy_info_dict=True`"):
        other.load_replay_buffer(tmp_path / "default", truncate_last_traj=False)


class Together(TorchVecEnv):
    """Points with goals that are one object, by tensors."""

    def __init__(self):
        super().__init__(3, Reach().observation_space, Reach().action_space)
        self.t = 0

    def observe(self):
        return {"observation": self.x.clone(), "achieved_goal": self.x.clone(), "desired_goal": self.goals}

    def _reset(self, seed, options):
        self.x, self.goals, self.t = th.zeros(3, 2), th.full((3, 2), 0.5), 0
        return self.observe()

    def _step(self, actions):
        self.x, self.t = self.x + 0.1 * actions, self.t + 1
        over, final, rewards = th.full((3,), self.t == 5), self.observe(), self.compute_reward(self.x, self.goals, None)
        return TensorStep(self._reset(None, None) if over.all() else final, rewards, th.zeros_like(over), over, final)

    def compute_reward(self, achieved, desired, infos):
        return -th.linalg.vector_norm(th.as_tensor(achieved) - th.as_tensor(desired), dim=-1)


def test_environments_that_are_one_object_compute_rewards():
    model = model_of(env=Together(), batch_size=32)
    model.learn(60)
    samples = model.replay_buffer.sample(64)
    assert (samples.rewards < 0).any() and samples.observations["desired_goal"].unique(dim=0).shape[0] > 3


def test_a_file_without_hindsight_is_refused(tmp_path):
    model, plain = model_of(), model_of(replay_buffer_class=None)
    for name, each in {"hindsight": model, "plain": plain}.items():
        each.save_replay_buffer(tmp_path / name)
    with pytest.raises(ValueError, match=r"is a TrajectoryReplayBuffer, but the model has .*=HerReplayBuffer"):
        model.load_replay_buffer(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"is a HerReplayBuffer, but the model has .*=TrajectoryReplayBuffer"):
        plain.load_replay_buffer(tmp_path / "hindsight")


@pytest.mark.parametrize("truncates", [True, False])
def test_a_buffer_comes_back_from_its_file(tmp_path, truncates):
    model = model_of(replay_buffer_kwargs={"copy_info_dict": True, "compute_reward": lambda *given: np.zeros(len(given[0]))})
    model.learn(25)
    model.save_replay_buffer(tmp_path / "buffer")
    model.save(tmp_path / "model")
    loaded = RLPD.load(tmp_path / "model", env=model.env)
    if truncates:
        with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
            loaded.load_replay_buffer(tmp_path / "buffer")
    else:
        loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    assert loaded.replay_buffer.env is loaded.env
    for each in (model, loaded):
        each.replay_buffer.cut_trajectories()
        each.replay_buffer.generator = th.Generator().manual_seed(3)
    ours, theirs = loaded.replay_buffer.sample(50), model.replay_buffer.sample(50)
    assert all(th.equal(ours.observations[key], theirs.observations[key]) for key in ours.observations)
    assert th.equal(ours.rewards, theirs.rewards) and (ours.rewards == 0).any() and (ours.rewards < 0).any()
    assert list(loaded.replay_buffer.infos[24, 0]) == list(model.replay_buffer.infos[24, 0])


def test_the_buffer_follows_the_models_environment():
    model = model_of()
    other = DummyVecEnv([Reach])
    model.set_env(other)
    model.learn(25)
    assert model.replay_buffer.env is model.env is other


def test_stored_infos_are_not_the_functions_to_change():
    def changes(achieved, desired, infos):
        for info in infos:
            info["bonus"] = None
        return np.zeros(len(achieved))

    buffer = buffer_of(copy_info_dict=True, compute_reward=changes)
    Trajectories(buffer, np.random.default_rng(0), n_steps=20)
    buffer.sample(200)
    assert all(info["bonus"] is not None for info in buffer.infos[:20].flatten())


def test_the_same_seed_draws_the_same_goals():
    first, second = (model_of() for _ in range(2))
    for model in (first, second):
        model.learn(40)
    assert th.equal(weights(first), weights(second))


def test_no_recording_of_updates_holds_the_rewards():
    buffer = buffer_of()
    Trajectories(buffer, np.random.default_rng(0), offline=3)
    assert buffer.sampling_key() is None


# ------------------------------------------------------------------------------------------------------------------- datasets


def test_datasets_of_every_kind_have_goals(tmp_path):
    dataset = wandering(6, env=Reach(length=10))
    dataset.save(tmp_path / "folder")
    arrays = {f"observations/{key}": value for key, value in dataset.observations.items()}
    arrays |= {f"next_observations/{key}": value for key, value in dataset.next_observations.items()}
    arrays |= {name: getattr(dataset, name) for name in ("actions", "rewards", "terminated", "trajectory_ends")}
    np.savez(tmp_path / "file.npz", **arrays)
    kept = model_of(horizon_length=1)
    kept.learn(60)
    kept.save_replay_buffer(tmp_path / "kept.pkl")
    model = model_of()
    for location in (f"npz:{tmp_path / 'file.npz'}", f"npz:{tmp_path / 'folder'}", f"sb3:{tmp_path / 'kept.pkl'}"):
        model.set_offline_dataset(location)
        model.replay_buffer.offline_only = True
        samples = model.replay_buffer.sample(64)
        goals = samples.observations["desired_goal"].numpy()
        loaded = model.replay_buffer.offline_dataset
        achieved = np.concatenate([loaded.observations["achieved_goal"], loaded.final_observations["achieved_goal"]])
        assert sum((abs(achieved - goal).max(axis=1) < 1e-6).any() for goal in goals) >= int(0.8 * 64)


def test_minari_datasets_have_goals(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    collector = minari.DataCollector(Reach(length=10))
    collector.action_space.seed(0)
    for episode in range(4):
        collector.reset(seed=episode)
        for _ in range(10):
            collector.step(collector.action_space.sample())
    made = collector.create_dataset(
        dataset_id="reach/random-v0", algorithm_name="random", author="", author_email="", code_permalink=""
    )
    model = model_of()
    model.learn_offline(OfflineDataset.from_minari(made), 2)


def test_unknown_goals_of_last_steps_are_named():
    dataset = wandering(30, env=Reach(stops=True))
    names = ("actions", "rewards", "terminated", "trajectory_ends")
    arrays = {"observations": dataset.observations} | {name: getattr(dataset, name) for name in names}
    known = {"observation_space": dataset.observation_space, "action_space": dataset.action_space}
    assert dataset.terminated.any()
    model_of(n_envs=1).set_offline_dataset(dataset)
    with pytest.warns(UserWarning, match="rows are left out"):
        without = OfflineDataset.from_arrays(**arrays, **known)
    model = model_of()
    with pytest.warns(UserWarning, match=r"nothing changes in the steps that end a trajectory.*give `next_observations`"):
        model.set_offline_dataset(without)


# --------------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"goal_selection_strategy": "past"}, ValueError, "`goal_selection_strategy` must be one of 'future', .*'past'"),
        ({"goal_selection_strategy": 7}, ValueError, "`goal_selection_strategy` must be one of .* 7 was given"),
        ({"n_sampled_goal": -1}, ValueError, "`n_sampled_goal` must be at least 0, but -1"),
        ({"n_sampled_goal": 1.5}, ValueError, "`n_sampled_goal` must be a whole number, but 1.5"),
        ({"optimize_memory_usage": True}, ValueError, "`optimize_memory_usage=True` drops the next observations"),
        ({"compute_reward": 3}, TypeError, "`compute_reward` must be a function or None, but 3"),
        ({"compute_terminated": "yes"}, TypeError, "`compute_terminated` must be a function, True or False, but 'yes'"),
        ({"copy_info_dict": "no"}, TypeError, "`copy_info_dict` must be True or False, but 'no'"),
        ({"n_sampled_gaol": 3}, TypeError, "HerReplayBuffer.*n_sampled_gaol.*n_sampled_goal"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        buffer_of(**options)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Dict({"observation": GOAL, "achieved_goal": GOAL}),
        spaces.Dict({"observation": GOAL, "achieved_goal": GOAL, "desired_goal": spaces.Box(-1, 1, (3,))}),
    ],
)
def test_spaces_without_goals(space):
    with pytest.raises(ValueError, match=r"`observation_space` must be a Dict|must have the same shape"):
        HerReplayBuffer(10, space, ACTIONS)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("compute_reward", lambda achieved, desired, infos: -float(np.linalg.norm(achieved - desired))),
        ("compute_terminated", lambda achieved, desired, infos: False),
        ("compute_reward", lambda achieved, desired, infos: achieved - desired),
    ],
)
def test_functions_of_single_steps(name, function):
    """A norm over all steps at once would end all of them, or none."""
    buffer = buffer_of(**{name: function})
    Trajectories(buffer, np.random.default_rng(0), offline=3)
    with pytest.raises(ValueError, match=f"`{name}` was given the goals of 9 steps at once and must return 9 values.*axis=-1"):
        buffer.sample(4)


def test_ends_that_are_no_flags_are_refused():
    """A function that returns rewards would multiply what is bootstrapped by 2."""
    buffer = buffer_of(compute_terminated=lambda achieved, desired, infos: -np.ones(len(achieved)))
    Trajectories(buffer, np.random.default_rng(0), offline=3)
    with pytest.raises(ValueError, match="`compute_terminated` must return True or False for each step, but returned"):
        buffer.sample(4)


def test_algorithms_of_sb3_are_told_that_the_buffer_is_not_theirs():
    buffer = buffer_of()
    Trajectories(buffer, np.random.default_rng(0), offline=3)
    with pytest.raises(AttributeError, match="ChunkSamples has `discounts` in place of `dones`: replay buffers of sb3_flow"):
        _ = buffer.sample(4).dones
    buffer.compute_reward = None
    with pytest.raises(ValueError, match="SB3's own algorithms cannot use this buffer"):
        buffer.sample(4)


def test_the_buffer_of_sb3_is_for_one_step_online():
    with pytest.raises(ValueError, match=r"`horizon_length=3` needs .*`sb3_flow.HerReplayBuffer`"):
        model_of(replay_buffer_class=SB3HerReplayBuffer)
    model = model_of(replay_buffer_class=SB3HerReplayBuffer, horizon_length=1)
    with pytest.raises(ValueError, match=r"Offline training needs .*`sb3_flow.HerReplayBuffer`"):
        model.set_offline_dataset(wandering(2))


def test_pickles_have_neither_environment_nor_functions():
    buffer = buffer_of(compute_terminated=lambda *given: np.zeros(len(given[0])))
    buffer.set_env(DummyVecEnv([Reach]))
    loaded = pickle.loads(pickle.dumps(buffer))
    assert loaded.env is loaded.compute_reward is loaded.compute_terminated is None
    assert loaded.goal_selection_strategy is GoalSelectionStrategy.FUTURE


# -------------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("phase", ["online", "offline"])
def test_hindsight_finds_goals_that_are_not_found_without(phase):
    assert success_rate(phase, n_sampled_goal=4, seed=0) > 0.5 > 0.2 > success_rate(phase, n_sampled_goal=0, seed=0)


# ----------------------------------------------------------------------------------------------- functions of the user's own


def small_model(env=None, **her):
    env = DummyVecEnv([lambda: Reach(length=10)]) if env is None else env
    given = {"horizon_length": 2, "n_critics": 2, "learning_starts": 20, "batch_size": 8, "seed": 0, "device": "cpu"}
    policy = {"policy_kwargs": {"net_arch": [8]}, "replay_buffer_class": HerReplayBuffer, "replay_buffer_kwargs": her}
    return RLPD("MultiInputPolicy", env, **given, **policy)


def seven(achieved, desired, infos):
    return np.full(len(achieved), 7.0)


def test_functions_that_a_buffer_was_given_later_are_copied():
    model = small_model()
    model.replay_buffer.compute_reward = seven
    model.learn(30)
    copied = copy.deepcopy(model)
    assert copied.replay_buffer.compute_reward is seven
    assert copied.replay_buffer.sample(64).rewards.max() >= 7.0


def test_a_function_may_write_into_what_it_is_given():
    def ends(achieved, desired, infos):
        return np.linalg.norm(achieved - desired, axis=-1) <= 0.1

    def distance(achieved, desired, infos):
        return -np.linalg.norm(achieved - desired, axis=-1)

    def in_place(achieved, desired, infos):
        achieved -= desired
        return -np.linalg.norm(achieved, axis=-1)

    sampled = []
    for function in (distance, in_place):
        model = small_model(compute_reward=function, compute_terminated=ends).learn(30)
        model.replay_buffer.generator = th.Generator().manual_seed(0)
        sampled.append(model.replay_buffer.sample(64))
    for name in ("rewards", "discounts", "valid"):
        assert th.equal(*(getattr(samples, name) for samples in sampled))


def test_rewards_are_those_of_the_goal_that_is_stored():
    """As in SB3 a goal takes the type of `desired_goal`."""
    space = spaces.Dict({**SPACE.spaces, "desired_goal": spaces.Box(-9, 9, (2,), np.int32)})
    seen = []

    def noting(achieved, desired, infos):
        seen.append(desired)
        return np.zeros(len(achieved))

    buffer = HerReplayBuffer(50, space, ACTIONS, None, "cpu", 1, n_sampled_goal=1000, compute_reward=noting)
    rng = np.random.default_rng(0)
    for step in range(20):
        observation = {"observation": np.zeros((1, 1)), "desired_goal": np.array([[8, 8]])}
        observations = [observation | {"achieved_goal": rng.uniform(-5, 5, (1, 2))} for _ in range(2)]
        buffer.add(*observations, np.zeros((1, 1)), np.zeros(1), np.array([step % 5 == 4]), [{}])
    stored = buffer.sample(30).observations["desired_goal"]
    (desired,) = seen
    assert desired.dtype == np.int32 and len(np.unique(desired)) > 3
    np.testing.assert_array_equal(np.unique(desired, axis=0), np.unique(stored[(stored != 8).any(dim=1)].numpy(), axis=0))


class Locked(Reach):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__(length=10)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("her", "message"),
    [
        ({"compute_reward": lambda *_: Locked()}, None),
        ({"compute_reward": Locked().compute_reward}, "`compute_reward` in `replay_buffer_kwargs` cannot be saved .*lock"),
    ],
)
def test_a_function_that_no_file_can_hold_is_refused_before_training(her, message):
    if message is None:
        small_model(**her)
        return
    with pytest.raises(ValueError, match=message):
        small_model(**her)


def test_complex_rewards_and_missing_methods_are_refused():
    with pytest.raises(ValueError, match="`compute_reward` must return real numbers, but returned complex numbers"):
        small_model(compute_reward=lambda achieved, desired, infos: np.full(len(achieved), 1j)).learn(30)
    with pytest.raises(ValueError, match="needs `compute_terminated`, but the environment has no such method"):
        small_model(DummyVecEnv([lambda: BitFlippingEnv(4, continuous=True)]), compute_terminated=True).learn(30)


def test_errors_of_the_methods_themselves_stay():
    class Wrong(Reach):
        def compute_reward(self, achieved, desired, infos):
            return self.missing

    with pytest.raises(AttributeError, match="missing"):
        small_model(DummyVecEnv([lambda: Wrong(length=10)])).learn(30)
