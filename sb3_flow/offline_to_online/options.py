"""Checks of constructors' arguments: each is known, and each option is in the list that its type gives."""

import inspect
from typing import Any, Literal, get_args, get_origin

from sb3_flow.common.checks import arguments_of, check_choice, check_known


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
