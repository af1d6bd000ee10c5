"""Statistics of ``VecNormalize`` from a dataset, as if the wrapper had seen its trajectories."""

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.data.columns import Parts, entries, nest, row_slices


def fit_vec_normalize(vec_normalize: VecNormalize, parts: Parts, source: str) -> None:
    """
    Replace the statistics that the wrapper uses, of observations and of returns.

    :param vec_normalize: the wrapper, changed in place
    :param parts: of the dataset
    :param source: names the data in messages
    :raises ValueError: if the dataset's observations have other keys or shapes
    """
    if vec_normalize.norm_obs:
        arrays = entries(parts.observations)
        fitted = {}
        for key, old in entries(vec_normalize.obs_rms).items():
            if key not in arrays or arrays[key].shape[1:] != old.mean.shape:
                shapes = {name: array.shape[1:] for name, array in arrays.items()}
                raise ValueError(f"VecNormalize expects observations {key} of shape {old.mean.shape}, {source} has {shapes}")
            fitted[key] = RunningMeanStd(epsilon=0.0, shape=old.mean.shape)
            for rows in row_slices(arrays[key]):
                fitted[key].update(arrays[key][rows].astype(np.float64))
        vec_normalize.obs_rms = nest(fitted)
    if vec_normalize.norm_reward:
        ret_rms = RunningMeanStd(epsilon=0.0)
        discounted, start = 0.0, True
        for rows in row_slices(parts.rewards):
            returns = []
            for reward, end in zip(parts.rewards[rows].tolist(), parts.trajectory_ends[rows].tolist(), strict=True):
                discounted = reward + (0.0 if start else vec_normalize.gamma * discounted)
                start = end
                returns.append(discounted)
            ret_rms.update(np.array(returns))
        vec_normalize.ret_rms = ret_rms
