"""Pushing models to the Hub and loading them from there, through HTTP, against a Hub of this machine's own."""

import inspect
import io
import json
import os
import re
import sys
import warnings
import zipfile
from pathlib import Path

import gymnasium as gym
import huggingface_hub
import huggingface_sb3
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from hub_stand_in import TOKEN
from hub_stand_in import hub as hub
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize
from tasks import PointEnv, collect

from sb3_flow import FMQ, GRPO, PPO, RLPD, RQL, FlowMapPolicy, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.common import checkpoints, episodes
from sb3_flow.common.episodes import takes_masks
from sb3_flow.data import OfflineDataset
from sb3_flow.hub import load_from_hub, push_to_hub
from sb3_flow.hub.making import readable, without_folders

SMALL = {"policy_kwargs": {"net_arch": [8]}, "n_critics": 2, "seed": 0, "device": "cpu"}
ON_POLICY = {"n_steps": 16, "seed": 0, "device": "cpu"}
REPO = "me/a-model"
QUIET = {"n_eval_episodes": 2, "video_length": 0}


def normalized(env_id="Pendulum-v1"):
    return VecNormalize(DummyVecEnv([lambda: gym.make(env_id)]))


def rql():
    model = RQL("MlpPolicy", PointEnv(), horizon_length=4, learning_starts=10, **SMALL)
    return model.learn_offline(collect(PointEnv(length=30)), 3).learn(20)


def masked_env():
    return InvalidActionEnvDiscrete(dim=8, n_invalid_actions=3)


MODELS = {
    "RQL": (rql, PointEnv),
    "FMQ": (
        lambda: FMQ("MlpPolicy", PointEnv(), policy_kwargs={"net_arch": [8]}, seed=0).learn_offline(collect(PointEnv()), 2),
        PointEnv,
    ),
    "PPO": (lambda: PPO("MlpPolicy", normalized(), **ON_POLICY).learn(32), lambda: gym.make("Pendulum-v1")),
    "GRPO": (
        lambda: GRPO("MlpPolicy", DummyVecEnv([PointEnv] * 2), group_by="none", **{**ON_POLICY, "n_steps": 20}).learn(64),
        lambda: DummyVecEnv([PointEnv] * 2),
    ),
    "RecurrentPPO": (lambda: RecurrentPPO("MlpLstmPolicy", PointEnv(), **ON_POLICY).learn(16), PointEnv),
    "MaskablePPO": (lambda: MaskablePPO("MlpPolicy", masked_env(), **ON_POLICY).learn(16), masked_env),
    "MaskableRecurrentPPO": (lambda: MaskableRecurrentPPO("MlpGruPolicy", masked_env(), **ON_POLICY).learn(16), masked_env),
}


def decisions(model, env, steps=6):
    """Actions on the way through an environment, with the state of chunks and recurrent networks."""
    vec_env, found, state, starts = env, [], None, np.ones(env.num_envs, dtype=bool)
    vec_env.seed(3)
    np.random.seed(3)  # the environment with masks draws from NumPy's global generator, and from its space
    for one in vec_env.unwrapped.envs:
        one.unwrapped.action_space.seed(3)
    observation = vec_env.reset()
    for _ in range(steps):
        masks = {"action_masks": np.stack(vec_env.env_method("action_masks"))} if takes_masks(model) else {}
        action, state = model.predict(observation, state, starts, deterministic=True, **masks)
        observation, _, starts, _ = vec_env.step(action)
        found.append(action)
    return np.array(found)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, hub):
    make, env = MODELS[name]
    model = make()
    address = push_to_hub(model, REPO, env(), **QUIET)
    assert address.endswith(REPO) and len(hub.repositories[REPO]) == 2  # the Hub's own first commit, and one
    loaded = load_from_hub(REPO, type(model), env=env(), device="cpu")
    assert type(loaded) is type(model) and loaded.num_timesteps == model.num_timesteps
    normalizer = model.get_vec_normalize_env()
    assert (normalizer is None) == (loaded.get_vec_normalize_env() is None)
    with episodes.for_evaluation(env(), normalizer) as ours:
        np.testing.assert_array_equal(decisions(loaded, loaded.get_env()), decisions(model, ours))
    if normalizer is not None:
        back = loaded.get_vec_normalize_env()
        np.testing.assert_array_equal(back.obs_rms.mean, normalizer.obs_rms.mean)
        assert not back.training and not back.norm_reward and normalizer.training and normalizer.norm_reward


