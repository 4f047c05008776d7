"""Healthy ranges of metrics, with meaning and remedy of values outside."""

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from slipstream.configs.run import RunConfig

_FIGURE = re.compile(r" \([^()]*\{\w+\}[^()]*\)")


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy values of a metric, bounds included; None = unbounded.

    Example: Range(low=0.3, meaning="...", advice="lower max_lag")

    Texts may quote figures from `figures_of` in parentheses: ` (now {max_lag})`.
    """

    low: float | None = None
    high: float | None = None
    meaning: str = ""
    """Effect of a value outside."""
    advice: str = ""
    patience: int = 1
    """Consecutive steps outside before an alert."""
    only_stale: bool = False
    """Skip steps without stale tokens."""
    of_median: bool = False
    """Bounds are multiples of the median over previous steps."""
    min_wrong: float = 0.0
    """Skip steps with a smaller fraction of wrong answers."""

    def holds(self, value: float) -> bool:
        """Whether the value is in the range; False for NaN."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def explain(self, figures: Mapping[str, str] | None = None) -> str:
        """Meaning and remedy, with figures if given."""
        if figures is None:
            return ": ".join(filter(None, self.plain()))
        return ": ".join(filter(None, (self.meaning, self.advice))).format_map(figures)

    def plain(self) -> tuple[str, str]:
        """(meaning, remedy), without figures."""
        return _FIGURE.sub("", self.meaning), _FIGURE.sub("", self.advice)

    def __str__(self) -> str:
        unit = " x its median" if self.of_median else ""
        if self.low is None:
            return f"<= {self.high:g}{unit}"
        return f">= {self.low:g}{unit}" if self.high is None else f"{self.low:g}..{self.high:g}{unit}"


def figures_of(row: Mapping[str, Any], run: RunConfig) -> dict[str, str]:
    """Settings and values that explanations quote."""
    algorithm, staleness, reward = run.algorithm, run.staleness, run.generators.reward
    settings = {
        "max_lag": staleness.max_lag,
        "target_lag": staleness.target_lag,
        "updates_per_step": algorithm.updates_per_step,
        "entropy_coef": algorithm.entropy_coef,
        "kl_coefficient": algorithm.kl.coef,
        "correction_high": algorithm.correction.max_weight,
        "max_grad_norm": run.learner.optimizer.max_grad_norm,
        "num_ranks": run.learner.num_ranks,
        "microbatch": run.learner.tokens_per_microbatch,
        "checkpoint_steps": run.learner.checkpoint.every_steps,
        "evaluation_steps": run.evaluation.every_steps,
        "publish_steps": run.weights.publish_every_steps,
        "transport": run.weights.transport,
        "max_probe_diff": run.weights.max_probe_diff,
        "generators": run.generators.count,
        "group_size": run.generators.group_size,
        "max_tokens": run.generators.sampling.max_tokens,
        "timeout_s": reward.timeout_s,
        "reward": reward.summary,
    }
    measured = {
        "learning_rate": row.get("learner/learning_rate", run.learner.optimizer.learning_rate),
        "mean_lag": row.get("lag/mean"),
        "own_mismatch": row.get("learner/by_lag/0/mismatch_k3"),
        "length_ratio": row.get("learner/stale_length_ratio"),
        "reward_mean": row.get("learner/reward_mean"),
        "sync_s": row.get("weights/sync_s"),
        "pause_s": row.get("weights/pause_s"),
    }
    known = {name: value for name, value in (settings | measured).items() if value is not None}
    texts = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in known.items()}
    return dict.fromkeys(settings | measured, "unknown") | texts


_OLD = "the answers come from older weights than the learner's, and their gradient would improve those"
_YOUNGER = (
    "lower staleness.max_lag (now {max_lag}, mean lag {mean_lag}) or learner.optimizer.learning_rate (now "
    "{learning_rate}); where tokens of lag 0 differ as much (k3 {own_mismatch}), the engines disagree and age is not "
    "the cause"
)
_UNLIKE = "engine and learner compute other probabilities from the same weights, so that every gradient is biased"
_SAME_NUMERICS = (
    "compare dtype, attention and quantization of generators.engine and model; weights/probe_diff_mean and learner/"
    "by_lag/0/mismatch_k3 (now {own_mismatch}) must fall"
)
_WEIGHTED = "correction weights dominate the update: few tokens decide about it"
_LESS_WEIGHT = "lower staleness.max_lag (now {max_lag}) or algorithm.correction.max_weight (now {correction_high})"
_UNUSED = "the correction throws most of the data away, and the step learns from the rest"
_WIDER = "lower staleness.max_lag (now {max_lag}), or widen the bounds of algorithm.correction"
_SLOWER = (
    "lower learner.optimizer.learning_rate (now {learning_rate}) or algorithm.updates_per_step (now {updates_per_step})"
)

