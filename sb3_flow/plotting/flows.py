"""Pictures of flow policies, from noise to action."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_flow.common.checks import check_minimum
from sb3_flow.plotting.figures import COLOURS, GRAY, finish, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Observation = np.ndarray | dict[str, np.ndarray]
TIMES, VALUES = "viridis", "cividis"  # legible to colour-blind readers and in gray
GRID = 41
"""Points along either side of the background of values."""


class Flow:
    """
    The flow of a policy for an observation, as arrays. Noise comes from a generator of its own: looking does not disturb
    training.

    :param model: a model with a flow policy (RQL, FMQ, FQL, RLPD, DSRL, QAM), or the policy
    :param observation: a single observation, as ``predict`` takes it (normalised, if the model's environment is)
    :param n_samples: number of starting points n
    :param seed: of the starting points
    """

    def __init__(self, model: Any, observation: Observation, n_samples: int, seed: int) -> None:
        policy = getattr(model, "policy", model)
        if not hasattr(policy, "flow_path"):
            raise TypeError(
                f"`model` must be RQL, FMQ, FQL, RLPD, DSRL, QAM or their policy, but a {type(policy).__name__} was given."
            )
        check_minimum(1, n_samples=n_samples)
        self.policy = policy
        training = policy.training
        policy.set_training_mode(False)
        tensor, _ = policy.obs_to_tensor(observation)
        size = len(next(iter(tensor.values())) if isinstance(tensor, dict) else tensor)
        if size != 1:
            raise ValueError(f"`observation` must be a single observation, but {size} were given.")
        noise = th.randn(1, n_samples, policy.noise_dim, generator=th.Generator().manual_seed(seed)).to(policy.device)
        with th.no_grad():
            times, self._points = policy.flow_path(tensor, noise)
            self.times: np.ndarray = times.cpu().numpy()
            self.chosen = self.in_units(policy.predict_chunk(tensor, deterministic=True))[0]
            self.values: np.ndarray | None = None
            if policy.no_values is None:
                self.values = policy.path_values(tensor, times, self._points)[:, :, 0].cpu().numpy()  # (K, T, n)
        self.points = self.in_units(self._points[:, 0])  # (T, n, h, components)
        self._tensor = tensor
        policy.set_training_mode(training)

    def in_units(self, chunks: th.Tensor) -> np.ndarray:
        """Translate chunks in [-1, 1] of shape ``(..., A)`` into the action space's units, shape ``(..., h, components)``."""
        shape = self.policy.action_space.shape
        assert shape is not None
        actions = chunks.cpu().numpy().reshape(*chunks.shape[:-1], self.policy.horizon_length, *shape)
        unscaled: np.ndarray = self.policy.unscale_action(actions)
        return unscaled.reshape(*actions.shape[: chunks.dim()], -1)

    def background(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute the values of two-dimensional chunks on a grid over their bounds, and the axis of the grid in [-1, 1]."""
        side = th.linspace(-1, 1, GRID, device=self.policy.device)
        actions = th.stack(th.meshgrid(side, side, indexing="xy"), dim=-1).view(1, 1, -1, 2)
        with th.no_grad():
            values = self.policy.path_values(self._tensor, th.ones(1, device=side.device), actions)
        return values.mean(dim=0).view(GRID, GRID).cpu().numpy(), side.cpu().numpy()


def action_flow(
    model: Any,
    observation: Observation,
    dimensions: tuple[int, ...] | None = None,
    chunk_step: int = 0,
    n_samples: int = 100,
    seed: int = 0,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Draw how the flow carries noise to actions for an observation, and how the critics value these actions. The star is the
    action of ``predict(deterministic=True)``. Where an action has just two components and is not part of a chunk, the values
    of all actions are in the background.

    :param model: RQL, FMQ, FQL, RLPD, DSRL, QAM, or a policy of theirs
    :param observation: a single observation, as ``predict`` takes it (normalised, if the model's environment is)
    :param dimensions: two components of the (flattened) action, or a single component, which is drawn over flow time; by
        default the first two, if there are two
    :param chunk_step: number of the action in its chunk
    :param n_samples: number of starting points
    :param seed: of the starting points
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises ValueError: if there is no such component or step
    """
    figure = new_figure(9.5, 4.2)
    flow = Flow(model, observation, n_samples, seed)
    _, _, horizon, components = flow.points.shape
    shown = tuple(range(min(2, components))) if dimensions is None else tuple(dimensions)
    if len(shown) not in (1, 2) or not all(0 <= component < components for component in shown):
        raise ValueError(f"`dimensions` must name one or two of the {components} components, but {dimensions} was given.")
    if not 0 <= chunk_step < horizon:
        raise ValueError(f"`chunk_step` must be from 0 to {horizon - 1}, but {chunk_step} was given.")
    points, chosen = flow.points[:, :, chunk_step, shown], flow.chosen[chunk_step, shown]
    space: Any = flow.policy.action_space
    low, high = space.low.ravel()[list(shown)], space.high.ravel()[list(shown)]
    of_chunk = "" if horizon == 1 else f" (step {chunk_step + 1} of a chunk of {horizon})"
    names = [f"action[{component}]{of_chunk}" for component in shown]
    left, right = map(plain, figure.subplots(1, 2))
    if len(shown) == 2:
        _flow_2d(left, flow.times, points, low, high)
        _actions_2d(right, flow, points[-1], chosen, low, high, background=components * horizon == 2)
        for axis in (left, right):
            axis.set(xlabel=names[0], ylabel=names[1])
    else:
        _flow_1d(left, flow.times, points[..., 0], names[0])
        _actions_1d(right, flow, points[-1, :, 0], chosen[0], names[0], (low[0], high[0]))
    if title:
        figure.suptitle(title)
    return finish(figure, path)


def _colours(name: str) -> Any:
    """Make a colour map without its brightest end, which is hard to see on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[name](np.linspace(0, 0.92, 256)))


def _legend_below(axis: Any, columns: int) -> None:
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)


def _box(axis: Any, low: np.ndarray, high: np.ndarray) -> None:
    from matplotlib.patches import Rectangle

    style: dict[str, Any] = {"fill": False, "edgecolor": GRAY, "linewidth": 1, "linestyle": "--", "zorder": 1}
    axis.add_patch(Rectangle((low[0], low[1]), *(high - low), **style))


def _flow_2d(axis: Any, times: np.ndarray, points: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    segments = np.stack([points[:-1], points[1:]], axis=2)  # (T - 1, n, 2, 2)
    middle = np.repeat((times[:-1] + times[1:]) / 2, points.shape[1])
    lines = LineCollection(list(segments.reshape(-1, 2, 2)), cmap=_colours(TIMES), array=middle, linewidths=0.8, alpha=0.7)
    lines.set_clim(0, 1)
    axis.add_collection(lines)
    axis.scatter(*points[0].T, s=12, facecolors="white", edgecolors=GRAY, linewidths=0.7, zorder=2, label="noise")
    axis.scatter(*points[-1].T, s=7, color="black", zorder=3, label="action")
    _box(axis, low, high)
    axis.autoscale_view()
    axis.set_title("from noise to action (bounds dashed)", fontsize=10)
    _legend_below(axis, 2)
    axis.figure.colorbar(lines, ax=axis, label="flow time (0: noise, 1: action)")


def _actions_2d(
    axis: Any, flow: Flow, actions: np.ndarray, chosen: np.ndarray, low: np.ndarray, high: np.ndarray, background: bool
) -> None:
    drawn, marks = None, {"s": 24, "edgecolors": "white", "linewidths": 0.6}
    if flow.values is not None:
        values = flow.values[:, -1].mean(axis=0)
        limits = {"vmin": float(values.min()), "vmax": float(values.max())}
        if background:
            field, side = flow.background()
            limits = {"vmin": float(field.min()), "vmax": float(field.max())}
            x, y = (bottom + (side + 1) / 2 * (top - bottom) for bottom, top in zip(low, high, strict=True))
            drawn = axis.pcolormesh(x, y, field, cmap=_colours(VALUES), shading="gouraud", **limits)
        scattered = axis.scatter(*actions.T, c=values, cmap=_colours(VALUES), **marks, **limits)
        axis.figure.colorbar(drawn or scattered, ax=axis, label=f"value (mean of {len(flow.values)} critics)")
    else:
        axis.scatter(*actions.T, color=COLOURS[0], **marks)
    axis.scatter(*chosen, marker="*", s=190, color=COLOURS[1], edgecolors="white", zorder=4, label="predicted action")
    _box(axis, low, high)
    margin = 0.05 * (high - low)
    axis.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    axis.set_title("actions", fontsize=10)
    _legend_below(axis, 1)


def _flow_1d(axis: Any, times: np.ndarray, points: np.ndarray, name: str) -> None:
    axis.plot(times, points, color=COLOURS[0], linewidth=0.7, alpha=0.4)
    axis.set(xlabel="flow time (0: noise, 1: action)", ylabel=name)
    axis.set_title("from noise to action", fontsize=10)


def _actions_1d(axis: Any, flow: Flow, actions: np.ndarray, chosen: float, name: str, bounds: tuple[float, float]) -> None:
    if flow.values is None:
        axis.hist(actions, bins=30, range=bounds, color=COLOURS[0])
        axis.set_ylabel("samples")
    else:
        axis.scatter(actions, flow.values[:, -1].mean(axis=0), s=18, color=COLOURS[0], alpha=0.6, label="sample")
        axis.set_ylabel(f"value (mean of {len(flow.values)} critics)")
    axis.axvline(chosen, color=COLOURS[1], label="predicted action")
    margin = 0.05 * (bounds[1] - bounds[0])
    axis.set(xlabel=name, xlim=(bounds[0] - margin, bounds[1] + margin))
    axis.set_title("actions", fontsize=10)
    _legend_below(axis, 2)


def flow_values(
    model: Any,
    observation: Observation,
    n_samples: int = 64,
    seed: int = 0,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Draw values over denoising time, along the way from noise to action for an observation: for RQL V(s, x_t, t) of the partial
    action, for FMQ Q of the action that a jump from x_t leads to, for FQL, DSRL and QAM of the action that the velocity at x_t
    heads for. DSRL's lines begin at the noise that its actor decides; RLPD has no flow, but a single step from z to its
    action. Refining earns no reward and is deterministic, so with a consistent value function (FMQ: flow map; FQL, DSRL and
    QAM: straight flow) every line is level; their spread shows how much choosing the noise can gain.

    :param model: RQL, FMQ, FQL, RLPD, DSRL, QAM, or a policy of theirs
    :param observation: a single observation, as ``predict`` takes it (normalised, if the model's environment is)
    :param n_samples: number of starting points
    :param seed: of the starting points
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises ValueError: if the policy has no critic, or one that is not trained
    """
    figure = new_figure(6.5, 4)
    from matplotlib.collections import LineCollection

    flow = Flow(model, observation, n_samples, seed)
    if flow.values is None:
        raise ValueError(f"`model` has no values to draw: {flow.policy.no_values}.")
    axis = plain(figure.add_subplot())
    means = flow.values.mean(axis=0)  # (T, n)
    lines = [np.column_stack([flow.times, means[:, i]]) for i in range(means.shape[1])]
    drawn = LineCollection(lines, cmap=_colours(VALUES), array=means[-1], linewidths=0.9, alpha=0.7)
    axis.add_collection(drawn)
    centre, disagreement = means.mean(axis=1), flow.values.std(axis=0).mean(axis=1)
    if len(flow.values) > 1:
        band, label = (centre - disagreement, centre + disagreement), f"std of the {len(flow.values)} critics"
        axis.fill_between(flow.times, *band, color=COLOURS[1], alpha=0.15, linewidth=0, label=label)
    axis.plot(flow.times, centre, color=COLOURS[1], linewidth=2, label=f"mean of {means.shape[1]} samples")
    axis.autoscale_view()
    axis.set(xlabel="flow time (0: noise, 1: action)", ylabel="value (mean of the critics)", xlim=(0, 1))
    _legend_below(axis, 2)
    figure.colorbar(drawn, ax=axis, label="value of the action")
    if title:
        axis.set_title(title)
    return finish(figure, path)