def card(hub, repo_id=REPO):
    text = hub.files(repo_id)["README.md"].decode()
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_has_the_evaluation_that_was_run(hub, capsys):
    model = rql()
    push_to_hub(model, REPO, PointEnv(), n_eval_episodes=3, deterministic=False, seed=5, video_length=0)
    results = json.loads(hub.files(REPO)["results.json"])
    mean, std = np.mean(results["returns"]), np.std(results["returns"])
    assert len(results["returns"]) == results["n_eval_episodes"] == 3 and std > 0
    assert results["mean_reward"] == mean and results["std_reward"] == std and results["is_deterministic"] is False
    printed = capsys.readouterr().out
    assert f"Evaluated in PointEnv, 3 episodes, deterministic=False: mean return {mean:.2f} +/- {std:.2f}" in printed
    head, body = card(hub)
    assert head["library_name"] == "stable-baselines3" and {"PointEnv", "stable-baselines3", "sb3-flow"} <= set(head["tags"])
    (entry,) = head["model-index"]
    ((metric,),) = [result["metrics"] for result in entry["results"]]
    assert entry["name"] == "RQL" and metric["type"] == "mean_reward" and metric["value"] == f"{mean:.2f} +/- {std:.2f}"
    for line in (f"| mean return | {mean:.2f} +/- {std:.2f} |", "| episodes | 3 |", "| actions | drawn |"):
        assert line in body
    assert "| mode of acting | sample |" in body and "| seed of the environment | 5 |" in body


def test_the_seed_repeats_the_evaluation(hub):
    model, returns = PPO("MlpPolicy", PointEnv(), **ON_POLICY), []
    for seed in (1, 1, 2):
        push_to_hub(model, REPO, PointEnv(), seed=seed, **QUIET)
        returns.append(json.loads(hub.files(REPO)["results.json"])["returns"])
    assert returns[0] == returns[1] != returns[2]


def test_both_phases_and_the_dataset_are_named(hub):
    model = rql()
    push_to_hub(model, REPO, PointEnv(), **QUIET)
    _, body = card(hub)
    rows = len(model.replay_buffer.offline_dataset)
    assert re.search(
        rf"^1\. Offline: 3 gradient steps on arrays \({rows} rows, mean return -.*, 20 trajectories\)", body, re.M
    )
    assert "2. Online: 20 environment steps in PointEnv." in body
    assert "'horizon_length': 4" in body and "'gamma'" not in body  # what is not the default
    made = json.loads(hub.files(REPO)["config.json"])
    assert made["arguments"]["gamma"] == 0.99 and made["seed"] == 0 and made["offline_gradient_steps"] == 3
    assert made["versions"].keys() >= {"sb3_flow", "Stable-Baselines3", "PyTorch"} and "OS" not in made["versions"]
    # a loaded model, which has no dataset, still tells
    push_to_hub(load_from_hub(REPO, RQL, env=PointEnv()), "me/again", PointEnv(), **QUIET)
    assert json.loads(hub.files("me/again")["config.json"])["phases"] == made["phases"]


def test_data_beside_the_online_steps_are_named(hub):
    model = RLPD("MlpPolicy", PointEnv(), offline_dataset=collect(PointEnv()), learning_starts=4, **SMALL)
    push_to_hub(model.learn(6), REPO, PointEnv(), **QUIET)
    assert re.search(r"^1\. Online: 6 environment steps in PointEnv, with arrays \(.*\) beside the online", card(hub)[1], re.M)


def test_a_model_of_sb3(hub):
    model = SAC("MlpPolicy", PointEnv(), buffer_size=50, device="cpu")
    push_to_hub(model, REPO, PointEnv(), **QUIET)
    head, body = card(hub)
    assert "1. Not trained." in body and "'buffer_size': 50" in body and "offline-reinforcement-learning" not in head["tags"]
    assert "from stable_baselines3 import SAC" in body
    loaded = load_from_hub(REPO, SAC, env=PointEnv())
    np.testing.assert_array_equal(*(one.predict(np.ones(2), deterministic=True)[0] for one in (model, loaded)))


