"""Gradient steps of the on-policy algorithms on the torch backend, recorded and replayed where that is possible."""

from collections.abc import Hashable
from typing import Any

import torch as th

from sb3_flow.common.nests import map_tensors
from sb3_flow.common.ranks import n_ranks
from sb3_flow.execution import Execution, UpdateRunner
from sb3_flow.on_policy.gradient_steps import FlatAdam
from sb3_flow.on_policy.minibatches import Minibatch


class RecordedSteps:
    """
    Take gradient steps of a model on minibatches of rows, see ``UpdateRunner``.

    :param execution: ``"graph"``, ``"eager"`` or ``"auto"``
    :param device: of the model
    :param verbose: 1 to print how steps are executed
    :param loaded: the model was trained before
    :raises ValueError: if ``"graph"`` is given and the device has no graphs
    """

    def __init__(self, execution: Execution, device: th.device, verbose: int, loaded: bool) -> None:
        self.runner = UpdateRunner(execution, device, verbose, loaded)

    def why_eager(self, model: Any, by_episode: bool) -> str | None:
        """
        Say why the steps of a pass over a rollout are not recorded, a sentence without its full stop; None if they are.

        :param model: of the PPO family
        :param by_episode: minibatches are whole episodes
        """
        if self.runner.why_eager is None:
            if n_ranks() > 1:
                self.runner.go_on_eagerly("several ranks exchange gradients")
            elif by_episode or model.rollout_buffer.is_recurrent:
                self.runner.go_on_eagerly("minibatches of whole episodes and of sequences differ in size")
            elif hasattr(model.rollout_buffer, "action_masks"):
                self.runner.go_on_eagerly("sb3-contrib's masked distributions bring numbers from the host")
            elif model.target_kl is not None:
                self.runner.go_on_eagerly("`target_kl` is compared before each step")
            elif model.use_sde:
                self.runner.go_on_eagerly("gSDE draws its noise between the steps")
        return self.runner.why_eager

    def step(self, model: Any, steps: FlatAdam, minibatch: Minibatch, clip: dict[str, float | None]) -> dict[str, th.Tensor]:
        """
        Compute the loss of a minibatch and take a step.

        :param model: of the PPO family
        :param steps: of its optimizer
        :param minibatch: of rows
        :param clip: the present clip ranges
        :return: the loss's metrics
        """
        # ranges may follow a schedule, so they are numbers on the device
        device, given = model.device, {name: value for name, value in clip.items() if value is not None}
        ranges = {name: th.full((), value, device=device) for name, value in given.items()}

        def take(data: Any, proximal_log_prob: th.Tensor | None, ranges: dict[str, th.Tensor]) -> Any:
            part = Minibatch(data=data, proximal_log_prob=proximal_log_prob)
            loss, metrics = model.loss(part, **(clip | ranges))
            steps.zero_grad()
            loss.backward()
            steps.step(loss)
            return metrics

        kind: dict[str, Hashable] = {"clip ranges": tuple(ranges)}
        inputs = (minibatch.data, minibatch.proximal_log_prob, ranges)
        found: dict[str, th.Tensor] = self.runner(*(take, inputs, kind, [model.policy.optimizer]), model=model)
        return map_tensors(th.clone, found)  # type: ignore[no-any-return]
