"""Loading a model from the Hub."""

from typing import Any, TypeVar

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_flow.common.episodes import as_vec_env
from sb3_flow.hub.connection import Repository
from sb3_flow.hub.upload import STATISTICS, default_filename

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
        ``norm_reward`` of ``model.get_vec_normalize_env()`` are set
    :param revision: a branch, tag or commit; a commit is the same files for ever (default: the newest)
    :param token: of the Hub, for a private repository (default: the token that this machine is logged in with)
    :param options: further arguments of ``algorithm.load``
    :return: the model
    :raises ValueError: unless ``TRUST_REMOTE_CODE`` is set, if another algorithm saved the file and ``algorithm`` is of
        this package, or if statistics need ``env``
    :raises FileNotFoundError: if there is no such repository or file
    :raises OSError: if the Hub does not answer, or the connection breaks off
    :raises ImportError: without the extra ``hub``
    """
    repository = Repository(repo_id, revision, token)
    file = repository.download(filename or default_filename(repo_id))
    if STATISTICS in repository.names:
        if env is None:
            raise ValueError(
                f"{repo_id} has statistics of a VecNormalize, without which the model misreads observations: give `env`, "
                "whose observations they normalise."
            )
        if isinstance(env, VecEnv) and unwrap_vec_normalize(env) is not None:
            raise ValueError(f"`env` has a VecNormalize, but {repo_id} brings its own: give the environment without it.")
        env = VecNormalize.load(str(repository.download(STATISTICS)), as_vec_env(env))
        env.training = env.norm_reward = False
    return algorithm.load(file, env=env, **options)