def test_the_code_of_the_card_runs(hub):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), filename="other.zip", **QUIET)
    (code,) = re.findall(r"```python\n(import os.*?)```", card(hub)[1], re.S)
    names = {"env": gym.make("Pendulum-v1")}
    del os.environ["TRUST_REMOTE_CODE"]  # which the code sets itself
    exec(code, names)
    assert isinstance(names["model"], PPO) and names["model"].get_vec_normalize_env() is not None


class Rendered(PointEnv):
    metadata: dict = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode, broken = "rgb_array", False

    def render(self):
        if self.broken:
            raise RuntimeError("there is no display")
        return np.full((64, 64, 3), self.t, dtype=np.uint8)


def test_a_video_where_the_environment_renders(hub, monkeypatch):
    model = rql()
    env = Rendered()
    push_to_hub(model, REPO, env, n_eval_episodes=2, video_length=10)
    assert hub.files(REPO)["replay.mp4"][4:8] == b"ftyp"
    env.reset()  # it is still open
    monkeypatch.setattr(Rendered, "broken", True)
    with pytest.warns(UserWarning, match=r"without a video.*no display"):
        push_to_hub(model, REPO, Rendered(), n_eval_episodes=2, video_length=10)
    assert "replay.mp4" not in hub.files(REPO)  # another model's video does not stay


def test_successes_are_counted(hub):
    class Succeeding(PointEnv):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"is_success": True}

    push_to_hub(PPO("MlpPolicy", Succeeding(), **ON_POLICY), REPO, Succeeding(), **QUIET)
    head, body = card(hub)
    metrics = {metric["type"]: metric["value"] for result in head["model-index"][0]["results"] for metric in result["metrics"]}
    assert metrics["success_rate"] == "1.00" and "| success rate | 1.00 |" in body


@pytest.mark.parametrize("algorithm", [MaskablePPO, MaskableRecurrentPPO])
def test_masks_are_kept_in_the_evaluation(algorithm, hub, monkeypatch):
    model, masks = MODELS[algorithm.__name__][0](), []
    predict = algorithm.predict
    note = lambda self, *args, action_masks=None, **kwargs: (  # noqa: E731
        masks.append(action_masks),
        predict(self, *args, action_masks=action_masks, **kwargs),
    )[1]
    monkeypatch.setattr(algorithm, "predict", note)
    push_to_hub(model, REPO, masked_env(), **QUIET)
    assert masks and all(mask is not None and not mask.all() for mask in masks)


def test_statistics_do_not_change_in_the_evaluation(hub):
    model = MODELS["PPO"][0]()
    normalizer = model.get_vec_normalize_env()
    before = normalizer.obs_rms.mean.copy(), normalizer.obs_rms.count
    env = VecNormalize(VecMonitor(DummyVecEnv([lambda: gym.make("Pendulum-v1")])))
    push_to_hub(model, REPO, env, **QUIET)
    assert env.training and env.norm_reward
    for each in (normalizer, env):
        np.testing.assert_array_equal(each.obs_rms.mean, before[0])
        assert each.obs_rms.count == before[1]
    assert json.loads(hub.files(REPO)["results.json"])["mean_reward"] < -100  # Pendulum's own rewards


def test_another_push_leaves_nothing_of_the_model_before(hub):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), **QUIET)
    assert "vec_normalize.pkl" in hub.files(REPO)
    hub.put(REPO, notes__txt=b"a user's own")
    push_to_hub(PPO("MlpPolicy", "Pendulum-v1", **ON_POLICY), REPO, gym.make("Pendulum-v1"), **QUIET)
    assert "vec_normalize.pkl" not in hub.files(REPO) and hub.files(REPO)["notes.txt"] == b"a user's own"
    assert load_from_hub(REPO, PPO, env=gym.make("Pendulum-v1")).get_vec_normalize_env() is None


def test_a_commit_is_the_same_files_for_ever(hub):
    first, second = (PPO("MlpPolicy", PointEnv(), **{**ON_POLICY, "seed": seed}) for seed in (1, 2))
    push_to_hub(first, REPO, PointEnv(), **QUIET)
    commit = hub.repositories[REPO][-1][0]
    push_to_hub(second, REPO, PointEnv(), **QUIET)
    observation = np.ones(2)
    for model, options in ((first, {"revision": commit}), (second, {})):
        loaded = load_from_hub(REPO, PPO, **options)
        np.testing.assert_array_equal(*(one.predict(observation, deterministic=True)[0] for one in (model, loaded)))
    with pytest.raises(FileNotFoundError, match="no such `revision`"):
        load_from_hub(REPO, PPO, revision="0" * 40)


