"""Which ready groups a step claims: pure functions from (seed, step, number ready) to ranks.

A rank is a place in the order in which groups became ready, 0 = oldest. Ranks, not ids, because the same draw then
holds for Redis and for its in-memory twin, and because groups that become ready later do not move earlier ranks.
"""

import numpy as np

from configs.buffer import FifoConfig, UniformConfig

_STREAM = 1
"""Keeps these draws apart from the prompt permutation's, which starts from the same seed."""


def fifo(*, num_groups: int) -> list[int]:
    """The oldest, oldest first."""
    return list(range(num_groups))


def uniform(*, num_ready: int, num_groups: int, seed: int, step: int) -> list[int]:
    """Every ready group with the same chance, without repetition, in the order drawn."""
    draws = np.random.PCG64([seed, step, _STREAM]).random_raw(num_ready)
    return np.argsort(draws, kind="stable")[:num_groups].tolist()


def draw_ranks(
    sampler: FifoConfig | UniformConfig, *, num_ready: int, num_groups: int, seed: int, step: int
) -> list[int]:
    """Ranks of the `num_groups` groups to claim; `num_ready` must be at least that many."""
    if num_groups > num_ready:
        raise ValueError(f"num_groups must be <= num_ready ({num_ready}), got {num_groups}.")
    if isinstance(sampler, UniformConfig):
        return uniform(num_ready=num_ready, num_groups=num_groups, seed=seed, step=step)
    return fifo(num_groups=num_groups)
