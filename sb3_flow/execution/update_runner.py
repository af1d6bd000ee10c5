"""The update runner: it calls an update, or records the update once and replays the recording."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch as th

from sb3_flow.common.nests import map_tensors
from sb3_flow.common.ranks import n_ranks
from sb3_flow.execution.recordable_optimizer import RecordableOptimizer, Same, set_options
from sb3_flow.execution.recorders import CudaGraphs, Recorder
from sb3_flow.execution.settings import WatchedSettings
from sb3_flow.execution.watched_networks import WatchedNetworks, networks_of

Execution = Literal["auto", "eager", "graph"]

Recording = tuple[Callable[[], None], list[th.Tensor], Any]
"""A replay, the tensors that it reads, and the result that it fills."""

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
    kind or compared before each replay: sizes and types of inputs, the modules of networks and the addresses of their tensors,
    options of optimizers. Where an update cannot be recorded, the runner goes on eagerly and says why.

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

    def __getstate__(self) -> dict[str, Any]:
        # a copy records for itself, and its optimizers are as if steps had never been recorded
        arguments = (self.execution, self.device, self.verbose, True, self._given_recorder)
        return {"arguments": arguments, "plain": [(each.optimizer, each.plain_options()) for each in self._optimizers]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]
        for optimizer, options in state["plain"]:
            set_options(optimizer.param_groups, options)

    def forget(self) -> None:
        """Forget all recordings."""
        self._recordings: dict[Hashable, Recording] = {}
        self._latest: tuple[Any, Any, Any, Recording] | None = None  # the latest kind in parts, and its recording
        self._settings = WatchedSettings()
        self._calls: dict[tuple[tuple[str, Hashable], ...], int] = {}
        self._fixed: Any = None
        self._networks = WatchedNetworks(())
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
        model: Any = None,
        sources: Hashable = None,
    ) -> Any:
        """
        Do what the function does.

        :param function: works on its inputs and on tensors that it knows, without reading a number out of a tensor
        :param inputs: tensors, or dictionaries and NamedTuples of tensors, which a replay copies
        :param kind: all else that the function depends on, by name
        :param optimizers: whose steps the function makes
        :param generators: that the function draws from
        :param remember: called before a recording; gives a function that makes the generators anew if the recording fails
        :param model: whose numbers, names and networks the function reads or changes
        :param sources: names all other tensors that the function reads; when it changes, all recordings are forgotten
        :return: the function's result; the next replay may overwrite its tensors
        """
        if self.why_eager is None and n_ranks() > 1:
            self.go_on_eagerly("several ranks exchange gradients")
        if self.why_eager is None:
            self._prepare(optimizers, generators, [] if model is None else networks_of(model), sources)
        if self.why_eager is not None:
            return function(*inputs)
        leaves = _leaves(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        own = () if model is None else self._settings.present(model)
        of_networks = self._networks.settings()
        others = (
            *kind.items(),
            ("precision", (th.get_float32_matmul_precision(), th.are_deterministic_algorithms_enabled())),
            ("sizes of inputs", shapes),
        )
        latest = self._latest
        if latest is None or latest[0] is not own or latest[1] is not of_networks or latest[2] != others:
            kind_of_all = (*own, ("settings of networks", of_networks), *others)
            if not self._is_due(kind_of_all):
                if self.why_eager is not None or self._recorder is None:
                    return function(*inputs)
                return self._recorder.warm_up(lambda: function(*inputs))
            if kind_of_all not in self._recordings:
                self._record(function, inputs, kind_of_all, generators, remember)
                if self.why_eager is not None:
                    return function(*inputs)
            latest = self._latest = own, of_networks, others, self._recordings[kind_of_all]
        replay, own_leaves, result = latest[3]
        for leaf, given in zip(own_leaves, leaves, strict=True):
            leaf.copy_(given)
        replay()
        return result

    def _is_due(self, kind: tuple[tuple[str, Hashable], ...]) -> bool:
        """Say whether a recording of this kind is there or due; otherwise count a warm-up, or go on eagerly."""
        if kind in self._recordings:
            return True
        if len(self._calls) >= MOST_KINDS and kind not in self._calls:
            before = dict(next(reversed(self._calls)))
            changed = [name for name, value in kind if name not in before or before[name] != value]
            self.go_on_eagerly(
                f"{MOST_KINDS} kinds of updates were made, since what they depend on changes all the time: "
                + ", ".join(changed)
            )
            return False
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if self._recorder is None:
            self._recorder = CudaGraphs(self.device)
        return calls > WARM_UPS

    def _prepare(
        self,
        optimizers: Sequence[th.optim.Optimizer],
        generators: Sequence[th.Generator],
        networks: Sequence[th.nn.Module],
        sources: Hashable,
    ) -> None:
        """Prepare the optimizers, and forget all recordings if something has moved that these take for granted."""
        if [known.optimizer for known in self._optimizers] != list(optimizers):
            known = {id(each.optimizer): each for each in self._optimizers}
            self._optimizers = [known.pop(id(optimizer), RecordableOptimizer(optimizer)) for optimizer in optimizers]
            for left in known.values():
                set_options(left.optimizer.param_groups, left.plain_options())
        hindrances = [optimizer.hindrance for optimizer in self._optimizers]
        if not self._networks.unchanged(networks):
            self._networks, self._fixed = WatchedNetworks(networks), None
        if self._networks.has_hooks:
            hindrances.append("a network or a parameter has hooks, which a recording leaves out")
        if th.is_autocast_enabled(self.device.type):
            hindrances.append("autocast is on, which keeps copies of weights that a recording would go on to read")
        for reason in filter(None, hindrances):
            self.go_on_eagerly(reason)
            return
        for optimizer in self._optimizers:
            optimizer.prepare()
        fixed: list[Any] = [*(optimizer.fixed() for optimizer in self._optimizers), *map(Same, generators), sources]
        if fixed != self._fixed:
            self._recordings, self._calls, self._fixed, self._latest = {}, {}, fixed, None

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
        self._recordings, self._calls, self._latest = {}, {}, None
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