def pushed_ppo(hub, repo_id=REPO):
    push_to_hub(PPO("MlpPolicy", PointEnv(), **ON_POLICY), repo_id, PointEnv(), **QUIET)


def test_a_repository_without_an_owner_is_ones_own(hub):
    pushed_ppo(hub, "a-model")
    assert load_from_hub(REPO, PPO).num_timesteps == 0 and '"me/a-model", PPO)' in card(hub)[1]


ANSWERS = [None, "", "0", "False", "no", "off", "n", "f", "1", "true", "YES", "on", "y", "T", "perhaps"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_trust_is_asked_for_as_huggingface_sb3_asks(answer, hub, monkeypatch):
    pushed_ppo(hub)
    monkeypatch.delenv("TRUST_REMOTE_CODE")
    if answer is not None:
        monkeypatch.setenv("TRUST_REMOTE_CODE", answer)

    def refuses(load):
        try:
            load()
        except ValueError:
            return True
        return False

    theirs = refuses(lambda: huggingface_sb3.load_from_hub(REPO, "a-model.zip"))
    hub.asked.clear()
    assert refuses(lambda: load_from_hub(REPO, PPO)) == theirs == (answer not in ("1", "true", "YES", "on", "y", "T"))
    assert bool(hub.asked) != theirs  # nothing is asked for before


def test_huggingface_sb3_loads_what_we_push(hub):
    pushed_ppo(hub)
    assert PPO.load(huggingface_sb3.load_from_hub(REPO, "a-model.zip")).n_steps == 16


def test_we_load_what_huggingface_sb3_pushes(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = PPO("MlpPolicy", PointEnv(), **ON_POLICY)
    model.save("any")
    huggingface_sb3.push_to_hub(REPO, "any.zip", "a model")
    loaded = load_from_hub(REPO, PPO, filename="any.zip")
    np.testing.assert_array_equal(*(one.predict(np.ones(2), deterministic=True)[0] for one in (model, loaded)))


def test_the_library_is_called_by_names_that_it_has():
    called = {
        huggingface_hub.HfApi.create_repo: {"repo_id", "private", "exist_ok"},
        huggingface_hub.HfApi.upload_folder: {"repo_id", "folder_path", "commit_message", "delete_patterns"},
        huggingface_hub.HfApi.model_info: {"repo_id", "revision"},
        huggingface_hub.hf_hub_download: {"repo_id", "filename", "revision", "token"},
    }
    for function, names in called.items():
        assert names <= inspect.signature(function).parameters.keys(), function


def quickly(monkeypatch):
    """Do not wait before the library tries again."""
    monkeypatch.setattr("time.sleep", lambda _: None)


def test_a_gated_repository(hub):
    pushed_ppo(hub)
    hub.gated = True
    with pytest.raises(PermissionError, match="refused the token for me/a-model, status 403"):
        load_from_hub(REPO, PPO)


class Unplayed(PointEnv):
    def reset(self, **_):
        raise AssertionError("no episode should be played")


def test_without_a_token(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match=r"me/a-model needs a token, but none was found: .*hf auth login.*HF_TOKEN"):
        push_to_hub(rql(), REPO, Unplayed())
    assert hub.repositories == {}
    push_to_hub(rql(), REPO, PointEnv(), token=TOKEN, **QUIET)
    assert REPO in hub.repositories


def test_with_a_wrong_token(hub, monkeypatch):
    with pytest.raises(PermissionError, match=r"The Hub refused the token for me/a-model, status 401.*hf auth login"):
        push_to_hub(rql(), REPO, Unplayed(), token="hf_wrong")
    hub.forbidden = True  # a token that may read
    with pytest.raises(PermissionError, match="The Hub refused the token for me/a-model, status 403"):
        pushed_ppo(hub)
    assert hub.repositories == {}


def test_the_connection_breaks_off_in_the_commit(hub, monkeypatch):
    pushed_ppo(hub)
    before, hub.breaks_off = dict(hub.files(REPO)), "commit"
    quickly(monkeypatch)
    with pytest.raises(ConnectionError, match="did not answer as expected about me/a-model"):
        pushed_ppo(hub)
    assert hub.files(REPO) == before


@pytest.mark.parametrize("file", ["a-model.zip", "vec_normalize.pkl"])
def test_the_connection_breaks_off_in_a_file(file, hub, monkeypatch):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), **QUIET)
    hub.breaks_off = file
    quickly(monkeypatch)
    with pytest.raises(ConnectionError, match="me/a-model"):
        load_from_hub(REPO, PPO, env=gym.make("Pendulum-v1"))
    hub.breaks_off = None
    assert load_from_hub(REPO, PPO, env=gym.make("Pendulum-v1")).get_vec_normalize_env() is not None


