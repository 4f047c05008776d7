"""Sampling: the groups of a step and their weights, the order of prompts, and the curriculum.

Pure functions of a seed, a step, and the queue: a store applies the result of `evict` and claims that of `sample`.

Random selection is an exponential race: candidate i gets the key e_i / p_i with exponential e_i, and the smallest keys
win. This samples without replacement, in proportion to p.

Source: Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006.

The curriculum skips prompts with a success rate, measured by the store, outside a band (`prelude.lua`, `lease.lua`).
"""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import xxhash

from slipstream.configs.base import Record
from slipstream.configs.buffer import (
    FifoConfig,
    FreshestConfig,
    PrioritizedConfig,
    ReuseConfig,
    SamplerConfig,
    StalenessConfig,
    UniformConfig,
)
from slipstream.configs.data import CurriculumConfig

# Random streams, one per kind of draw.
_PROMPT_STREAM = 0
_FRESH_STREAM = 1
_REUSE_STREAM = 2
_SMALLEST_PRIORITY_LOG2 = -8


# --- prompt order ----------------------------------------------------------------------------------------------------
class FileShare(Record):
    """One of several prompt files. Example: FileShare(num_rows=7473, weight=0.3)."""

    num_rows: int
    weight: float


RowCount = int | list[FileShare]
"""Rows of one file, or of each file; row numbers continue from file to file."""


def row_of(ordinal: int, *, num_rows: RowCount, seed: int) -> int:
    """Dataset row of prompt `ordinal`, from 0.

    Each file has separate epochs, seeded permutations of its rows. Every range of prompts holds each file's share, to
    within one prompt.
    """
    files = [FileShare(num_rows, 1.0)] if isinstance(num_rows, int) else num_rows
    if ordinal < 0 or not files or min(file.num_rows for file in files) < 1:
        raise ValueError(f"ordinal must be >= 0 and num_rows >= 1, got {ordinal} and {num_rows}.")
    number, index = _file_of(ordinal, tuple(file.weight for file in files))
    epoch, position = divmod(index, files[number].num_rows)
    row = int(_permutation(epoch, files[number].num_rows, seed, number)[position])
    return row + sum(file.num_rows for file in files[:number])


def _file_of(ordinal: int, weights: tuple[float, ...]) -> tuple[int, int]:
    """Prompt's file, and the number of earlier prompts from it.

    Files are spread evenly: the first takes prompt n where round(n * share) steps up, the second does the same among
    the rest, and so on. Random draws would vary the mixture, and finding a row would require counting from the start.
    """
    for number, (above, below) in enumerate(_shares_of_rest(weights)):
        before = (2 * ordinal * above + below) // (2 * below)
        if (2 * (ordinal + 1) * above + below) // (2 * below) > before:
            return number, before
        ordinal -= before
    return len(weights) - 1, ordinal


@lru_cache(maxsize=4)
def _shares_of_rest(weights: tuple[float, ...]) -> list[tuple[int, int]]:
    """Exact share of each file but the last among itself and the files after it, as (numerator, denominator)."""
    exact = [Fraction(repr(weight)) for weight in weights]
    rests = [sum(exact[number:]) for number in range(len(exact))]
    return [(weight / rest).as_integer_ratio() for weight, rest in zip(exact[:-1], rests, strict=False)]


@lru_cache(maxsize=16)
def _permutation(epoch: int, num_rows: int, seed: int, file: int = 0) -> np.ndarray:
    # Not `Generator.permutation`: only bit generators are stable across numpy versions, as a resumed run needs.
    stream = [seed, epoch, _PROMPT_STREAM, *([file] if file else [])]
    return np.argsort(np.random.PCG64(stream).random_raw(num_rows), kind="stable")


# --- records ---------------------------------------------------------------------------------------------------------
class SamplingRules(Record):
    """Settings that decide which groups a step claims.

    Example: SamplingRules(sampler=FreshestConfig(), staleness=StalenessConfig(on_stale="drop"))
    """

    sampler: SamplerConfig = FifoConfig()
    reuse: ReuseConfig = ReuseConfig()
    staleness: StalenessConfig = StalenessConfig()

    @property
    def only_oldest(self) -> bool:
        """Whether steps claim the oldest groups, so that the queue need not be read."""
        return (
            isinstance(self.sampler, FifoConfig)
            and self.reuse.max_uses == 1
            and self.reuse.samples_per_insert is None
            and self.staleness.on_stale == "mask"
        )


