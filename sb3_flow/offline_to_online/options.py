"""Checks of constructors' arguments: each is known, and each option is in the list that its type gives."""

import inspect
from typing import Any, Literal, get_args, get_origin

import cloudpickle
from stable_baselines3.common.buffers import BaseBuffer

from sb3_flow.common.checks import arguments_of, check_choice, check_known

OF_MODEL = ("buffer_size", "observation_space", "action_space", "device", "n_envs", "optimize_memory_usage")
"""Arguments of a replay buffer that a model gives."""


def check_own(owner: type, given: dict[str, Any]) -> None:
    """
    Refuse arguments that no constructor of a class and its bases lists.

    :param owner: the class that the user called
    :param given: arguments by name
    :raises TypeError: if there is such an argument; the message has the nearest name
    """
    constructors = [vars(base)["__init__"] for base in owner.__mro__ if "__init__" in vars(base)]
    check_known(owner, given, {name for each in constructors for name in inspect.signature(each).parameters})


def check_options(owner: Any) -> None:
    """
    Refuse an option that is not in the list of its type, ``Literal["this", "that"]``.

    :param owner: object with the arguments of its constructor as attributes
    :raises ValueError: if there is such an option
    """
    for name, argument in arguments_of(type(owner)).items():
        if get_origin(argument.annotation) is Literal:
            check_choice(get_args(argument.annotation), **{name: getattr(owner, name)})


def check_buffer_class(given: Any) -> None:
    """
    Refuse what is no class of replay buffers.

    :param given: the user's ``replay_buffer_class``
    :raises TypeError: if it is no such class
    """
    if given is not None and not (isinstance(given, type) and issubclass(given, BaseBuffer)):
        raise TypeError(
            f"`replay_buffer_class` must be a class of replay buffers, such as HerReplayBuffer, but {given!r} was given."
        )


def check_buffer_arguments(buffer: type[BaseBuffer], given: dict[str, Any]) -> None:
    """
    Refuse arguments that a replay buffer does not have, or has from its model, and functions that no file can hold.

    :param buffer: the buffer's class
    :param given: the user's ``replay_buffer_kwargs``
    :raises TypeError: if the class has no such argument
    :raises ValueError: if an argument cannot be given so
    """
    check_known(buffer, given)
    for name, value in given.items():
        if name in OF_MODEL:
            raise ValueError(f"`{name}` is not for `replay_buffer_kwargs`: the model gives `{name}` to its buffer.")
        if callable(value):
            try:
                cloudpickle.dumps(value)
            except Exception as error:  # anything may come out of it
                raise ValueError(
                    f"`{name}` in `replay_buffer_kwargs` cannot be saved with the model ({error}): give a function that holds "
                    "no environment, rather than a method of an environment."
                ) from error