def test_nobody_answers(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    quickly(monkeypatch)
    for call in (lambda: load_from_hub(REPO, PPO), lambda: push_to_hub(rql(), REPO, Unplayed())):
        with pytest.raises(ConnectionError, match="did not answer as expected about me/a-model"):
            call()


def test_errors_of_this_machine_stay(hub, monkeypatch):
    pushed_ppo(hub)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    cache.write_text("a file where a folder is expected")
    with pytest.raises(OSError) as raised:
        load_from_hub(REPO, PPO)
    assert raised.value.errno is not None and not isinstance(raised.value, ConnectionError)


def test_no_such_repository_or_file(hub, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"There is no me/none on the Hub, or it is private"):
        load_from_hub("me/none", PPO)
    pushed_ppo(hub)
    with pytest.raises(FileNotFoundError, match=r"me/a-model has no file 'other.zip'; it has .*a-model\.zip"):
        load_from_hub(REPO, PPO, filename="other.zip")
    with pytest.raises(ValueError, match=r"a/b/c"):
        load_from_hub("a/b/c", PPO)
    with pytest.raises(ValueError, match="`repo_id` must be 'user/name' to load from, but 'a-model' was given"):
        load_from_hub("a-model", PPO)


def test_another_algorithm(hub):
    pushed_ppo(hub)
    with pytest.raises(ValueError, match=r"`RQL\.load` was given a file that PPO saved"):
        load_from_hub(REPO, RQL)


def test_a_file_of_a_newer_version(hub, monkeypatch):
    with monkeypatch.context() as future:
        future.setattr(checkpoints, "__version__", "99.1.0")
        pushed_ppo(hub)
    assert "sb3_flow 99.1.0" in card(hub)[1]
    with pytest.warns(UserWarning, match=r"a-model\.zip was saved by sb3_flow 99\.1\.0, but .*pip install --upgrade"):
        load_from_hub(REPO, PPO)


def test_statistics_need_an_environment(hub):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), **QUIET)
    with pytest.raises(ValueError, match=r"statistics of a VecNormalize.*give `env`"):
        load_from_hub(REPO, PPO)


@pytest.mark.parametrize("filename", ["b.zip", None])
def test_a_model_before_loads_from_its_commit(filename, hub):
    """And never with the statistics of the model after it."""
    first = MODELS["PPO"][0]()
    push_to_hub(first, REPO, gym.make("Pendulum-v1"), filename="a.zip", **QUIET)
    commit = hub.repositories[REPO][-1][0]
    second = PPO("MlpPolicy", "Pendulum-v1", **ON_POLICY)
    push_to_hub(second, REPO, gym.make("Pendulum-v1"), filename=filename, **QUIET)
    with pytest.raises(ValueError, match=r"holds the model '(b|a-model)\.zip', .*`filename='a\.zip'`.*`revision=`"):
        load_from_hub(REPO, PPO, filename="a.zip", env=gym.make("Pendulum-v1"))
    assert load_from_hub(REPO, PPO, filename=filename, env=gym.make("Pendulum-v1")).get_vec_normalize_env() is None
    loaded = load_from_hub(REPO, PPO, filename="a.zip", env=gym.make("Pendulum-v1"), revision=commit)
    means = [model.get_vec_normalize_env().obs_rms.mean for model in (first, loaded)]
    np.testing.assert_array_equal(*means)


def test_statistics_that_are_gone(hub):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), **QUIET)
    hub.put(REPO, vec_normalize__pkl=None)
    with pytest.raises(FileNotFoundError, match=r"has no file 'vec_normalize\.pkl'"):
        load_from_hub(REPO, PPO, env=gym.make("Pendulum-v1"))


