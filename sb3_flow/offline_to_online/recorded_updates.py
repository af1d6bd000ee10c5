"""Gradient updates of an off-policy algorithm, executed as they are or recorded and replayed."""

from collections.abc import Callable, Hashable
from typing import Any

import torch as th

from sb3_flow.data import ChunkSamples, TrajectoryReplayBuffer
from sb3_flow.data.prioritized import PrioritizedReplayBuffer
from sb3_flow.data.samples import PrioritizedSamples
from sb3_flow.execution import Execution, UpdateRunner
from sb3_flow.offline_to_online.row_weights import WeightedRows


class RecordedUpdates(WeightedRows):
    """Off-policy algorithm whose updates an ``UpdateRunner`` executes; with the draw of windows where that can be recorded."""

    execution: Execution
    update: Callable[[ChunkSamples, th.Generator], dict[str, th.Tensor]]
    _runner: UpdateRunner

    @property
    def optimizers(self) -> list[th.optim.Optimizer]:
        """Optimisers that follow the learning rate schedule and that :meth:`descend` steps; by default of all networks."""
        return [vars(network)["optimizer"] for network in self.networks.values() if "optimizer" in vars(network)]

    def kind_of_update(self) -> Hashable:
        """Say which branch of ``update`` is due, where that depends on more than tensors, numbers and names of the model."""
        return self.is_offline

    def _make_update(self, batch_size: int) -> dict[str, th.Tensor]:
        """Draw windows and make a gradient step on them; the next step may overwrite its metrics."""
        assert self.random_streams is not None
        if self._runner.why_eager is not None:
            return self.update(self._sample_windows(batch_size), self.random_streams["update"])
        buffer, key = self.replay_buffer, None
        if isinstance(buffer, TrajectoryReplayBuffer):
            key = buffer.sampling_key(self._vec_normalize_env)
        inputs = (self._sample_windows(batch_size),) if key is None else ()
        written = buffer.priorities_key if isinstance(buffer, PrioritizedReplayBuffer) else None

        def update(batch: ChunkSamples | None = None) -> dict[str, th.Tensor]:
            assert self.random_streams is not None
            batch = self._sample_windows(batch_size) if batch is None else batch
            metrics = self.update(batch, self.random_streams["update"])
            return {name: metric.detach() for name, metric in metrics.items()}

        kind = {"size of the batch": batch_size, "branch of `update`": self.kind_of_update()}
        generators = [self.random_streams["update"]]
        if key is not None:
            generators.append(self.random_streams["windows"])
        metrics: dict[str, th.Tensor] = self._runner(
            *(update, inputs, kind, self.optimizers, generators, self._remember_streams),
            model=self,
            sources=written if key is None else key,
        )
        return metrics

    def _remember_streams(self) -> Callable[[], None]:
        """Remember the states of the generators, which a recording that fails leaves unusable."""
        streams = self.random_streams
        assert streams is not None
        state = streams.get_state()

        def restore() -> None:
            streams.renew(state)
            self._connect_buffer_and_policy()

        return restore

    def _sample_windows(self, batch_size: int) -> ChunkSamples:
        assert self.replay_buffer is not None
        samples: Any = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
        ours = isinstance(samples, ChunkSamples | PrioritizedSamples)
        return samples if ours else ChunkSamples.from_transitions(samples, self.gamma)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of the agent, see ``BaseAlgorithm.get_parameters``; they do not depend on ``execution``."""
        parameters: dict[str, dict[str, Any]] = super().get_parameters()
        for name, network in self.networks.items():
            optimizer = vars(network).get("optimizer")
            if optimizer is not None and f"{name}.optimizer" in parameters:
                parameters[f"{name}.optimizer"] = self._runner.state_of(optimizer)
        return parameters

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_runner"]
