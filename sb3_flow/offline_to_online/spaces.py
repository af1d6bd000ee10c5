"""Observation spaces of datasets as SB3's models see them: channel-first images, inferred bounds."""

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecTransposeImage

from sb3_flow.common.observations import map_arrays
from sb3_flow.data import OfflineDataset


def _is_channels_last(space: spaces.Space[Any]) -> bool:
    return is_image_space(space) and not is_image_space_channels_first(space)  # type: ignore[arg-type]


def channels_first_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Turn images of a space channel-first, as SB3's models see them."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: channels_first_space(subspace) for key, subspace in space.spaces.items()})
    return VecTransposeImage.transpose_space(space) if _is_channels_last(space) else space  # type: ignore[arg-type]


def same_but_for_bounds(inferred: spaces.Space[Any], other: spaces.Space[Any]) -> bool:
    """Say whether a space without bounds, as inferred from data, describes the same observations as another space."""
    if isinstance(inferred, spaces.Dict) and isinstance(other, spaces.Dict):
        return set(inferred) == set(other) and all(same_but_for_bounds(inferred[key], other[key]) for key in inferred)
    if not (isinstance(inferred, spaces.Box) and isinstance(other, spaces.Box)):
        return inferred == other
    unbounded = not (inferred.bounded_below.any() or inferred.bounded_above.any())
    return inferred == other or (unbounded and inferred.shape == other.shape and other.dtype.kind == "f")


def channels_first(dataset: OfflineDataset, observation_space: spaces.Space[Any]) -> OfflineDataset:
    """
    Turn images of a dataset channel-first if the model's images are channel-first.

    :param dataset: dataset with images in either layout
    :param observation_space: the model's
    :return: the dataset itself, or a dataset with channel-first images that shares all memory
    """

    def view(array: Any, own: spaces.Space[Any], model: spaces.Space[Any]) -> Any:
        if own.shape == model.shape or not _is_channels_last(own):
            return array
        return np.moveaxis(array, -1, 1)

    own = dataset.observation_space
    if own == observation_space or channels_first_space(own) == own:
        return dataset
    if isinstance(own, spaces.Dict) and set(own) != set(getattr(observation_space, "spaces", {})):
        return dataset  # check_spaces will refuse it

    def change(part: OfflineDataset) -> OfflineDataset:
        return part.replace(
            observations=map_arrays(view, part.observations, own, observation_space),
            final_observations=map_arrays(view, part.final_observations, own, observation_space),
            observation_space=channels_first_space(own),
        )

    return dataset.changed_by(change)