@pytest.mark.parametrize("content", [b"[1]", b"no JSON", b'{"a": 1}'])
def test_a_configuration_of_someone_else(content, hub):
    push_to_hub(MODELS["PPO"][0](), REPO, gym.make("Pendulum-v1"), **QUIET)
    hub.put(REPO, config__json=content)
    assert load_from_hub(REPO, PPO, env=gym.make("Pendulum-v1")).get_vec_normalize_env() is not None


def stacked(**settings):
    """As rl-zoo3 does it: VecNormalize inside."""
    env = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]), **settings)
    return VecFrameStack(env, 2)


def test_frames_are_stacked_over_statistics(hub):
    model = PPO("MlpPolicy", stacked(clip_obs=1.5), **ON_POLICY).learn(32)
    push_to_hub(model, REPO, stacked(clip_obs=1.5), **QUIET)
    env = stacked()
    loaded = load_from_hub(REPO, PPO, env=env)
    back, normalizer = loaded.get_vec_normalize_env(), model.get_vec_normalize_env()
    np.testing.assert_array_equal(back.obs_rms.mean, normalizer.obs_rms.mean)
    assert back.clip_obs == 1.5 and back.ret_rms.count == normalizer.ret_rms.count
    assert not back.training and not back.norm_reward and loaded.get_env() is env
    ours = stacked(clip_obs=1.5)
    with episodes.for_evaluation(ours, normalizer):
        np.testing.assert_array_equal(decisions(loaded, env), decisions(model, ours))


def test_mistakes_are_named(hub):
    model = PPO("MlpPolicy", PointEnv(), **ON_POLICY)
    policy = FlowMapPolicy(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,)), lambda _: 1e-3, net_arch=[8])
    for change, error, message in (
        ({"model": policy}, TypeError, "`model` must be an algorithm.*FlowMapPolicy was given"),
        ({"n_eval_episodes": 0}, ValueError, "`n_eval_episodes` must be at least 1, but 0"),
        ({"video_length": -1}, ValueError, "`video_length` must be at least 0, but -1"),
        ({"filename": "model"}, ValueError, "`filename` must be a name that ends in .zip, .*, but 'model'"),
        ({"filename": "../model.zip"}, ValueError, "`filename` must be a name"),
        ({"filename": ".zip"}, ValueError, "`filename` must be a name"),
        ({"filename": 'a".zip'}, ValueError, "`filename` must be a name"),
        ({"filename": "a\\b.zip"}, ValueError, "`filename` must be a name"),
        ({"deterministic": "no"}, TypeError, "`deterministic` must be True or False, but 'no'"),
        ({"eval_env": "CartPole-v1"}, TypeError, "`eval_env` must be an environment .*but 'CartPole-v1'"),
        ({"eval_env": gym.make_vec("CartPole-v1", 2)}, ValueError, "`eval_env` must be a single environment .*make_vec_env"),
        ({"filename": "best_model.zip"}, ValueError, "`filename` must not be 'best_model.zip'"),
        ({"filename": "train_eval_metrics.zip"}, ValueError, "`filename` must not be 'train_eval"),
        ({"repo_id": "a/b/c"}, ValueError, "a/b/c"),
    ):
        with pytest.raises(error, match=message):
            push_to_hub(**{"model": model, "repo_id": REPO, "eval_env": Unplayed(), **change})
    assert hub.repositories == {}


def test_a_boolean_of_numpy(hub):
    push_to_hub(PPO("MlpPolicy", PointEnv(), **ON_POLICY), REPO, PointEnv(), deterministic=np.bool_(False), **QUIET)
    assert json.loads(hub.files(REPO)["results.json"])["is_deterministic"] is False


@pytest.mark.parametrize("module", [__name__, "__main__"])
def test_a_class_that_nobody_can_import(module, hub, monkeypatch):
    """The card names the nearest base class that others have."""

    class Mine(PPO):
        pass

    Mine.__module__ = module
    if module == "__main__":
        monkeypatch.setattr(sys.modules[module], "Mine", Mine, raising=False)
    push_to_hub(Mine("MlpPolicy", PointEnv(), **ON_POLICY), REPO, PointEnv(), **QUIET)
    assert "from sb3_flow import PPO\n" in card(hub)[1] and '"me/a-model", PPO)' in card(hub)[1]
    assert json.loads(hub.files(REPO)["config.json"])["algorithm"] == "PPO"


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    for call in (lambda: load_from_hub(REPO, PPO), lambda: push_to_hub(rql(), REPO, Unplayed())):
        with pytest.raises(ImportError, match=r"huggingface_hub: pip install 'sb3-flow\[hub\]'"):
            call()


