"""Evaluations with notes that say how the policy acted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.data.returns import BehaviourReturn

NOTED = ("modes", "deterministic", "offline", "behaviour_return", "behaviour_caveat")
"""Arrays in ``evaluations.npz`` beside SB3's."""
NO_BEHAVIOUR = BehaviourReturn(np.nan, np.nan, np.nan, 0, "")


def as_list(callback: MaybeCallback) -> list[BaseCallback]:
    """Turn an argument ``callback`` of SB3 into a list."""
    if callback is None:
        return []
    if isinstance(callback, list):
        return callback
    return [callback if isinstance(callback, BaseCallback) else ConvertCallback(callback)]


def find_evaluations(callbacks: Sequence[object]) -> list[EvalCallback]:
    """Find every ``EvalCallback``, also inside other callbacks."""
    found = []
    for callback in callbacks:
        if isinstance(callback, EvalCallback):
            found.append(callback)
        if isinstance(callback, BaseCallback):
            inner = callback.callbacks if isinstance(callback, CallbackList) else []
            triggered = (getattr(callback, name, None) for name in ("callback", "callback_on_new_best"))
            found += find_evaluations([*inner, *triggered])
    return found


class NoteEvaluationModes(BaseCallback):
    """
    Makes SB3's ``EvalCallback`` say how the policy acted. ``OfflineToOnlineAlgorithm`` adds this callback by itself, after the
    evaluations that it watches.

    It prints a note with each evaluation (if the ``EvalCallback`` is verbose) and adds arrays to ``evaluations.npz``, with one
    entry for each evaluation beside SB3's ``timesteps``:

    - ``modes``: the policy's ``acting_mode`` (``"zero"``, ``"best_of_n"``, ...)
    - ``deterministic``: the argument of the ``EvalCallback``
    - ``offline``: True if ``timesteps`` counts gradient steps of an offline phase, not environment steps
    - ``behaviour_return``: in an offline phase the dataset's own mean return and the ends of its 95 % interval, else NaN
    - ``behaviour_caveat``: why that return is not the return of the task's episodes, "" if it may be

    :param evaluations: the callbacks to watch
    """

    def __init__(self, evaluations: list[EvalCallback]):
        super().__init__()
        self.evaluations = evaluations
        self._seen = [evaluation.n_calls for evaluation in evaluations]

    def _on_step(self) -> bool:
        for i, evaluation in enumerate(self.evaluations):
            if evaluation.n_calls != self._seen[i]:
                self._seen[i] = evaluation.n_calls
                if evaluation.eval_freq > 0 and evaluation.n_calls % evaluation.eval_freq == 0:
                    self._note(evaluation)
        return True

    def _note(self, evaluation: EvalCallback) -> None:
        model: Any = self.model
        mode, offline = model.policy.acting_mode, model.is_offline
        behaviour = model.replay_buffer.offline_dataset.behaviour_return if offline else NO_BEHAVIOUR
        if evaluation.verbose >= 1:
            print(f"Evaluation mode: {mode}, deterministic={evaluation.deterministic}")
            if offline:
                print(f"Dataset's own mean return: {behaviour}")
        if evaluation.log_path is None:
            return
        # The notes lie beside the lists of the evaluation, which may go on in another phase
        notes: list[tuple[Any, ...]] = vars(evaluation).setdefault("evaluations_notes", [])
        unseen = len(evaluation.evaluations_timesteps) - len(notes) - 1  # evaluations of another algorithm
        notes += [("unknown", evaluation.deterministic, False, NO_BEHAVIOUR[:3], "")] * unseen
        notes.append((mode, evaluation.deterministic, offline, behaviour[:3], behaviour.caveat))
        file = Path(f"{evaluation.log_path}.npz")
        with np.load(file) as stored:
            arrays = dict(stored)
        arrays |= dict(zip(NOTED, map(np.array, zip(*notes, strict=True)), strict=True))

        def write(path: Path) -> None:
            with open(path, "wb") as target:
                np.savez(target, **arrays)

        write_atomically(file, "npz", write)
