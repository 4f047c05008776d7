"""Token statistics: sums over tokens and trajectories by lag, and the metrics that follow from them.

Sums add up over microbatches, updates and ranks; a ratio is formed once, from the sums, because a mean of means would
weigh tokens by the microbatch they were packed into. A token is counted at its own lag, a trajectory at that of its
oldest token.
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
"""Name -> smallest lag, versions. Bucket 0 shows the difference between the engines alone."""
_LOWEST_EDGE, _EDGE_GROWTH, _NUM_BINS = 1e-6, 1.12, 150
"""Bin i of the histogram ends at _LOWEST_EDGE * _EDGE_GROWTH^i nats; the last ends beyond what a clamp lets through."""
_LOG_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Columns of the N tokens of one loss, whole trajectories, without gradient."""

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_proximal), nats."""
    learner_logprobs: Float[Tensor, "N"]
    """The learner's at the start of the step where they are known, else those of the loss."""
    generator_logprobs: Float[Tensor, "N"]
    """Log-probabilities of the distribution they were sampled from."""
    weights: Float[Tensor, "N"]
    """Importance weights of the correction."""
    is_bounded: Bool[Tensor, "N"]
    """Whether a bound of the correction changed the weight."""
    is_kept: Bool[Tensor, "N"]
    """Whether they are in the loss."""
    is_idle: Bool[Tensor, "N"]
    """Whether the policy loss removed their gradient."""
    entropies: Float[Tensor, "N"]
    """Entropy of the distribution at each token, nats."""
    reference_kl: Float[Tensor, "N"]
    """Estimated KL from the reference policy, nats."""
    lags: Int[Tensor, "N"]
    """Lag of each token in versions, not below 0."""
    sequences: Int[Tensor, "N"]
    """Trajectory of each token, from 0 without gaps."""
    num_sequences: int
    """Number of trajectories."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums and maxima, each a table with a column per bucket of lags."""

    tokens: Float[Tensor, "K L"]
    """Sums over tokens, rows as in TOKEN_SUMS."""
    trajectories: Float[Tensor, "K L"]
    """Sums over trajectories, rows as in TRAJECTORY_SUMS."""
    histogram: Float[Tensor, "E L"]
    """Number of tokens by |log(pi_learner / pi_generator)|, a row per bin."""
    maxima: Float[Tensor, "M L"]
    """Largest value over tokens, rows as in MAXIMA; -inf without tokens."""

    def merge(self, other: "Counts") -> "Counts":
        """Add another's counts, on the other's device."""
        mine = self._map(lambda table: table.to(other.tokens.device))
        return Counts(
            mine.tokens + other.tokens,
            mine.trajectories + other.trajectories,
            mine.histogram + other.histogram,
            torch.maximum(mine.maxima, other.maxima),
        )

    def over(self, ranks: Ranks) -> "Counts":
        """Sum over all ranks; collective."""
        return Counts(
            ranks.sum(self.tokens), ranks.sum(self.trajectories), ranks.sum(self.histogram), ranks.max(self.maxima)
        )

    def bucket(self, index: int) -> "Counts":
        """The counts of one bucket of lags alone."""
        return self._map(lambda table: table[:, index : index + 1])

    def to_cpu(self) -> "Counts":
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
    """Index in LAG_BUCKETS of the bucket of each lag."""
    starts = torch.tensor(list(LAG_BUCKETS.values()), device=lags.device)
    return torch.bucketize(lags, starts, right=True) - 1


def no_counts() -> Counts:
    """The counts of zero tokens."""
    sizes = (len(TOKEN_SUMS), len(TRAJECTORY_SUMS), _NUM_BINS, len(MAXIMA))
    tokens, trajectories, histogram, maxima = (
        torch.zeros(size, len(LAG_BUCKETS), dtype=torch.float64) for size in sizes
    )
    return Counts(tokens, trajectories, histogram, maxima - math.inf)


def count_tokens(stats: TokenStats) -> Counts:
    """The counts of one microbatch, possibly without tokens."""
    # Double: exp(x) - 1 - x of a numerical difference would be all rounding in float32.
    mismatch = importance.token_log_ratio(stats.learner_logprobs.double(), stats.generator_logprobs.double())
    gap = _probability_gap(stats)
    buckets = lag_buckets(stats.lags)
    return Counts(
        tokens=_sum_by(buckets, _token_columns(stats, mismatch=mismatch, gap=gap)),
        trajectories=_sum_by(_oldest_buckets(stats), _trajectory_columns(stats, mismatch=mismatch)),
        histogram=_histogram(mismatch.abs(), buckets),
        maxima=_maxima_by(
            buckets, [stats.log_ratio.double().exp(), stats.weights, -stats.weights, mismatch.abs(), gap]
        ),
    )


def _token_columns(stats: TokenStats, *, mismatch: Tensor, gap: Tensor) -> list[Tensor]:
    """In the order of TOKEN_SUMS."""
    log_ratio, weights, drift = stats.log_ratio.double(), stats.weights.double(), mismatch.exp()
    return [
        torch.ones_like(mismatch),
        log_ratio.exp(),
        log_ratio.abs() > _LOG_2,
        stats.is_idle,
        stats.is_kept,
        weights,
        weights.square(),
        stats.is_bounded,
        -mismatch,
        mismatch.expm1() - mismatch,
        mismatch.abs(),
        mismatch.abs() > _LOG_2,
        drift,
        drift.square(),
        gap,
        importance.nonfinite(stats.learner_logprobs, stats.generator_logprobs),
        stats.entropies,
        stats.reference_kl,
    ]


def _trajectory_columns(stats: TokenStats, *, mismatch: Tensor) -> list[Tensor]:
    """In the order of TRAJECTORY_SUMS."""

    def totals(values: Tensor) -> Tensor:
        return segments.sums(values.double(), stats.sequences, num_segments=stats.num_sequences)

    lengths, total = totals(torch.ones_like(mismatch)), totals(mismatch)
    drift = importance.bounded(total).exp()
    return [
        torch.ones_like(lengths),
        drift,
        drift.square(),
        (-total / lengths).exp(),
        totals(stats.is_kept) > 0,
        totals(stats.is_idle) == lengths,
    ]


def _oldest_buckets(stats: TokenStats) -> Tensor:
    return lag_buckets(segments.maxima(stats.lags, stats.sequences, num_segments=stats.num_sequences))


def _probability_gap(stats: TokenStats) -> Tensor:
    """|pi_learner - pi_generator|; 0 where one of them is not finite."""
    learner, generator = (x.double().clamp(max=0.0).exp() for x in (stats.learner_logprobs, stats.generator_logprobs))
    unknown = importance.nonfinite(stats.learner_logprobs, stats.generator_logprobs)
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
    """Name -> metric over all buckets; a metric without a token, or a trajectory, is missing."""
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
    """`<bucket>/<name>` -> metric of the tokens of that bucket."""
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
    """Upper edges of the bins that hold the quantiles."""
    reached = list(accumulate(histogram))
    indices = {percent: bisect_left(reached, percent / 100 * reached[-1]) for percent in (50, 99)}
    return {f"mismatch_p{p}": min(_LOWEST_EDGE * _EDGE_GROWTH**index, largest) for p, index in indices.items()}
