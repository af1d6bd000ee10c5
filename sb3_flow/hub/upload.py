"""Pushing a model to the Hub."""

import datetime
import re
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from sb3_flow.common.checks import check_whole
from sb3_flow.common.clear_errors import check_no_gymnasium_vector
from sb3_flow.common.episodes import for_evaluation, play
from sb3_flow.hub.connection import TRUST, explained, hub_library
from sb3_flow.hub.making import as_json, env_id_of, how_it_was_made
from sb3_flow.hub.model_card import model_card
from sb3_flow.hub.replay_video import record

STATISTICS, CONFIGURATION = "vec_normalize.pkl", "config.json"
OF_A_PUSH = (
    *(STATISTICS, "replay.mp4", "best_model.zip", "args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip"),
)
"""Files that not every push brings; those of an earlier push must not stay beside another model."""


def push_to_hub(
    model: BaseAlgorithm,
    repo_id: str,
    eval_env: GymEnv,
    filename: str | None = None,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    seed: int = 0,
    video_length: int = 1000,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """
    Evaluate a model and push it to the Hugging Face Hub, with the statistics of its VecNormalize, a model card, the results
    of the evaluation, how it was made, and a video if ``eval_env`` renders to arrays. The repository is made if there is none.
    All files arrive in one commit, or none does.

    :param model: an algorithm of this package or of SB3
    :param repo_id: ``"user/name"`` or ``"organization/name"``; ``"name"`` alone is a repository of your own account
    :param eval_env: environment to evaluate on, as for SB3's ``evaluate_policy``, normalised like the model's environment;
        with action masks if the model takes masks
    :param filename: of the model in the repository (default: the repository's name, with ``.zip``)
    :param n_eval_episodes: episodes of the evaluation, which the model card reports
    :param deterministic: whether the model acts deterministically in them
    :param seed: seed of ``eval_env``
    :param video_length: steps of the video; 0 for none
    :param commit_message: of the commit
    :param private: whether a repository that is made here is private (default: the account's own)
    :param token: of the Hub (default: the token that this machine is logged in with)
    :return: address of the repository
    :raises TypeError: if the model is no algorithm, or ``eval_env`` no environment
    :raises PermissionError: without a token that may write there
    :raises OSError: if the Hub does not answer, or the connection breaks off
    :raises ImportError: without the extra ``hub``
    """
    if not isinstance(model, BaseAlgorithm):
        raise TypeError(f"`model` must be an algorithm such as RQL or PPO, but a {type(model).__name__} was given.")
    check_whole(1, n_eval_episodes=n_eval_episodes)
    check_whole(0, video_length=video_length)
    if not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"`deterministic` must be True or False, but {deterministic!r} was given.")
    check_no_gymnasium_vector("eval_env", eval_env)
    if not isinstance(eval_env, gym.Env | VecEnv):
        raise TypeError(f"`eval_env` must be an environment such as gymnasium.make(...), but {eval_env!r} was given.")
    push = Push(repo_id, filename, token)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save(folder / push.filename)
        normalizer, trained = model.get_vec_normalize_env(), model.get_env()
        if normalizer is None and isinstance(eval_env, VecEnv):
            normalizer = unwrap_vec_normalize(eval_env)
        if normalizer is not None:
            normalizer.save(str(folder / STATISTICS))
        made = how_it_was_made(model, folder / push.filename, None if trained is None else env_id_of(trained))
        with for_evaluation(eval_env, normalizer) as env:
            results = evaluate(model, env, env_id_of(env), n_eval_episodes, deterministic, seed)
            record(model, env, video_length, deterministic, folder / "replay.mp4")
        return push.publish(folder, made, results, in_python(push, made, folder), commit_message, private)


