"""
rl-zoo3 with the algorithms of this package, sweeps and benches:
``python -m sb3_flow.zoo train|enjoy|record_video|plot|optimize|sweep|bench|push_to_hub|load_from_hub ...``.

For a script of your own::

    import sb3_flow.zoo

    sb3_flow.zoo.register()
    from rl_zoo3.train import train

    train()
"""

import importlib

from sb3_flow.zoo.registry import ALGORITHMS, config_file

__all__ = ["ALGORITHMS", "config_file", "register"]


def register() -> None:
    """
    Make algorithms, samplers for ``-optimize`` and configurations known to rl-zoo3. Call it before
    ``rl_zoo3.train.train()``; a second call changes nothing.

    :raises ImportError: without rl-zoo3
    """
    try:
        importlib.import_module("rl_zoo3")
    except ImportError as error:
        raise ImportError(f"sb3_flow.zoo needs rl-zoo3: pip install 'sb3-flow[zoo]' ({error})") from error
    # after that check, since these import rl_zoo3
    from sb3_flow.zoo import manager, samplers

    samplers.register()
    manager.register()
