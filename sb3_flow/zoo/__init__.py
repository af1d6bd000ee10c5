"""
rl-zoo3 with the algorithms of this package: ``python -m sb3_flow.zoo train|enjoy|record_video|plot|optimize ...``.

For a script of your own::

    import sb3_flow.zoo

    sb3_flow.zoo.register()
    from rl_zoo3.train import train

    train()
"""

from sb3_flow.zoo.registry import ALGORITHMS, config_file, register

__all__ = ["ALGORITHMS", "config_file", "register"]
