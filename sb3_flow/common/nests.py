"""Tensors in dictionaries, tuples and NamedTuples."""

from collections.abc import Callable
from typing import Any


def map_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """
    Apply a function to every tensor of a nest.

    :param function: takes a tensor
    :param values: a tensor, or a dictionary, tuple or NamedTuple of such values; None stays None
    :return: the results in the same structure
    """
    if values is None:
        return None
    if isinstance(values, dict):
        return {key: map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, tuple):
        results = [map_tensors(function, value) for value in values]
        return type(values)(*results) if hasattr(values, "_fields") else tuple(results)
    return function(values)
