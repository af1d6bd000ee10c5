"""The connection to the Hub: the library behind it, its errors in a sentence, and the user's word that files are trusted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRUST = "TRUST_REMOTE_CODE"
"""The environment variable of huggingface_sb3, with which a user says that files may run code."""
LOGIN = "log in by `hf auth login`, set HF_TOKEN, or give `token`"
YES = ("1", "on", "t", "true", "y", "yes")


def hub_library() -> Any:
    """
    Import ``huggingface_hub``.

    :raises ImportError: naming the extra that installs it
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"The Hub needs the package huggingface_hub: pip install 'sb3-flow[hub]' ({error})") from error
    return huggingface_hub


def check_trusted(repo_id: str) -> None:
    """
    Refuse to load files from the Hub, which can run any code, unless the user has said that they are trusted.

    :param repo_id: the repository, for the message
    :raises ValueError: without the environment variable
    """
    if os.environ.get(TRUST, "").lower() not in YES:
        raise ValueError(
            f"A model from the Hub is loaded by `pickle`, which runs any code that the file holds. If you trust whoever can "
            f"write to {repo_id}, set the environment variable `{TRUST}` to `True`."
        )


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """
    Turn an error of the Hub or of the network into a sentence.

    :param repo_id: the repository that is spoken to
    :raises OSError: PermissionError, FileNotFoundError or ConnectionError; errors of this machine, such as a full disk, stay
    """
    errors = hub_library().errors
    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise PermissionError(f"{repo_id} needs a token, but none was found: {LOGIN}.") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{repo_id} has no such `revision` on the Hub.") from error
    except errors.HfHubHTTPError.__bases__ as error:  # also of the HTTP client, whichever the library uses
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of this machine, such as a full disk
        answer = getattr(error, "response", None)
        status = getattr(answer, "status_code", None)
        if isinstance(error, errors.RepositoryNotFoundError) and status != 403:
            raise FileNotFoundError(
                f"There is no {repo_id} on the Hub, or it is private and your token may not read it: {LOGIN}."
            ) from error
        if status in (401, 403):
            raise PermissionError(
                f"The Hub refused the token for {repo_id}, status {status}; pushing needs a token that may write: {LOGIN}."
            ) from error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"The Hub did not answer as expected about {repo_id}: {first}") from error


class Repository:
    """
    A repository as it is now: all files that are downloaded belong to the same commit.

    :param repo_id: name of the user or organization, a slash, and a name
    :param revision: a branch, tag or commit (default: the newest commit of the main branch)
    :param token: of the Hub, for a private repository (default: the token that the machine is logged in with)
    :raises ValueError: unless the user has said that the files are trusted, or if ``repo_id`` names no user
    :raises OSError: if the Hub does not answer, or has no such repository
    """

    def __init__(self, repo_id: str, revision: str | None = None, token: str | None = None) -> None:
        if "/" not in repo_id:
            raise ValueError(f"`repo_id` must be 'user/name' to load from, but {repo_id!r} was given.")
        check_trusted(repo_id)
        self.repo_id, self.token = repo_id, token
        with explained(repo_id):
            info = hub_library().HfApi(token=token).model_info(repo_id, revision=revision)
        self.commit, self.names = str(info.sha), [file.rfilename for file in info.siblings or ()]

    def download(self, name: str) -> Path:
        """
        Download a file into the Hub's cache, unless it is there. A file in the cache is whole.

        :param name: of the file
        :return: path of the file
        :raises FileNotFoundError: if the repository has no such file
        :raises OSError: if the connection breaks off
        """
        if name not in self.names:
            raise FileNotFoundError(f"{self.repo_id} has no file {name!r}; it has {', '.join(sorted(self.names)) or 'none'}.")
        with explained(self.repo_id):
            path = hub_library().hf_hub_download(self.repo_id, name, revision=self.commit, token=self.token)
        return Path(path)
