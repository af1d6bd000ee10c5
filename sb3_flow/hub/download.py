"""Loading a model from the Hub."""

import json
from contextlib import suppress
from typing import Any, TypeVar

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_flow.common.episodes import as_vec_env
from sb3_flow.hub.connection import Repository
from sb3_flow.hub.upload import CONFIGURATION, OF_A_PUSH, STATISTICS, default_filename

Algorithm = TypeVar("Algorithm", bound=BaseAlgorithm)


def load_from_hub(
    repo_id: str,
    algorithm: type[Algorithm],
    filename: str | None = None,
    env: GymEnv | None = None,
    revision: str | None = None,
    token: str | None = None,
    **options: Any,
) -> Algorithm:
    """
    Load a model from the Hugging Face Hub, with the statistics of its VecNormalize. The file is a pickle and can run any code:
    as for huggingface_sb3, the environment variable ``TRUST_REMOTE_CODE`` must be ``True``. A file from a newer version of
    sb3_flow loads with a warning.

    :param repo_id: name of the user or organization, a slash, and a name
    :param algorithm: class of the model, of this package or of SB3
    :param filename: of the model (default: the repository's name, with ``.zip``)
    :param env: environment of the model. If the repository has statistics, they normalise its observations as the model knows
        them, in ``model.get_env()``; they stay as they are, and rewards are not normalised, until ``training`` and
        ``norm_reward`` of ``model.get_vec_normalize_env()`` are set. A VecNormalize in ``env``, which is needed where the
        model's environment has wrappers around its own (VecFrameStack), gets settings and statistics of the one pushed
    :param revision: a branch, tag or commit; a commit is the same files for ever (default: the newest)
    :param token: of the Hub, for a private repository (default: the token that this machine is logged in with)
    :param options: further arguments of ``algorithm.load``
    :return: the model
    :raises ValueError: unless ``TRUST_REMOTE_CODE`` is set, if another algorithm saved the file and ``algorithm`` is of
        this package, if another model was pushed after it, or if statistics need ``env``
    :raises FileNotFoundError: if there is no such repository or file
    :raises OSError: if the Hub does not answer, or the connection breaks off
    :raises ImportError: without the extra ``hub``
    """
    repository = Repository(repo_id, revision, token)
    filename = filename or default_filename(repo_id)
    if _normalized(repository, filename):
        if env is None:
            raise ValueError(
                f"{repo_id} has statistics of a VecNormalize, without which the model misreads observations: give `env`, "
                "whose observations they normalise."
            )
        env = _with_statistics(as_vec_env(env), str(repository.download(STATISTICS)))
    return algorithm.load(repository.download(filename), env=env, **options)


def _normalized(repository: Repository, filename: str) -> bool:
    """
    Say whether statistics belong to a model: those of a repository belong to the model that was pushed last.

    :raises ValueError: if another model was pushed after this one
    """
    pushed: Any = {}
    if CONFIGURATION in repository.names:
        with suppress(ValueError):  # a file of someone else's
            pushed = json.loads(repository.download(CONFIGURATION).read_text(encoding="utf-8"))
    pushed = pushed if isinstance(pushed, dict) else {}
    last = pushed.get("filename", filename)
    if filename in repository.names and filename not in (last, *OF_A_PUSH):
        raise ValueError(
            f"{repository.repo_id} holds the model {last!r}, which was pushed after `filename={filename!r}` and replaced its "
            f"statistics: give `revision=` of the commit that pushed {filename!r}, or load {last!r}."
        )
    return STATISTICS in repository.names or pushed.get("normalized") is True


def _with_statistics(env: VecEnv, path: str) -> VecEnv:
    """Put a saved VecNormalize in the place of the environment's own, or around an environment that has none."""
    own = unwrap_vec_normalize(env)
    pushed = VecNormalize.load(path, env if own is None else own.venv)
    pushed.training = pushed.norm_reward = False
    if own is None:
        return pushed
    vars(own).update(vars(pushed))  # which wrappers around it, such as VecFrameStack, hold
    return env
