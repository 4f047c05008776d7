"""Token statistics: what is counted of every token and trajectory, by lag, and the numbers that follow from the counts.

Counts add up over microbatches, updates and ranks; a ratio is formed once, from the sums. A token is counted at its own
lag, a trajectory at that of its oldest token.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.learner.algorithms import importance, segments
from slipstream.learner.ranks import Ranks

LAG_BUCKETS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8-15": 8, "16+": 16}
"""Name -> smallest lag, versions. What bucket 0 shows is the engines' difference alone."""
_LOWEST_EDGE, _EDGE_GROWTH, _NUM_BINS = 1e-6, 1.12, 150
"""Bin i of the histogram ends at _LOWEST_EDGE * _EDGE_GROWTH^i nats; the last ends beyond what a clamp lets through."""
_LOG_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a loss saw of N tokens of whole trajectories, without gradient."""

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_proximal)."""
    learner_logprobs: Float[Tensor, "N"]
    """At the start of the step where they are known, else as the loss is formed."""
    generator_logprobs: Float[Tensor, "N"]
    """What they were sampled with."""
    weights: Float[Tensor, "N"]
    """The correction's."""
    is_bounded: Bool[Tensor, "N"]
    """Whether a bound of the correction changed the weight."""
    is_kept: Bool[Tensor, "N"]
    """Whether they are in the loss."""
    is_idle: Bool[Tensor, "N"]
    """Whether the policy loss took their gradient away."""
    entropies: Float[Tensor, "N"]
    """Nats."""
    reference_kl: Float[Tensor, "N"]
    """Nats."""
    lags: Int[Tensor, "N"]
    """Versions, not below 0."""
    sequences: Int[Tensor, "N"]
    """Which trajectory each belongs to, from 0 on; each of them has a token."""
    num_sequences: int
    """Trajectories."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted, each a table with a column per bucket of lags."""

    tokens: Float[Tensor, "K L"]
    """Sums over tokens, rows as in TOKEN_SUMS."""
    trajectories: Float[Tensor, "K L"]
    """Sums over trajectories, rows as in TRAJECTORY_SUMS."""
    histogram: Float[Tensor, "E L"]
    """Tokens by |log(pi_learner / pi_generator)|, a row per bin."""
    maxima: Float[Tensor, "M L"]
    """Largest over tokens, rows as in MAXIMA; -inf of none."""

    def merge(self, other: "Counts") -> "Counts":
        """Of both together, on the device of the other."""
        mine = self._map(lambda table: table.to(other.tokens.device))
        return Counts(
            mine.tokens + other.tokens,
            mine.trajectories + other.trajectories,
            mine.histogram + other.histogram,
            torch.maximum(mine.maxima, other.maxima),
        )

    def over(self, ranks: Ranks) -> "Counts":
        """Of all ranks together; collective."""
        return Counts(
            ranks.sum(self.tokens), ranks.sum(self.trajectories), ranks.sum(self.histogram), ranks.max(self.maxima)
        )

    def bucket(self, index: int) -> "Counts":
        """Of one bucket of lags alone."""
        return self._map(lambda table: table[:, index : index + 1])

    def to_cpu(self) -> "Counts":
        """The same, read from the device."""
        return self._map(Tensor.cpu)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Counts":
        return Counts(change(self.tokens), change(self.trajectories), change(self.histogram), change(self.maxima))


TOKEN_SUMS = (
    "count", "ratio", "ratio_tail", "idle", "kept", "weight", "weight_squared", "bounded", "k1", "k3", "distance",
    "tail", "drift", "drift_squared", "probability_gap", "nonfinite", "entropy", "reference_kl",
)  # fmt: skip
TRAJECTORY_SUMS = ("count", "drift", "drift_squared", "perplexity_ratio", "kept", "idle")
MAXIMA = ("ratio", "weight", "negative_weight", "distance", "probability_gap")


