"""The connection to Ray, which is an optional extra: nothing here imports Ray until it is asked for."""

import os
import socket
from collections.abc import Mapping
from typing import Any

ACTOR_OPTIONS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
"""Options of our actors, unless others are given."""
# an actor that comes back, takes calls in another order or outlives its owner does not have what we believe it to have
RESERVED = ("concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name")


def checked_actor_options(**argument: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Complete the options of our actors.

    :param argument: an argument, by its name
    :raises ValueError: if it is not a dictionary, or has an option that cannot be chosen
    """
    ((argument_name, given),) = argument.items()
    if not (given is None or isinstance(given, Mapping)):
        raise ValueError(f"`{argument_name}` must be a dictionary of options of Ray's actors, but {given!r} was given.")
    for option in RESERVED:
        if given and option in given:
            raise ValueError(f"`{option}` in `{argument_name}` cannot be chosen: actors end with what they serve.")
    return {**ACTOR_OPTIONS, **(given or {})}


def connected(needed_by: str, address: str | None = None) -> Any:
    """
    Connect to Ray, unless the program has done so with ``ray.init``: to the cluster at an address, to that of the environment
    variable ``RAY_ADDRESS``, or else to a local one, which ends with the program.

    :param needed_by: what needs Ray, for the error
    :param address: as for ``ray.init``
    :return: the package ``ray``
    :raises ImportError: if Ray is not installed
    :raises ConnectionError: if no cluster answers at the address
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"{needed_by} needs the package ray: pip install 'sb3-flow[ray]' ({error})") from error
    if not ray.is_initialized():
        if address is None and "RAY_ADDRESS" not in os.environ:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local cluster tells nobody of its use unless asked to
            ray.init(address="local", include_dashboard=False)
        else:
            ray.init(address=address)
    return ray


def head_address(ray: Any) -> str:
    """Return host and port of the head of Ray's cluster."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def head_answers(address: str, timeout: float) -> bool:
    """
    Say whether the head of Ray's cluster takes connections. Ray's own calls wait for a minute for a head that is gone, and
    then end the program.

    :param address: see :func:`head_address`
    :param timeout: seconds
    """
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except OSError:
        return False
    return True
