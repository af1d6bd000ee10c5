"""
Words for an offline phase, in which SB3's ``num_timesteps`` counts gradient steps and SB3 calls them time steps.

SB3's lines are recognised by their text (checked with stable-baselines3 2.9.2, named in ``tests/test_sb3_private_api.py``).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from stable_baselines3.common.logger import Logger

from sb3_flow.data.returns import BehaviourReturn

TIMESTEPS, GRADIENT_STEPS = "time/total_timesteps", "time/gradient_steps"
EVALUATION = "Eval num_timesteps=", "Eval gradient_steps="
"""The beginning of the line that ``EvalCallback`` prints, and its replacement."""


class _Relabelled:
    """A text stream that replaces words on their way to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(text.replace(*EVALUATION))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printed_in_gradient_steps() -> Iterator[None]:
    """
    Make printed lines say "gradient steps" for a while. A progress bar that is shown already has put a stream of its own in
    the place of stdout, which in a notebook does not write to the stream that was there before.
    """
    with redirect_stdout(_Relabelled(sys.stdout)):
        yield


@contextmanager
def logged_in_gradient_steps(logger: Logger, behaviour: BehaviourReturn) -> Iterator[None]:
    """
    Make logs say "gradient steps" for a while, and add the dataset's own return to each table that counts the steps.

    :param logger: the model's logger
    :param behaviour: return of the policy that made the dataset
    """
    record = logger.record

    def relabelled(key: str, value: Any, exclude: Any = None) -> None:
        if key == TIMESTEPS:
            key = GRADIENT_STEPS
            for end, number in (("", behaviour.value), ("_low", behaviour.low), ("_high", behaviour.high)):
                # the table has the mean alone; the line beside an evaluation has all three numbers
                record(f"offline/behaviour_return{end}", number, ("stdout", "log") if end else None)
        record(key, value, exclude)

    logger.record = relabelled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del logger.record