class Candidate(Record):
    """Properties of a group for selection.

    Example: Candidate(id="380", sequence=371, oldest_version=11, answered=8, reward_sum=4.2, reward_squares=3.1)
    """

    id: str
    sequence: int
    """Order in which groups became ready."""
    oldest_version: int
    answered: int
    """Members with a reward."""
    reward_sum: float
    reward_squares: float
    """Sum of squared rewards over answered members."""


class Queue(Record):
    """The groups that a step may claim, read atomically."""

    ready: list[Candidate]
    """Complete and never trained on, oldest first."""
    reusable: list[Candidate]
    """Trained on and available again, oldest first."""
    num_arrived: int
    """Groups that ever became ready."""
    num_uses: int
    """Uses in committed steps."""


class Evictions(Record):
    """Groups that leave the queue before sampling. Example: Evictions(expired=["17"])."""

    expired: list[str] = []
    """Ready groups beyond `max_lag`, if `on_stale=drop`."""
    released: list[str] = []
    """Reusable groups that are too old or too many."""


class Sample(Record):
    """Groups for one step. Example: Sample(group_ids=["380", "12"], weights=[1.0, 1.0], reused=[False, True])."""

    group_ids: list[str]
    """In sampling order, fresh ones first."""
    weights: list[float]
    reused: list[bool]


class NotReady(Record):
    """Refusal of a claim. Example: NotReady(reason="3 of 32 groups are ready", ready_needed=32)."""

    reason: str
    ready_needed: int
    """Ready groups at which a retry may succeed."""


# --- selection -------------------------------------------------------------------------------------------------------
def evict(queue: Queue, rules: SamplingRules, *, version: int) -> Evictions:
    """Groups that are too old for a learner at `version`, or too many."""
    reuse, max_lag = rules.reuse, rules.staleness.max_lag
    stale = [candidate.id for candidate in queue.ready if version - candidate.oldest_version > max_lag]
    surplus, max_age = len(queue.reusable) - reuse.max_groups, math.inf if reuse.max_age is None else reuse.max_age
    places = enumerate(queue.reusable)
    released = [each.id for place, each in places if place < surplus or version - each.oldest_version > max_age]
    return Evictions(expired=stale if rules.staleness.on_stale == "drop" else [], released=released)


def sample(queue: Queue, rules: SamplingRules, *, num_groups: int, seed: int, step: int) -> Sample | NotReady:
    """Select groups for `step`, or return why it cannot yet. Apply evictions to `queue` first."""
    # Each arrival raises the limit, so retry at one more ready group.
    limit = rules.reuse.samples_per_insert
    if limit is not None and queue.num_uses + num_groups > limit * queue.num_arrived:
        allowed = f"samples_per_insert ({limit:g}) x {queue.num_arrived} groups that arrived"
        reason = f"{queue.num_uses} + {num_groups} uses are more than {allowed}"
        return NotReady(reason, ready_needed=len(queue.ready) + 1)
    # By `fresh_fraction`; one kind makes up for the other.
    num_wanted = min(len(queue.ready), math.ceil(rules.reuse.fresh_fraction * num_groups))
    num_reused = min(len(queue.reusable), num_groups - num_wanted)
    num_fresh = min(len(queue.ready), num_groups - num_reused)
    if (lacking := num_groups - num_fresh - num_reused) > 0:
        reusable = f", {len(queue.reusable)} may be used again" if queue.reusable else ""
        reason = f"{len(queue.ready)} of {num_groups} groups are ready{reusable}"
        return NotReady(reason, ready_needed=len(queue.ready) + lacking)
    fresh, fresh_weights = sample_fresh(queue.ready, rules.sampler, num_groups=num_fresh, seed=seed, step=step)
    # Random: by priority if configured, else uniform.
    seeds = (seed, step, _REUSE_STREAM)
    reused, reused_weights = _race(queue.reusable, rules.sampler, num_groups=num_reused, seeds=seeds)
    return Sample([*fresh, *reused], [*fresh_weights, *reused_weights], [False] * len(fresh) + [True] * len(reused))


def sample_oldest(oldest: list[str], *, num_groups: int, num_ready: int) -> Sample | NotReady:
    """Select all of `oldest`, the first ready groups (`only_oldest`)."""
    if len(oldest) < num_groups:
        return NotReady(f"{num_ready} of {num_groups} groups are ready", ready_needed=num_groups)
    return Sample(oldest, weights=[1.0] * num_groups, reused=[False] * num_groups)


