"""Random flow times."""

import torch as th


def sample_depths(batch_size: int, steps: int, generator: th.Generator | None, device: th.device) -> th.Tensor:
    """
    Depths at which RQL trains its value function: half of the batch continuous, U[0, 1), the other half uniform on the
    grid {0, 1/F, ..., 1}, so that complete actions (depth 0) and pure noise (depth 1) are visited exactly.

    :param batch_size: B; of an odd batch the larger half is continuous
    :param steps: number of flow steps F
    :param generator: generator on ``device``
    :param device: where the result lives
    :return: depths, shape ``(B, 1)``
    """
    n_grid = batch_size // 2
    continuous = th.rand(batch_size - n_grid, 1, generator=generator, device=device)
    grid = th.randint(steps + 1, (n_grid, 1), generator=generator, device=device) / steps
    return th.cat([continuous, grid])