def lag_buckets(lags: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Which of LAG_BUCKETS each lag falls into."""
    starts = torch.tensor(list(LAG_BUCKETS.values()), device=lags.device)
    return torch.bucketize(lags, starts, right=True) - 1


def no_counts() -> Counts:
    """Of no token."""
    sizes = (len(TOKEN_SUMS), len(TRAJECTORY_SUMS), _NUM_BINS, len(MAXIMA))
    tokens, trajectories, histogram, maxima = (
        torch.zeros(size, len(LAG_BUCKETS), dtype=torch.float64) for size in sizes
    )
    return Counts(tokens, trajectories, histogram, maxima - math.inf)


def count_tokens(facts: TokenStats) -> Counts:
    """Of one microbatch, possibly of no token."""
    # Double: exp(x) - 1 - x of a numerical difference would be all rounding in float32.
    mismatch = importance.token_log_ratio(facts.learner_logprobs.double(), facts.generator_logprobs.double())
    gap = _probability_gap(facts)
    buckets = lag_buckets(facts.lags)
    return Counts(
        tokens=_sum_by(buckets, _token_columns(facts, mismatch=mismatch, gap=gap)),
        trajectories=_sum_by(_oldest_buckets(facts), _trajectory_columns(facts, mismatch=mismatch)),
        histogram=_histogram(mismatch.abs(), buckets),
        maxima=_maxima_by(
            buckets, [facts.log_ratio.double().exp(), facts.weights, -facts.weights, mismatch.abs(), gap]
        ),
    )


def _token_columns(facts: TokenStats, *, mismatch: Tensor, gap: Tensor) -> list[Tensor]:
    """In the order of TOKEN_SUMS."""
    log_ratio, weights, drift = facts.log_ratio.double(), facts.weights.double(), mismatch.exp()
    return [
        torch.ones_like(mismatch),
        log_ratio.exp(),
        log_ratio.abs() > _LOG_2,
        facts.is_idle,
        facts.is_kept,
        weights,
        weights.square(),
        facts.is_bounded,
        -mismatch,
        mismatch.expm1() - mismatch,
        mismatch.abs(),
        mismatch.abs() > _LOG_2,
        drift,
        drift.square(),
        gap,
        importance.nonfinite(facts.learner_logprobs, facts.generator_logprobs),
        facts.entropies,
        facts.reference_kl,
    ]


def _trajectory_columns(facts: TokenStats, *, mismatch: Tensor) -> list[Tensor]:
    """In the order of TRAJECTORY_SUMS."""

    def totals(values: Tensor) -> Tensor:
        return segments.sums(values.double(), facts.sequences, num_segments=facts.num_sequences)

    lengths, total = totals(torch.ones_like(mismatch)), totals(mismatch)
    drift = importance.bounded(total).exp()
    return [
        torch.ones_like(lengths),
        drift,
        drift.square(),
        (-total / lengths).exp(),
        totals(facts.is_kept) > 0,
        totals(facts.is_idle) == lengths,
    ]


def _oldest_buckets(facts: TokenStats) -> Tensor:
    return lag_buckets(segments.maxima(facts.lags, facts.sequences, num_segments=facts.num_sequences))


def _probability_gap(facts: TokenStats) -> Tensor:
    """|pi_learner - pi_generator|; 0 where one of them is not known."""
    learner, generator = (x.double().clamp(max=0.0).exp() for x in (facts.learner_logprobs, facts.generator_logprobs))
    unknown = importance.nonfinite(facts.learner_logprobs, facts.generator_logprobs)
    return torch.where(unknown, torch.zeros_like(learner), (learner - generator).abs())


def _sum_by(buckets: Tensor, columns: list[Tensor]) -> Tensor:
    # A product with a one-hot matrix: one pass, the same every time, and nothing waits for a GPU.
    one_hot = torch.nn.functional.one_hot(buckets, len(LAG_BUCKETS)).double()
    return torch.stack([column.double() for column in columns]) @ one_hot


def _maxima_by(buckets: Tensor, columns: list[Tensor]) -> Tensor:
    values = torch.stack([column.double() for column in columns])
    nothing = torch.full((len(columns), len(LAG_BUCKETS)), -math.inf, dtype=torch.float64, device=values.device)
    return nothing.scatter_reduce(1, buckets.expand_as(values), values, "amax")


def _histogram(distances: Tensor, buckets: Tensor) -> Tensor:
    bins = ((distances / _LOWEST_EDGE).log() / math.log(_EDGE_GROWTH)).ceil().clamp(0, _NUM_BINS - 1).long()
    counts = torch.bincount(bins * len(LAG_BUCKETS) + buckets, minlength=_NUM_BINS * len(LAG_BUCKETS))
    return counts.reshape(_NUM_BINS, len(LAG_BUCKETS)).double()


# --- numbers ---------------------------------------------------------------------------------------------------------
def describe(counts: Counts) -> dict[str, float]:
    """Name -> number, of all buckets together; without what nothing was counted for."""
    described: dict[str, float] = {}
    if counts.tokens[0].any():
        tokens = dict(zip(TOKEN_SUMS, counts.tokens.sum(1).tolist(), strict=True))
        largest = dict(zip(MAXIMA, counts.maxima.amax(1).tolist(), strict=True))
        described |= _describe_tokens(tokens, largest)
        described |= _quantiles(counts.histogram.sum(1).tolist(), largest=largest["distance"])
    if counts.trajectories[0].any():
        described |= _describe_trajectories(
            dict(zip(TRAJECTORY_SUMS, counts.trajectories.sum(1).tolist(), strict=True))
        )
    return described


def describe_by_lag(counts: Counts) -> dict[str, float]:
    """`<bucket>/<name>` -> number."""
    cells = {bucket: describe(counts.bucket(index)) for index, bucket in enumerate(LAG_BUCKETS)}
    return {f"{bucket}/{name}": value for bucket, cell in cells.items() for name, value in cell.items()}


def _describe_tokens(sums: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    count = sums["count"]
    mean = {name: value / count for name, value in sums.items()}
    return {
        "tokens": count,
        "ratio_mean": mean["ratio"],
        "ratio_max": largest["ratio"],
        "ratio_tail_fraction": mean["ratio_tail"],
        "idle_fraction": mean["idle"],
        "kept_fraction": mean["kept"],
        "weight_mean": mean["weight"],
        "weight_std": math.sqrt(max(0.0, mean["weight_squared"] - mean["weight"] ** 2)),
        "weight_min": -largest["negative_weight"],
        "weight_max": largest["weight"],
        "weight_changed_fraction": mean["bounded"],
        "mismatch_k1": mean["k1"],
        "mismatch_k3": mean["k3"],
        "mismatch_mean": mean["distance"],
        "mismatch_max": largest["distance"],
        "mismatch_tail_fraction": mean["tail"],
        "mismatch_ratio_mean": mean["drift"],
        "probability_gap_mean": mean["probability_gap"],
        "probability_gap_max": largest["probability_gap"],
        "ess": mean["drift"] ** 2 / mean["drift_squared"],
        "chi2": mean["drift_squared"] - 1,
        "nonfinite_fraction": mean["nonfinite"],
        "entropy": mean["entropy"],
        "reference_kl": mean["reference_kl"],
    }


def _describe_trajectories(sums: dict[str, float]) -> dict[str, float]:
    mean = {name: value / sums["count"] for name, value in sums.items()}
    return {
        "ess_trajectories": mean["drift"] ** 2 / mean["drift_squared"],
        "chi2_trajectories": mean["drift_squared"] - 1,
        "perplexity_ratio": mean["perplexity_ratio"],
        "kept_trajectories_fraction": mean["kept"],
        "idle_trajectories_fraction": mean["idle"],
    }


def _quantiles(histogram: list[float], *, largest: float) -> dict[str, float]:
    """Upper end of the bin that the quantile falls into."""
    reached = list(accumulate(histogram))
    indices = {percent: bisect_left(reached, percent / 100 * reached[-1]) for percent in (50, 99)}
    return {f"mismatch_p{p}": min(_LOWEST_EDGE * _EDGE_GROWTH**index, largest) for p, index in indices.items()}
