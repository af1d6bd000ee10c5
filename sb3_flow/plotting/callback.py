"""A callback that draws during training."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure as LoggedFigure
from stable_baselines3.common.logger import TensorBoardOutputFormat

from sb3_flow.common.checks import check_minimum
from sb3_flow.common.observations import map_arrays
from sb3_flow.plotting.figures import finish, new_figure
from sb3_flow.plotting.flows import Observation, action_flow, flow_values
from sb3_flow.plotting.ratio_histogram import importance_ratios

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FlowVisualisationCallback(BaseCallback):
    """
    Draws pictures during training, in TensorBoard (tab "Images") and as PNG files. They do not change the training itself.

    - RQL, FMQ, FQL, DSRL, QAM and RLPD, offline and online: ``pictures/action_flow`` and ``pictures/flow_values`` of an
      observation, the latter unless ``objective="bc"``
    - PPO, GRPO and the others: ``pictures/importance_ratios`` of a rollout, after the update that learned from it

    :param plot_freq: draw every ``plot_freq`` calls: gradient steps offline, steps of the (vectorised) environment online
    :param observation: whose flow is drawn, as the environment gives it (not normalised); by default the first observation of
        the dataset, or of training if there is no dataset
    :param dimensions: components of the action, see :func:`~sb3_flow.plotting.flows.action_flow`
    :param save_path: folder for PNG files, whose names begin with the algorithm's; without it pictures go to TensorBoard alone
    :param verbose: 1 prints the names of the files, 0 prints nothing
    """

    def __init__(
        self,
        plot_freq: int = 10_000,
        observation: Observation | None = None,
        dimensions: tuple[int, ...] | None = None,
        save_path: str | Path | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        check_minimum(1, plot_freq=plot_freq)
        new_figure(1, 1)  # a missing matplotlib is noticed now, not after hours
        self.plot_freq, self.observation, self.dimensions, self.save_path = plot_freq, observation, dimensions, save_path
        self._due = False
        self._learned_from: tuple[Any, int] | None = None

    def _on_training_start(self) -> None:
        if not self._has_ratios and not hasattr(self.model.policy, "flow_path"):
            raise TypeError(
                f"FlowVisualisationCallback draws the algorithms of sb3_flow, but `model` is a {type(self.model).__name__}."
            )
        if self.save_path is None and not self._boards:
            raise ValueError(
                "FlowVisualisationCallback has nowhere to put pictures: give it `save_path`, or the model `tensorboard_log`."
            )

    @property
    def _boards(self) -> list[TensorBoardOutputFormat]:
        return [output for output in self.logger.output_formats if isinstance(output, TensorBoardOutputFormat)]

    @property
    def _has_ratios(self) -> bool:
        return hasattr(self.model, "log_importance_ratios")

    def _on_step(self) -> bool:
        if self.n_calls % self.plot_freq == 0:
            if self._has_ratios:
                self._due = True
            else:
                self._draw_flow()
        return True

    def _on_rollout_end(self) -> None:
        if self._due:
            self._due = False
            # its arrays are not written to again: the next rollout gets new arrays
            model: Any = self.model
            self._learned_from = copy.copy(model.rollout_buffer), self.num_timesteps

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _on_rollout_start(self) -> None:
        if self._learned_from is None:
            return
        model: Any = self.model
        (rollout, steps), self._learned_from = self._learned_from, None
        present, model.rollout_buffer = model.rollout_buffer, rollout
        try:
            figure = importance_ratios(model, title=f"after the update at {steps} environment steps")
        finally:
            model.rollout_buffer = present
        self._put("importance_ratios", figure, steps, "online")

    def _draw_flow(self) -> None:
        model: Any = self.model
        phase, unit = ("offline", "gradient") if model.is_offline else ("online", "environment")
        observation, title = self._observation(), f"after {self.num_timesteps} {unit} steps"
        figure = action_flow(model, observation, self.dimensions, title=title)
        self._put("action_flow", figure, self.num_timesteps, phase)
        if model.policy.no_values is None:
            self._put("flow_values", flow_values(model, observation, title=title), self.num_timesteps, phase)

    def _observation(self) -> Observation:
        """Give the observation to draw, normalised by the present statistics."""
        model: Any = self.model
        normalizer = model.get_vec_normalize_env()
        if self.observation is None:
            dataset = getattr(model.replay_buffer, "offline_dataset", None)
            if dataset is not None:
                batch = dataset.observations
            else:
                batch = model._last_obs if normalizer is None else normalizer.get_original_obs()
            self.observation = map_arrays(lambda part: np.array(part[0]), batch)
        return self.observation if normalizer is None else normalizer.normalize_obs(self.observation)

    def _put(self, name: str, figure: "Figure", step: int, phase: str) -> None:
        if self.save_path is not None:
            file = Path(self.save_path) / f"{type(self.model).__name__}_{name}_{phase}_{step}_steps.png"
            finish(figure, file)
            if self.verbose >= 1:
                print(f"Saving picture to {file}")
        for board in self._boards:
            # not through `logger.record`: a picture belongs to its own step, not to the step of the next log line
            board.write({f"pictures/{name}": LoggedFigure(figure, close=True)}, {f"pictures/{name}": ()}, step)