RANGES = {
    "learner/mismatch_k1": Range(-0.1, 0.1, _OLD, _YOUNGER),
    "learner/mismatch_k3": Range(None, 0.1, _OLD, _YOUNGER),
    "learner/by_lag/0/mismatch_k1": Range(-0.005, 0.005, _UNLIKE, _SAME_NUMERICS, patience=5),
    "learner/by_lag/0/mismatch_k3": Range(None, 0.01, _UNLIKE, _SAME_NUMERICS),
    "learner/mismatch_tail_fraction": Range(None, 0.1, _OLD, _YOUNGER),
    "learner/perplexity_ratio": Range(0.8, 1.25, _OLD, _YOUNGER),
    "learner/ess": Range(0.3, None, _OLD, _YOUNGER),
    "learner/chi2": Range(None, 1.0, _OLD, _YOUNGER),
    "learner/weight_mean": Range(0.5, 2.0, _WEIGHTED, _LESS_WEIGHT),
    "learner/weight_std": Range(None, 1.0, _WEIGHTED, _LESS_WEIGHT),
    "learner/ratio_mean": Range(0.5, 2.0, "the policy moves too far within one step", _SLOWER),
    "learner/kept_fraction": Range(0.5, None, _UNUSED, _WIDER),
    "learner/kept_trajectories_fraction": Range(0.5, None, _UNUSED, _WIDER),
    "learner/idle_fraction": Range(None, 0.5, "the policy loss clips most of the data: it has no gradient", _SLOWER),
    "learner/nonfinite_fraction": Range(
        None, 0.0, "a model returns log-probabilities that are not finite: these tokens teach nothing",
        "look for overflow: model.dtype, learner.optimizer.max_grad_norm (now {max_grad_norm})",
    ),
    "learner/entropy": Range(
        0.1, None, "the policy has stopped exploring: all answers to a prompt are alike, and it learns no more",
        "raise algorithm.entropy_coef (now {entropy_coef}), lower learner.optimizer.learning_rate (now "
        "{learning_rate}), or stop here if the reward (now {reward_mean}) is good",
        patience=3, min_wrong=0.1,
    ),
    "learner/grad_norm": Range(
        None, 10.0, "a spike of the gradient precedes a collapse",
        "lower learner.optimizer.max_grad_norm (now {max_grad_norm}) or learner.optimizer.learning_rate (now "
        "{learning_rate})",
        of_median=True,
    ),
    "learner/grad_cosine": Range(
        None, 0.5, "stale gradients repeat each other, which precedes a collapse", _YOUNGER, patience=5, only_stale=True
    ),
    "learner/failed_fraction": Range(
        None, 0.1, "these answers have no reward and are not trained on",
        "see why generators.reward raises or exceeds generators.reward.timeout_s (now {reward}, {timeout_s} s): "
        "`slipstream data ls` shows them, the generators' logs the errors",
    ),
    "learner/stale_fraction": Range(
        None, 0.05, "early tokens of long answers are too old to train on, so that long answers lose their beginnings",
        "lower staleness.target_lag (now {target_lag}), or raise staleness.max_lag (now {max_lag}); the "
        "masked answers are longer than the mean (by a factor of {length_ratio})",
        patience=5,
    ),
    "learner/advantage_zero_fraction": Range(
        None, 0.95, "all answers of nearly every group have the same reward, so that hardly anything has a gradient",
        "read answers and rewards with `slipstream data ls`: does generators.reward find the answer, and does the "
        "prompt ask for its format? Otherwise choose prompts of another difficulty (mean reward now "
        "{reward_mean}), a larger generators.group_size (now {group_size}), or buffer/filter=zero_advantage, which "
        "leaves such groups out",
        patience=2,
    ),
    "learner/correct_fraction": Range(
        0.001, None, "no answer has been correct, whatever its reward (now {reward_mean}): a part of the reward for "
        "something else may be all that is learned",
        "look at answers with `slipstream data ls`; `is_correct` of the reward must mean what you want to learn",
        patience=20,
    ),
    "learner/truncated_fraction": Range(
        None, 0.9, "nearly all answers are cut off before they end, and a reward for the whole answer is lost",
        "raise generators.sampling.max_tokens (now {max_tokens}), or ask for shorter answers in the prompt",
        patience=2,
    ),
}  # fmt: skip
"""Key -> healthy range, as in docs/metrics.md."""


def explain_value(value: float, healthy: Range, figures: Mapping[str, str] | None) -> str:
    """Meaning and remedy of an unhealthy value, which may be NaN."""
    return (RANGES["learner/nonfinite_fraction"] if math.isnan(value) else healthy).explain(figures)