# --- samplers --------------------------------------------------------------------------------------------------------
def sample_fresh(
    candidates: list[Candidate], sampler: SamplerConfig, *, num_groups: int, seed: int, step: int
) -> tuple[list[str], list[float]]:
    """(group ids, loss weights) of at most `num_groups` candidates, in order."""
    if isinstance(sampler, PrioritizedConfig):
        return _race(candidates, sampler, num_groups=num_groups, seeds=(seed, step, _FRESH_STREAM))
    if isinstance(sampler, UniformConfig):
        draws = _raw(len(candidates), (seed, step, _FRESH_STREAM))
        ordered = [candidates[index] for index in np.argsort(draws, kind="stable")]
    elif isinstance(sampler, FreshestConfig):
        ordered = sorted(candidates, key=lambda c: (-c.oldest_version, c.sequence))
    else:
        ordered = sorted(candidates, key=lambda c: c.sequence)
    group_ids = [candidate.id for candidate in ordered[:num_groups]]
    return group_ids, [1.0] * len(group_ids)


def priority(candidate: Candidate) -> float:
    """Standard deviation of the rewards, rounded to a power of two of at least 1/256."""
    if candidate.answered == 0:
        return 2.0**_SMALLEST_PRIORITY_LOG2
    mean = candidate.reward_sum / candidate.answered
    deviation = math.sqrt(max(0.0, candidate.reward_squares / candidate.answered - mean**2))
    log2 = round(math.log2(deviation)) if deviation > 0 else _SMALLEST_PRIORITY_LOG2
    return 2.0 ** max(_SMALLEST_PRIORITY_LOG2, log2)


def inclusion_probabilities(rates: np.ndarray, *, threshold: float) -> np.ndarray:
    """Selection probabilities given the smallest losing key, float64, shape of `rates`.

    Dividing by these makes sums over selected candidates unbiased estimates of sums over all.
    Source: Cohen & Kaplan, Summarizing data using bottom-k sketches, 2007 (rank conditioning).
    """
    return -np.expm1(-rates * threshold)


def _race(
    candidates: list[Candidate], sampler: SamplerConfig, *, num_groups: int, seeds: tuple[int, int, int]
) -> tuple[list[str], list[float]]:
    """Sample in proportion to priority; the weights make the gradient unbiased."""
    exponent = sampler.exponent if isinstance(sampler, PrioritizedConfig) else 0.0
    rates = np.array([priority(candidate) ** exponent for candidate in candidates])
    # The +1 avoids log(0).
    keys = -np.log((_raw(len(candidates), seeds).astype(np.float64) + 1.0) / 2.0**64) / rates
    selected = np.argsort(keys, kind="stable")[:num_groups]
    group_ids = [candidates[index].id for index in selected]
    if not isinstance(sampler, PrioritizedConfig):
        return group_ids, [1.0] * len(group_ids)
    # Given the smallest losing key, inclusions are independent with known probabilities.
    threshold = float(np.partition(keys, num_groups)[num_groups]) if num_groups < len(keys) else math.inf
    included = inclusion_probabilities(rates[selected], threshold=threshold)
    return group_ids, (len(selected) / (len(candidates) * included)).tolist()


def _raw(count: int, seeds: tuple[int, int, int]) -> np.ndarray:
    return np.random.PCG64(list(seeds)).random_raw(count)


# --- curriculum -------------------------------------------------------------------------------------------------------
_SKIPS_PER_PROMPT = 16
"""Maximum prompts skipped per leased prompt."""


class Upcoming(Record):
    """Next prompts for a lease to choose from; if empty, none is skipped or measured.

    Example: Upcoming(first=17, explored=[False, False, True])
    """

    first: int = 0
    explored: list[bool] = []
    """Per prompt: generate it even outside the band."""

    def rows(self, *, num_rows: RowCount, seed: int) -> list[int]:
        return [row_of(self.first + place, num_rows=num_rows, seed=seed) for place in range(len(self.explored))]


NOTHING_SKIPPED = Upcoming()


def look_ahead(first: int, num_new: int, *, curriculum: CurriculumConfig, seed: int, may_skip: bool) -> Upcoming:
    """Enough prompts for `num_new` leases, all explored without `may_skip`."""
    num_skips = _SKIPS_PER_PROMPT * num_new if may_skip else 0
    # A hash, so that repeated leases and other brokers decide the same.
    draws = [xxhash.xxh3_64_intdigest(f"explore:{seed}:{first + place}".encode()) for place in range(num_skips)]
    # The last are always explored, so that a lease hands out all that pacing admits.
    return Upcoming(first, [draw < curriculum.explore * 2**64 for draw in draws] + [True] * num_new)
