"""
Words for an offline phase, in which SB3's ``num_timesteps`` counts gradient steps and SB3 calls them time steps.

What SB3 prints and logs is recognised by its text (checked with stable-baselines3 2.9.2, named in
``tests/test_sb3_private_api.py``).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from stable_baselines3.common.logger import Logger

from sb3_flow.data.returns import BehaviourReturn

TIMESTEPS, GRADIENT_STEPS = "time/total_timesteps", "time/gradient_steps"
EVALUATION = "Eval num_timesteps=", "Eval gradient_steps="
"""The beginning of what ``EvalCallback`` prints, and what it becomes."""


class _Relabelled:
    """A text stream in front of another one."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(text.replace(*EVALUATION))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def in_gradient_steps(logger: Logger, behaviour: BehaviourReturn) -> Iterator[None]:
    """
    While it lasts, what is printed and logged says "gradient steps", and each table that says how many has the dataset's own
    return, too.

    :param logger: of the model
    :param behaviour: return of the policy that made the dataset
    """
    record = logger.record

    def relabelled(key: str, value: Any, exclude: Any = None) -> None:
        if key == TIMESTEPS:
            key = GRADIENT_STEPS
            for end, number in (("", behaviour.value), ("_low", behaviour.low), ("_high", behaviour.high)):
                # the table has the mean alone, and what is printed beside an evaluation all three
                record(f"offline/behaviour_return{end}", number, ("stdout", "log") if end else None)
        record(key, value, exclude)

    logger.record = relabelled  # type: ignore[method-assign]
    try:
        with redirect_stdout(_Relabelled(sys.stdout)):
            yield
    finally:
        del logger.record
