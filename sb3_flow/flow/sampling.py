"""Random flow times."""

import torch as th


def sample_depths(batch_size: int, steps: int, generator: th.Generator | None, device: th.device) -> th.Tensor:
    """
    Draw the depths at which RQL trains its value function: every other sample is continuous, U[0, 1), the samples between are
    uniform on the grid {0, 1/F, ..., 1}, so that complete actions (depth 0) and pure noise (depth 1) are visited exactly. They
    alternate, because the first part of a batch may be offline and the rest online rows.

    :param batch_size: B
    :param steps: number of flow steps F
    :param generator: generator on ``device``
    :param device: device of the result
    :return: depths, shape ``(B, 1)``
    """
    continuous = th.rand(batch_size, 1, generator=generator, device=device)
    grid = th.randint(steps + 1, (batch_size, 1), generator=generator, device=device) / steps
    alternate = th.arange(batch_size, device=device).unsqueeze(1) % 2 == 0
    return th.where(alternate, continuous, grid)
