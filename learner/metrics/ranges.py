"""Healthy ranges of the metrics that are watched. Loads without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy values of a metric, ends included. Example: Range(low=0.3, advice="lower max_lag")"""

    low: float | None = None
    """Lower end; None = unbounded."""
    high: float | None = None
    """Upper end; None = unbounded."""
    advice: str = ""
    """Meaning of a value outside, and the remedy."""
    patience: int = 1
    """Consecutive steps outside after which an alert is raised."""
    only_stale: bool = False
    """Whether steps without a stale token are skipped."""
    of_median: bool = False
    """Whether the ends are multiples of the metric's median over the steps before."""

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range; NaN does not."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        unit = " x its median" if self.of_median else ""
        if self.low is None:
            return f"<= {self.high:g}{unit}"
        return f">= {self.low:g}{unit}" if self.high is None else f"{self.low:g}..{self.high:g}{unit}"


_TOO_OLD = "the data is too old for the learner: lower buffer.staleness.max_lag or the learning rate"
_UNLIKE = "tokens of the newest weights differ: the engine computes other probabilities than the learner"
_CORRECTED = "correction weights dominate the update: lower buffer.staleness.max_lag or algorithm.correction.high"

RANGES = {
    "learner/mismatch_k1": Range(-0.1, 0.1, _TOO_OLD),
    "learner/mismatch_k3": Range(high=0.1, advice=_TOO_OLD),
    "learner/by_lag/0/mismatch_k3": Range(high=0.01, advice=_UNLIKE),
    "learner/by_lag/0/mismatch_max": Range(high=0.5, advice=_UNLIKE, patience=5),
    "learner/mismatch_tail_fraction": Range(high=0.1, advice=_TOO_OLD),
    "learner/perplexity_ratio": Range(0.8, 1.25, _TOO_OLD),
    "learner/ess": Range(low=0.3, advice=_TOO_OLD),
    "learner/chi2": Range(high=1.0, advice=_TOO_OLD),
    "learner/weight_mean": Range(0.5, 2.0, _CORRECTED),
    "learner/weight_std": Range(high=1.0, advice=_CORRECTED),
    "learner/ratio_mean": Range(
        0.5, 2.0, "the policy moves too far within a step: lower the learning rate or the updates"
    ),
    "learner/kept_fraction": Range(low=0.5, advice="the correction rejects most of the data: widen its bounds"),
    "learner/kept_trajectories_fraction": Range(low=0.5, advice="the correction rejects most trajectories: widen it"),
    "learner/idle_fraction": Range(high=0.5, advice="the policy loss clips most of the data: lower the learning rate"),
    "learner/nonfinite_fraction": Range(high=0.0, advice="a model returns log-probabilities that are not finite"),
    "learner/entropy": Range(low=0.01, advice="the policy has stopped exploring: see algorithm.entropy_coefficient"),
    "learner/grad_norm": Range(
        high=10.0, advice="a spike precedes a collapse: see learner.optimizer.max_grad_norm", of_median=True
    ),
    "learner/grad_cosine": Range(
        high=0.5, advice="stale gradients repeat themselves: " + _TOO_OLD, patience=5, only_stale=True
    ),
    "learner/failed_fraction": Range(high=0.1, advice="a reward function raises or hangs"),
    "learner/stale_fraction": Range(
        high=0.05,
        advice="early tokens of long answers are too old to train on, see learner/stale_length_ratio: lower "
        "buffer.staleness.pacing_lag, or raise max_lag",
        patience=5,
    ),
    "learner/advantage_zero_fraction": Range(
        high=0.95, advice="few groups have a gradient: prompts are too easy or too hard, see buffer.filter", patience=5
    ),
}
"""Key -> healthy range, as in docs/metrics.md; `learner.metrics.alerts` reports a metric that leaves it."""
