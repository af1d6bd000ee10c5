"""Checks of arguments and of numbers; each error names the argument, the given value and the expected values."""

import difflib
import inspect
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sb3_flow.compiled.choices import check_choice as check_choice  # rooms above take every check from here


def arguments_in(scope: dict[str, Any], *kept: str) -> dict[str, Any]:
    """
    Collect the arguments of a constructor by name, to hand them on.

    :param scope: ``locals()`` at the beginning of the constructor
    :param kept: names of arguments that are left out
    """
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *kept)}


def check_minimum(minimum: float, **arguments: float) -> None:
    """
    Refuse arguments that are too small.

    :param minimum: the least allowed value
    :param arguments: values by argument name
    :raises ValueError: if a value is smaller, or not a number
    """
    for name, given in arguments.items():
        try:
            enough = bool(given >= minimum)
        except TypeError:  # not a number at all
            enough = False
        if not enough:
            raise ValueError(f"`{name}` must be at least {minimum}, but {given} was given.")


def check_whole(minimum: int, **arguments: Any) -> None:
    """
    Refuse arguments that are no whole numbers, or too small.

    :param minimum: the least allowed value
    :param arguments: values by argument name; a float like 1e6 is a whole number, too
    :raises ValueError: if a value is not a whole number, or smaller
    """
    for name, given in arguments.items():
        if not _is_whole(given):
            raise ValueError(f"`{name}` must be a whole number, but {given!r} was given.")
        check_minimum(minimum, **{name: given})


def check_layers(net_arch: Any) -> None:
    """
    Refuse layers without units.

    :param net_arch: sizes of layers, in lists and dictionaries of any depth; None is passed over
    :raises ValueError: if a layer has no units, for which nothing would depend on the observation
    """
    parts = net_arch.values() if isinstance(net_arch, dict) else net_arch if isinstance(net_arch, list | tuple) else ()
    for part in parts:
        if isinstance(part, dict | list | tuple):
            check_layers(part)
        elif not _is_whole(part) or part < 1:
            raise ValueError(f"`net_arch` must be made of whole numbers of at least 1, but {net_arch} was given.")


def check_fraction(**arguments: float) -> None:
    """Refuse arguments, given by name, that are not in [0, 1], with a ValueError."""
    for name, given in arguments.items():
        if not _is_finite(given) or not 0.0 <= given <= 1.0:
            raise ValueError(f"`{name}` must be in [0, 1], but {given} was given.")


def check_number(where: str = "", **arguments: Any) -> None:
    """
    Refuse arguments that are no finite numbers.

    :param where: end of the message, e.g. when a schedule returned this
    :param arguments: values by argument name; None and functions, whose values are not known yet, are passed over
    :raises ValueError: if a value is not a finite number
    """
    for name, given in arguments.items():
        if given is not None and not callable(given) and not _is_finite(given):
            raise ValueError(f"`{name}` must be a finite number, but {given!r} was given{where}.")


def check_scheduled(progress: float, **arguments: float | None) -> None:
    """
    Refuse values of schedules that are not finite, or negative.

    :param progress: remaining progress, from 1 to 0. SB3's last rollout may go beyond 0, where negative values are let pass
    :param arguments: present values of schedules, by argument name
    :raises ValueError: if a value is not a finite number, or negative
    """
    when = f" by its schedule at a remaining progress of {progress}"
    check_number(when, **arguments)
    for name, given in arguments.items():
        if given is not None and given < 0 <= progress:
            raise ValueError(f"`{name}` must be at least 0, but {given} was given{when}.")


def _is_finite(given: Any) -> bool:
    try:
        return math.isfinite(given)
    except (TypeError, ValueError, OverflowError):  # not a number, or an integer beyond all floats
        return False


def _is_whole(given: Any) -> bool:
    return _is_finite(given) and int(given) == given


def check_computed(where: str, **arrays: np.ndarray) -> None:
    """
    Refuse results with NaN or infinite entries.

    :param where: the beginning of the message, e.g. the step
    :param arrays: computed numbers by name
    :raises FloatingPointError: if a number is not finite
    """
    broken = [name.replace("_", " ") for name, numbers in arrays.items() if not np.isfinite(numbers).all()]
    if broken:
        raise FloatingPointError(f"{where} numbers that are not finite: {', '.join(broken)}.")


