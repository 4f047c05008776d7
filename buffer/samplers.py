"""In which order groups are drawn, and with which weights: pure functions of a seed, a step and the candidates.

Random draws are races: candidate i gets the key e_i / chance_i with e_i exponential, and the smallest keys win, which
draws without repetition in proportion to the chances.

Source: Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006.
"""

import math
from functools import lru_cache

import numpy as np

from slipstream.buffer.trajectory import Record
from slipstream.configs.drawing import FreshestConfig, PrioritizedConfig, SamplerConfig, UniformConfig

# @@ The endless sequence of prompts: one seeded permutation of the rows per epoch.
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


FRESH = 1
"""Stream of the draws among fresh groups; apart from the prompt permutation's, which starts from the same seed."""
REUSED = 2
"""Stream of the draws among groups to be used again."""
_SMALLEST_PRIORITY_LOG2 = -8


class Candidate(Record):
    """A group that a step may draw, as far as a draw depends on it.

    Example: Candidate(id="380", sequence=371, oldest_version=11, answered=8, reward_sum=4.2, reward_squares=3.1)
    """

    id: str
    """The group."""
    sequence: int
    """Grows with every group that becomes ready."""
    oldest_version: int
    """Smallest version of a token that the model wrote."""
    answered: int
    """Members whose reward function answered."""
    reward_sum: float
    """Over those."""
    reward_squares: float
    """Sum of squares over those."""


class Drawn(Record):
    """Candidates in the order drawn. Example: Drawn(group_ids=["380", "377"], weights=[1.0, 0.7])."""

    group_ids: list[str]
    """Which."""
    weights: list[float]
    """What each one's loss is multiplied by."""


def draw_fresh(
    candidates: list[Candidate],
    sampler: SamplerConfig,
    *,
    num_groups: int,
    seed: int,
    step: int,
) -> Drawn:
    """`num_groups` of the candidates, at most all of them."""
    seeds = (seed, step, FRESH)
    if isinstance(sampler, UniformConfig):
        order = np.argsort(_raw(len(candidates), seeds), kind="stable")[:num_groups]
        return _unweighted([candidates[place] for place in order])
    if isinstance(sampler, PrioritizedConfig):
        return _race(candidates, sampler, num_groups=num_groups, seeds=seeds)
    if isinstance(sampler, FreshestConfig):
        return _unweighted(sorted(candidates, key=lambda c: (-c.oldest_version, c.sequence))[:num_groups])
    return _unweighted(sorted(candidates, key=lambda c: c.sequence)[:num_groups])


def draw_reused(
    candidates: list[Candidate],
    sampler: SamplerConfig,
    *,
    num_groups: int,
    seed: int,
    step: int,
) -> Drawn:
    """`num_groups` of the candidates at random; by priority with that sampler."""
    return _race(candidates, sampler, num_groups=num_groups, seeds=(seed, step, REUSED))


def priority(candidate: Candidate) -> float:
    """Standard deviation of the group's rewards, rounded to a power of two; 1/256 when they are all equal."""
    if candidate.answered == 0:
        return 2.0**_SMALLEST_PRIORITY_LOG2
    mean = candidate.reward_sum / candidate.answered
    deviation = math.sqrt(max(0.0, candidate.reward_squares / candidate.answered - mean**2))
    log2 = round(math.log2(deviation)) if deviation > 0 else _SMALLEST_PRIORITY_LOG2
    return 2.0 ** max(_SMALLEST_PRIORITY_LOG2, log2)


def inclusion_probabilities(chances: np.ndarray, *, threshold: float) -> np.ndarray:
    """Probability that a candidate wins a place, given the smallest key that won none: float64, shape of `chances`.

    Sums over the drawn divided by these are unbiased for sums over all.
    Source: Cohen & Kaplan, Summarizing data using bottom-k sketches, 2007 (rank conditioning).
    """
    return -np.expm1(-chances * threshold)


def _race(
    candidates: list[Candidate],
    sampler: SamplerConfig,
    *,
    num_groups: int,
    seeds: tuple[int, int, int],
) -> Drawn:
    """Draw in proportion to the priorities; weights make it, on average, a uniform draw."""
    exponent = sampler.exponent if isinstance(sampler, PrioritizedConfig) else 0.0
    chances = np.array([priority(candidate) ** exponent for candidate in candidates])
    keys = -np.log((_raw(len(candidates), seeds).astype(np.float64) + 1.0) / 2.0**64) / chances
    drawn = np.argsort(keys, kind="stable")[:num_groups]
    group_ids = [candidates[place].id for place in drawn]
    if not isinstance(sampler, PrioritizedConfig):
        return Drawn(group_ids, [1.0] * len(group_ids))
    won = inclusion_probabilities(chances, threshold=_threshold(keys, num_groups))
    weights = (len(drawn) / (len(candidates) * won[drawn])) ** sampler.correction
    return Drawn(group_ids, weights.tolist())


def _threshold(keys: np.ndarray, num_groups: int) -> float:
    """The smallest key that won no place; infinite when all won one."""
    return float(np.partition(keys, num_groups)[num_groups]) if num_groups < len(keys) else math.inf


def _raw(count: int, seeds: tuple[int, int, int]) -> np.ndarray:
    return np.random.PCG64(list(seeds)).random_raw(count)


def _unweighted(candidates: list[Candidate]) -> Drawn:
    return Drawn([candidate.id for candidate in candidates], [1.0] * len(candidates))