def evaluate(
    model: BaseAlgorithm, env: VecEnv, env_id: str, n_episodes: int, deterministic: bool, seed: int
) -> dict[str, Any]:
    """
    Evaluate a model, and print the result.

    :param model: the model
    :param env: see :func:`~sb3_flow.common.episodes.for_evaluation`
    :param env_id: its name
    :param n_episodes: their number
    :param deterministic: see ``predict``
    :param seed: of the environment
    :return: what ``results.json`` has, with the names that huggingface_sb3 gave
    """
    env.seed(seed)
    returns, success_rate = play(model, env, n_episodes, deterministic)
    results = {
        "env_id": env_id,
        "mean_reward": float(np.mean(returns)),
        "std_reward": float(np.std(returns)),
        "success_rate": success_rate,
        "n_eval_episodes": len(returns),
        "is_deterministic": bool(deterministic),
        "acting_mode": getattr(model.policy, "acting_mode", None),
        "seed": seed,
        "eval_datetime": datetime.datetime.now().isoformat(timespec="seconds"),
        "returns": returns.tolist(),
    }
    success = "" if success_rate is None else f", success {success_rate:.2f}"
    print(
        f"Evaluated in {env_id}, {len(returns)} episodes, deterministic={deterministic}: mean return "
        f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}{success}"
    )
    return results


class Push:
    """
    A push to a repository. It asks the Hub first who the user is: a token that is missing or wrong is noticed before the
    evaluation.

    :param repo_id: the repository
    :param filename: of the model, None for the repository's name
    :param token: of the Hub, None for the token that this machine is logged in with
    """

    def __init__(self, repo_id: str, filename: str | None, token: str | None) -> None:
        hub = hub_library()
        hub.utils.validate_repo_id(repo_id)
        self.api = hub.HfApi(token=token)
        with explained(repo_id):
            user = self.api.whoami()["name"]
        self.repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        default = default_filename(self.repo_id)
        self.filename = filename or default
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*\.zip", self.filename):
            raise ValueError(
                f"`filename` must be a name that ends in .zip, of letters, digits, '_', '-' and '.', but {self.filename!r} "
                "was given."
            )
        if self.filename in OF_A_PUSH:
            raise ValueError(f"`filename` must not be {self.filename!r}, which is a file of pushes from the zoo.")
        self.not_default = "" if self.filename == default else f', filename="{self.filename}"'

    def publish(
        self,
        folder: Path,
        made: dict[str, Any],
        results: dict[str, Any],
        loading: str,
        commit_message: str | None = None,
        private: bool | None = None,
    ) -> str:
        """
        Write model card, results and configuration into a folder and push its files in one commit.

        :param folder: with the model
        :param made: how it was made
        :param results: of its evaluation
        :param loading: a block of code that loads it
        :param commit_message: of the commit
        :param private: whether a new repository is private
        :return: address of the repository
        """
        made = {**made, "filename": self.filename, "normalized": (folder / STATISTICS).is_file()}
        (folder / "results.json").write_text(as_json(results))
        (folder / CONFIGURATION).write_text(as_json(made))
        (folder / "README.md").write_text(model_card(self.repo_id, made, results, loading))
        message = commit_message or f"{made['algorithm']} in {results['env_id']}"
        with explained(self.repo_id):
            url = self.api.create_repo(self.repo_id, private=private, exist_ok=True)
            self.api.upload_folder(
                repo_id=self.repo_id, folder_path=folder, commit_message=message, delete_patterns=list(OF_A_PUSH)
            )
        print(f"Pushed to {url}")
        return str(url)


def in_python(push: Push, made: dict[str, Any], folder: Path) -> str:
    """Write the block of code that loads a pushed model, from the files in a folder."""
    env = ", env=env)  # your environment" if (folder / STATISTICS).is_file() else ")"
    return (
        f"```python\nimport os\n\n{made['import']}\nfrom sb3_flow.hub import load_from_hub\n\n"
        f'os.environ["{TRUST}"] = "True"\n'
        f'model = load_from_hub("{push.repo_id}", {made["algorithm"]}{push.not_default}{env}\n```'
    )


def default_filename(repo_id: str) -> str:
    """Name the model's file after its repository, as huggingface_sb3 and rl-zoo3 do."""
    return f"{repo_id.rpartition('/')[2]}.zip"
