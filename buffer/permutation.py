"""The endless sequence of prompts: one seeded permutation of the rows per epoch."""

from functools import lru_cache

import numpy as np

_STREAM = 0
"""Keeps these draws apart from the samplers', which start from the same seed."""


def row_of(ordinal: int, *, num_rows: int, seed: int) -> int:
    """Row of the dataset at place `ordinal` (0, 1, ...): every row exactly once in each stretch of `num_rows`."""
    if ordinal < 0 or num_rows < 1:
        raise ValueError(f"ordinal must be >= 0 and num_rows >= 1, got {ordinal} and {num_rows}.")
    epoch, place = divmod(ordinal, num_rows)
    return int(_permutation(epoch, num_rows, seed)[place])


@lru_cache(maxsize=4)
def _permutation(epoch: int, num_rows: int, seed: int) -> np.ndarray:
    # Sorting raw draws instead of `Generator.permutation`: numpy promises that a bit generator's stream never
    # changes, and a run resumed under a newer numpy must see the same sequence.
    return np.argsort(np.random.PCG64([seed, epoch, _STREAM]).random_raw(num_rows), kind="stable")