STOP_LENGTH = "learner/by_source/SOURCE/stop_length"
_NEVER = math.inf
SIGNS = RANGES | {
    "lag/mean": Range(None, _NEVER, _OLD, _YOUNGER),
    "learner/weight_changed_fraction": Range(None, _NEVER, "the correction truncates or drops more tokens", _WIDER),
    "learner/ratio_tail_fraction": Range(None, _NEVER, "the policy moves further within one step", _SLOWER),
    "learner/learning_rate": Range(None, _NEVER, "each update moves the policy further", _SLOWER),
    "learner/reference_kl": Range(
        None, _NEVER, "the policy moves away from the reference model, and with it from what that can do",
        "raise algorithm.kl.coef (now {kl_coefficient}), or lower learner.optimizer.learning_rate (now "
        "{learning_rate})",
    ),
    STOP_LENGTH: Range(
        None, _NEVER, "answers are cut before they end, and a reward for the end is lost",
        "raise generators.sampling.max_tokens (now {max_tokens}), or see whether the policy has learned to ramble",
    ),
    "weights/probe_diff_mean": Range(
        None, _NEVER, "the engines compute other probabilities than the learner: a tensor may arrive altered",
        "compare with weights.max_probe_diff (now {max_probe_diff}), and the numerics of generators.engine with the "
        "model's",
    ),
    "buffer/length_bias": Range(
        -_NEVER, None, "long answers are lost on their way: what is trained on is shorter than what is generated",
        "raise staleness.max_lag (now {max_lag}); `slipstream data stats` shows why groups ended untrained",
    ),
}  # fmt: skip
"""RANGES, plus metrics that may change with a falling reward."""


_STEPS_TO_RECOVER = 3
_MEDIAN_STEPS, _MIN_MEDIAN_STEPS = 50, 10

log = structlog.get_logger(__name__)


class MetricAlerts:
    """Logs metrics that leave or reenter their range. `on_alert` gets a text on those that leave."""

    def __init__(
        self, on_alert: Callable[[str], None], *, run: RunConfig | None = None, ranges: Mapping[str, Range] = RANGES
    ) -> None:
        self._on_alert = on_alert
        self._run = run
        self._watched = {key: Watched(healthy) for key, healthy in ranges.items()}

    def check(self, row: Mapping[str, Any]) -> None:
        """Check a step's metrics. Missing metrics keep their state."""
        figures = figures_of(row, self._run) if self._run else None
        found: dict[str, list[str]] = {}
        for key, watched in changed(self._watched, row):
            healthy, value = watched.healthy, float(row[key])
            if watched.is_unhealthy:
                text = explain_value(value, healthy, figures)
                log.warning("unhealthy", metric=key, value=value, healthy=str(healthy), advice=text)
                found.setdefault(text, []).append(f"{key} is {value:.3g}, healthy is {healthy}")
            else:
                log.info("healthy_again", metric=key, value=value, healthy=str(healthy))
        # Metrics with the same meaning share one sentence.
        if found:
            self._on_alert("; ".join(f"{', '.join(values)}: {text}" for text, values in found.items()))


class Watched:
    """State of a metric, and consecutive steps that contradict it."""

    def __init__(self, healthy: Range) -> None:
        self.healthy = healthy
        self.is_unhealthy = False
        self._streak = 0
        self._recent: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    def update(self, value: float) -> bool:
        """Add a value; return whether the metric left or reentered its range."""
        median = 1.0
        if self.healthy.of_median:
            median = statistics.median(self._recent) if len(self._recent) >= _MIN_MEDIAN_STEPS else 0.0
            self._recent.append(value)
        # Hysteresis, for a metric that oscillates around a bound.
        contradicts = (not median or self.healthy.holds(value / median)) == self.is_unhealthy
        self._streak = self._streak + 1 if contradicts else 0
        if self._streak < (_STEPS_TO_RECOVER if self.is_unhealthy else self.healthy.patience):
            return False
        self.is_unhealthy, self._streak = not self.is_unhealthy, 0
        return True


def changed(watched: Mapping[str, Watched], row: Mapping[str, Any]) -> list[tuple[str, Watched]]:
    """Add a step's metrics; return those that left or reentered their range."""
    is_stale = row.get("lag/max", 0) > 0
    wrong = 1.0 - row.get("learner/correct_fraction", 0.0)
    found = {
        key: each
        for key, each in watched.items()
        if key in row and (is_stale or not each.healthy.only_stale) and wrong >= each.healthy.min_wrong
    }
    return [(key, each) for key, each in found.items() if each.update(float(row[key]))]