def test_folders_of_this_machine_are_not_told(hub, tmp_path):
    data = collect(PointEnv())
    data.save(tmp_path / "my_data")
    model = RQL("MlpPolicy", PointEnv(), offline_dataset=f"npz:{tmp_path}/my_data", tensorboard_log=str(tmp_path), **SMALL)
    model.learn_offline(OfflineDataset.load(f"npz:{tmp_path}/my_data"), 1)
    push_to_hub(model, REPO, PointEnv(), **QUIET)
    told = "".join(hub.files(REPO)[name].decode() for name in ("README.md", "config.json", "results.json"))
    assert "my_data" in told and str(tmp_path) not in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("npz:/home/ann/data/mine", "npz:mine"),
        ("ogbench:task-v0@/data/x/y.npz (3 rows)", "ogbench:task-v0@y.npz (3 rows)"),
        ("-params \"offline_dataset:'npz:~/d/mine'\"", "-params \"offline_dataset:'npz:mine'\""),
        (r"npz:C:\Users\ann\mine", "npz:mine"),
        ("minari:D4RL/pointmaze/umaze-v2", "minari:D4RL/pointmaze/umaze-v2"),
        ("data/mine.npz, mean return 3/4", "data/mine.npz, mean return 3/4"),
        ("npz:/home/John Smith/d.npz", "npz:d.npz"),
        (r"C:\Users\John Smith\x.npz", "x.npz"),
        (r"npz:C:\Users\John Smith\x.npz (3 rows, mean return 1/2)", "npz:x.npz (3 rows, mean return 1/2)"),
        (
            "npz:tmp/home/x/d.npz (sparse rewards) (3 rows, mean return 1)",
            "npz:d.npz (sparse rewards) (3 rows, mean return 1)",
        ),
        ("npz:tmp/home/x/folder/", "npz:folder"),
        ("ogbench:task-v0@John Smith/y.npz", "ogbench:task-v0@y.npz"),
        ("data:/home/John Smith/d.npz", "data:d.npz"),
        ("../alice/x.npz", "x.npz"),
        ("~alice/data/x.npz", "x.npz"),
        ("logs/ppo/x.zip", "x.zip"),
        ("https://user:secret@host/d/x.npz", "https://host/d/x.npz"),
        ("npz:https://user:se@cret@host/d/x.npz (3 rows)", "npz:https://host/d/x.npz (3 rows)"),
        ("from https://user:secret@host/d/x.npz", "from https://host/d/x.npz"),
        ("<Reader '/home/ann/x.npz'>", "<Reader 'x.npz'>"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("package:ALE/Pong-v5", "package:ALE/Pong-v5"),
        ("minari:mujoco/hopper/expert-v0 (3 rows, mean return 1)", "minari:mujoco/hopper/expert-v0 (3 rows, mean return 1)"),
        ("a_package.wrappers.Mine", "a_package.wrappers.Mine"),
    ],
)
def test_folders_are_cut(text, told):
    assert without_folders(text) == told


def test_arguments_become_plain():
    model = PPO("MlpPolicy", PointEnv(), clip_range=lambda left: 0.1 * left, **ON_POLICY)
    assert readable(PPO("MlpPolicy", PointEnv(), **ON_POLICY).clip_range) == 0.2
    for value in (model.clip_range, PointEnv, np.float32(2), {1: (np.int64(3), float("inf"))}, spaces.Discrete(2)):
        text = json.dumps(readable(value))
        assert "0x" not in text


def test_the_file_is_the_models_own(hub):
    """Weights and the state of random streams before the evaluation."""
    model, twin = rql(), rql()
    push_to_hub(model, REPO, PointEnv(), deterministic=False, **QUIET)
    twin.save(saved := io.BytesIO())
    contents = []
    for file in (saved, io.BytesIO(hub.files(REPO)["a-model.zip"])):
        with zipfile.ZipFile(file) as archive:
            contents.append(archive.read("policy.pth"))
    assert contents[0] == contents[1]
    ours, theirs = load_from_hub(REPO, RQL), RQL.load(saved)
    observation = np.ones(2, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(ours.predict(observation)[0], theirs.predict(observation)[0])
