"""The update runner: it calls an update, or records the update once and replays the recording."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch as th

from sb3_flow.common.nests import map_tensors
from sb3_flow.common.ranks import n_ranks
from sb3_flow.execution.recordable_optimizer import RecordableOptimizer, Same
from sb3_flow.execution.recorders import CudaGraphs, Recorder

Execution = Literal["auto", "eager", "graph"]

WARM_UPS = 3
"""Calls of each kind before its recording, which are updates like all others."""
MOST_RECORDINGS = 16
"""Recordings that are kept, each with memory of its own; the oldest goes first."""
MOST_KINDS = 100
"""Kinds of updates after which arguments are taken to change all the time."""


class UpdateRunner:
    """
    Call a function of tensors again and again, as it is ("eager") or as a recording that is replayed ("graph"): a CUDA graph,
    in which hundreds of kernels are started at once.

    The first calls of each kind are warm-ups, then one call is recorded. Whatever a recording takes for granted is part of the
    kind or compared before each replay: sizes and types of inputs, the addresses of parameters, options of optimizers. Where
    an update cannot be recorded, the runner goes on eagerly and says why.

    :param execution: ``"graph"``, ``"eager"``, or ``"auto"``: graph on a CUDA device
    :param device: of the tensors
    :param verbose: 1 to print how updates are executed
    :param loaded: the model was trained before, perhaps on a GPU, so that ``"graph"`` is no mistake elsewhere
    :param recorder: takes the place of CUDA's graphs
    :raises ValueError: if ``"graph"`` is given and the device has no graphs
    """

    def __init__(
        self,
        execution: Execution,
        device: th.device,
        verbose: int = 0,
        loaded: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.execution, self.device, self.verbose = execution, device, verbose
        self._given_recorder = recorder
        self.why_eager: str | None = None
        """Why updates are not recorded, a sentence without its full stop; None if they are."""
        if execution == "eager":
            self.why_eager = '`execution` is "eager"'
        elif device.type != "cuda" and recorder is None:
            if execution == "graph" and not loaded:
                raise ValueError(
                    f'`execution="graph"` needs a CUDA device, but the model is on {device}: leave `execution` at "auto".'
                )
            self.why_eager = f"the model is on {device}, and graphs are CUDA's"
        self._recorder = recorder
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> "UpdateRunner":
        return UpdateRunner(self.execution, self.device, self.verbose, True, self._given_recorder)

    def forget(self) -> None:
        """Forget all recordings."""
        self._recordings: dict[Hashable, tuple[Callable[[], None], list[th.Tensor], Any]] = {}
        self._calls: dict[tuple[tuple[str, Hashable], ...], int] = {}
        self._fixed: Any = None
        self._optimizers: list[RecordableOptimizer] = []
        self._told = False

    def __call__(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        kind: dict[str, Hashable],
        optimizers: Sequence[th.optim.Optimizer],
        generators: Sequence[th.Generator] = (),
        remember: Callable[[], Callable[[], None]] | None = None,
    ) -> Any:
        """
        Do what the function does.

        :param function: works on its inputs and on tensors that it knows, without reading a number out of a tensor
        :param inputs: tensors, or dictionaries and NamedTuples of tensors, which a replay copies
        :param kind: all else that the function depends on, by name
        :param optimizers: whose steps the function makes
        :param generators: that the function draws from
        :param remember: called before a recording; gives a function that makes the generators anew if the recording fails
        :return: the function's result; the next replay may overwrite its tensors
        """
        if self.why_eager is None and n_ranks() > 1:
            self.go_on_eagerly("several ranks exchange gradients")
        if self.why_eager is None:
            self._prepare(optimizers, generators)
        if self.why_eager is not None:
            return function(*inputs)
        leaves = _leaves(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        known_as = (*kind.items(), ("precision", th.get_float32_matmul_precision()), ("sizes of inputs", shapes))
        if known_as not in self._recordings:
            if len(self._calls) >= MOST_KINDS and known_as not in self._calls:
                before = dict(next(reversed(self._calls)))
                changed = [name for name, value in known_as if name not in before or before[name] != value]
                self.go_on_eagerly(
                    f"{MOST_KINDS} kinds of updates were made, since what they depend on changes all the time: "
                    + ", ".join(changed)
                )
                return function(*inputs)
            calls = self._calls[known_as] = self._calls.get(known_as, 0) + 1
            if self._recorder is None:
                self._recorder = CudaGraphs(self.device)
            if calls <= WARM_UPS:
                return self._recorder.warm_up(lambda: function(*inputs))
            self._record(function, inputs, known_as, generators, remember)
            if self.why_eager is not None:
                return function(*inputs)
        replay, own_leaves, result = self._recordings[known_as]
        for own, given in zip(own_leaves, leaves, strict=True):
            own.copy_(given)
        replay()
        return result

    def _prepare(self, optimizers: Sequence[th.optim.Optimizer], generators: Sequence[th.Generator]) -> None:
        """Prepare the optimizers, and forget all recordings if something has moved that these take for granted."""
        if [known.optimizer for known in self._optimizers] != list(optimizers):
            self._optimizers = [RecordableOptimizer(optimizer) for optimizer in optimizers]
        for optimizer in self._optimizers:
            if optimizer.hindrance is not None:
                self.go_on_eagerly(optimizer.hindrance)
                return
            optimizer.prepare()
        fixed = [*(optimizer.fixed() for optimizer in self._optimizers), *map(Same, generators)]
        if fixed != self._fixed:
            self._recordings, self._calls, self._fixed = {}, {}, fixed

    def _record(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        kind: Hashable,
        generators: Sequence[th.Generator],
        remember: Callable[[], Callable[[], None]] | None,
    ) -> None:
        assert self._recorder is not None
        own_inputs = map_tensors(th.clone, inputs)
        restore = None if remember is None else remember()
        try:
            replay, result = self._recorder.record(lambda: function(*own_inputs), generators)
        except Exception as error:  # the driver's and torch's errors are of several types
            if restore is not None:
                restore()
            for optimizer in self._optimizers:
                optimizer.optimizer.zero_grad(set_to_none=True)  # a failed recording leaves gradients without numbers
            self.go_on_eagerly(f"an update cannot be recorded, {type(error).__name__}: {error}")
            return
        while len(self._recordings) >= MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[kind] = replay, _leaves(own_inputs), result
        if self.verbose >= 1 and not self._told:
            print("Recorded a gradient update as a CUDA graph, which is replayed from now on")
            self._told = True

    def go_on_eagerly(self, reason: str) -> None:
        """Record nothing from now on, and say why: a sentence without its full stop."""
        self.why_eager = reason
        self._recordings, self._calls = {}, {}
        if self.execution == "graph" or self.verbose >= 1:
            print(f"Making gradient updates without a CUDA graph, which is slower: {reason}")

    def state_of(self, optimizer: th.optim.Optimizer) -> dict[str, Any]:
        """Give the state of an optimizer for a file, which does not depend on how updates are executed."""
        known = [each for each in self._optimizers if each.optimizer is optimizer]
        return known[0].plain_state() if known else optimizer.state_dict()


def _leaves(values: Any) -> list[th.Tensor]:
    leaves: list[th.Tensor] = []
    map_tensors(leaves.append, values)
    return leaves
