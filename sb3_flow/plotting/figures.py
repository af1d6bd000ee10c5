"""Pieces that all pictures share: an empty figure, colours, saving. Matplotlib comes with the extra ``plots``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; line styles differ as well."""
STYLES = ("-", "--", "-.", ":")
GRAY = "0.45"


def new_figure(width: float, height: float) -> "Figure":
    """
    Make an empty figure, which no window or backend knows of.

    :param width: in inches
    :param height: in inches
    :raises ImportError: without matplotlib
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'sb3-flow[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: "Figure", path: str | Path | None) -> "Figure":
    """Save a figure if there is a path, and return the figure."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def plain(axis: Any) -> Any:
    """Give an axis a frame on two sides only and a light grid, and return the axis."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    return axis
