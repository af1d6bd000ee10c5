"""
Pictures: learning curves of runs, flows from noise to action, values along the way, importance ratios, and a callback that
draws during training.

Each function returns a Matplotlib ``Figure`` (``figure.savefig("file.png")``; notebooks show it). Matplotlib comes with the
extra ``plots`` and is imported when a picture is drawn.
"""

from sb3_flow.plotting.callback import FlowVisualisationCallback
from sb3_flow.plotting.curves import learning_curves
from sb3_flow.plotting.flows import action_flow, flow_values
from sb3_flow.plotting.ratio_histogram import importance_ratios

__all__ = ["FlowVisualisationCallback", "action_flow", "flow_values", "importance_ratios", "learning_curves"]