def check_learning(total_timesteps: float, log_interval: int | None) -> None:
    """
    Refuse arguments of ``learn`` that are too small or no numbers.

    :param total_timesteps: of ``learn``, at least 0
    :param log_interval: of ``learn`` or ``learn_offline``, a whole number of at least 1; None for no log
    :raises ValueError: otherwise
    """
    check_minimum(0, total_timesteps=total_timesteps)
    if log_interval is not None:
        check_whole(1, log_interval=log_interval)


def arguments_of(owner: type) -> dict[str, inspect.Parameter]:
    """Read the parameters of a class's constructor that can be given by name, also through ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for base in owner.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            by_name = [given for given in parameters if given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)]
            found = {**{given.name: given for given in by_name}, **found}
            if not any(given.kind is given.VAR_KEYWORD for given in parameters):
                break
    return found


def unknown_argument(where: str, name: str, known: Iterable[str]) -> TypeError:
    """
    Make the error for an argument that does not exist.

    :param where: the class or dictionary that has no such argument
    :param name: the argument
    :param known: the existing arguments, of which the error names the nearest
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(known)}."
    return TypeError(f"{where} has no argument `{name}`: {hint}")


def check_known(owner: type, given: Iterable[str], besides: Iterable[str] = ()) -> None:
    """
    Refuse arguments that a class does not have.

    :param owner: the class that the user called
    :param given: names of arguments
    :param besides: further names that are allowed
    :raises TypeError: with the nearest name, if the class has no such argument
    """
    known = {*arguments_of(owner), *besides}
    for name in given:
        if name not in known:
            raise unknown_argument(owner.__name__, name, {argument for argument in known if not argument.startswith("_")})


@contextmanager
def naming_policy_arguments(model: Any) -> Iterator[None]:
    """
    Name the class that was called and the nearest argument, if a policy refuses an argument. Nothing is refused here,
    since a policy may take arguments that its signature does not show.

    :param model: the model whose policy is built meanwhile
    :raises TypeError: with the nearest name
    """
    try:
        yield
    except TypeError as error:
        refused = re.search(r"(?:unexpected keyword|no) argument ['`](\w+)['`]", str(error))
        known = {*arguments_of(model.policy_class)} - {"observation_space", "action_space", "lr_schedule"}
        if refused and refused[1] in model.policy_kwargs and refused[1] not in known:
            where = f"`policy_kwargs` of {type(model).__name__}: {model.policy_class.__name__}"
            raise unknown_argument(where, refused[1], known) from error
        raise


def warn_without_effect(owner: Any, **reasons: str | None) -> None:
    """
    Warn of arguments that were given though they change nothing beside the others.

    :param owner: has the arguments of its constructor as attributes
    :param reasons: by argument name why it has no effect, None if it has an effect
    """
    known = arguments_of(type(owner))
    for name, reason in reasons.items():
        if reason is not None and name in known and getattr(owner, name) != known[name].default:
            warnings.warn(f"`{name}` has no effect here: {reason}.")


def check_given_once(model: Any, kwargs: str, arguments: Iterable[str], loaded: bool = False) -> None:
    """
    Move arguments that a constructor takes itself out of a dictionary that holds them, too.

    :param model: has the arguments of its constructor as attributes
    :param kwargs: name of the dictionary, e.g. ``policy_kwargs``
    :param arguments: names that both take
    :param loaded: both come from an older file; the dictionary had the last word when it was saved
    :raises ValueError: if both give an argument, and differ
    """
    known, given = arguments_of(type(model)), dict(getattr(model, kwargs))
    for name in arguments:
        if name in given and name in known:
            value, own = given.pop(name), getattr(model, name)
            if not loaded and own not in (value, known[name].default):
                raise ValueError(f"`{name}` was given twice: {own!r}, and in `{kwargs}` {value!r}; once was expected.")
            setattr(model, name, value)
    setattr(model, kwargs, given)
