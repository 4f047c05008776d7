"""Metrics of a training step, overall and by lag, described in docs/metrics.md.

Ratios come from sums over microbatches, updates, and ranks. A token counts at its lag, a trajectory once per context,
at its oldest token's lag.

GradientSimilarity compares consecutive gradients, nearly orthogonal in stable training, but aligned for many steps
before staleness makes a run collapse.

    cos(g_t, g_{t-1}) = <g_t, g_{t-1}> / (|g_t| |g_{t-1}|)

Source: GAC, arXiv:2603.01501.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.buffer.archive.step_tokens import StepTokens
from slipstream.buffer.trajectory import Trajectory
from slipstream.learner.algorithms import importance, segments
from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.batching.batch import Tokens
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.loss_inputs import Correction

LAG_BUCKETS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8-15": 8, "16+": 16}
"""Name -> smallest lag, versions. Bucket 0 shows only the mismatch between the engines."""
_LOG_2 = math.log(2.0)


class TokenStats(NamedTuple):
    """One loss's N tokens, in complete contexts, without gradient."""

    tokens: Tokens
    """Contexts count from 0 without gaps."""
    inputs: LossInputs
    correction: Correction
    is_idle: Bool[Tensor, "N"]
    """True if the policy loss or a mask removed the gradient."""
    entropies: Float[Tensor, "N"]
    """Nats."""
    reference_kl: Float[Tensor, "N"]
    """Nats."""

    @property
    def learner_logprobs(self) -> Float[Tensor, "N"]:
        """From the start of the step if known."""
        start = self.tokens.start_logprobs
        return self.inputs.learner_logprobs if start is None else start


class Counts(NamedTuple):
    """Tables with one column per lag bucket."""

    tokens: Float[Tensor, "K L"]
    """Sums over tokens, rows as in TOKEN_SUMS."""
    trajectories: Float[Tensor, "K L"]
    """Sums over contexts, rows as in TRAJECTORY_SUMS."""
    maxima: Float[Tensor, "M L"]
    """Maxima over tokens, rows as in MAXIMA; -inf without tokens."""

    def merge(self, other: "Counts") -> "Counts":
        """Merge counts on the device of `other`."""
        tokens, trajectories, maxima = (table.to(other.tokens.device) for table in self)
        return Counts(tokens + other.tokens, trajectories + other.trajectories, torch.maximum(maxima, other.maxima))

    def over(self, ranks: Ranks) -> "Counts":
        """Counts of all ranks. Collective."""
        return Counts(ranks.sum(self.tokens), ranks.sum(self.trajectories), ranks.max(self.maxima))


TOKEN_SUMS = (
    "tokens", "ratio_mean", "ratio_tail_fraction", "idle_fraction", "kept_fraction", "weight_mean", "weight_squared",
    "weight_changed_fraction", "mismatch_k1", "mismatch_k3", "mismatch_mean", "mismatch_tail_fraction",
    "mismatch_ratio_mean", "mismatch_ratio_squared", "probability_gap_mean", "nonfinite_fraction", "entropy",
    "reference_kl",
)  # fmt: skip
"""Each mean is the metric of that name, except `tokens` and squares."""
TRAJECTORY_SUMS = ("count", "drift", "drift_squared", "perplexity_ratio", "kept", "idle")
MAXIMA = ("ratio_max", "weight_max", "weight_min", "mismatch_max", "probability_gap_max")
"""Each is the metric of that name, with the sign of the smallest weight changed."""


def lag_buckets(lags: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Index in LAG_BUCKETS of each lag."""
    return torch.bucketize(lags, torch.tensor(list(LAG_BUCKETS.values()), device=lags.device), right=True) - 1


def no_counts() -> Counts:
    """Counts of a step without tokens."""
    sizes = (len(TOKEN_SUMS), len(TRAJECTORY_SUMS), len(MAXIMA))
    tokens, trajectories, maxima = (torch.zeros(size, len(LAG_BUCKETS), dtype=torch.float64) for size in sizes)
    return Counts(tokens, trajectories, maxima - math.inf)


def count_tokens(stats: TokenStats) -> Counts:
    """Counts of a microbatch, possibly without tokens."""
    logprobs = stats.learner_logprobs, stats.tokens.generator_logprobs
    # In float32, exp(x) - 1 - x of small x is only rounding error.
    mismatch = importance.token_log_ratio(*(each.double() for each in logprobs))
    learner, generator = (each.double().clamp(max=0.0).exp() for each in logprobs)
    gap = torch.where(importance.nonfinite(*logprobs), 0.0, (learner - generator).abs())
    buckets = lag_buckets(stats.tokens.lags)
    oldest = segments.maxima(stats.tokens.lags, stats.tokens.contexts, num_segments=stats.inputs.num_sequences)
    weights = stats.correction.weights.double()
    values = torch.stack([stats.inputs.log_ratio.double().exp(), weights, -weights, mismatch.abs(), gap])
    nothing = values.new_full((len(MAXIMA), len(LAG_BUCKETS)), -math.inf)
    return Counts(
        tokens=_sum_by(buckets, _token_columns(stats, mismatch=mismatch, gap=gap)),
        trajectories=_sum_by(lag_buckets(oldest), _trajectory_columns(stats, mismatch=mismatch)),
        maxima=nothing.scatter_reduce(1, buckets.expand_as(values), values, "amax"),
    )


def _token_columns(stats: TokenStats, *, mismatch: Tensor, gap: Tensor) -> list[Tensor]:
    """Columns in the order of TOKEN_SUMS."""
    log_ratio, weights, drift = stats.inputs.log_ratio.double(), stats.correction.weights.double(), mismatch.exp()
    return [
        torch.ones_like(mismatch),
        log_ratio.exp(),
        log_ratio.abs() > _LOG_2,
        stats.is_idle,
        stats.correction.is_kept,
        weights,
        weights.square(),
        stats.correction.is_bounded,
        -mismatch,
        mismatch.expm1() - mismatch,
        mismatch.abs(),
        mismatch.abs() > _LOG_2,
        drift,
        drift.square(),
        gap,
        importance.nonfinite(stats.learner_logprobs, stats.tokens.generator_logprobs),
        stats.entropies,
        stats.reference_kl,
    ]


def _trajectory_columns(stats: TokenStats, *, mismatch: Tensor) -> list[Tensor]:
    """Columns in the order of TRAJECTORY_SUMS."""

    def totals(values: Tensor) -> Tensor:
        return segments.sums(values.double(), stats.tokens.contexts, num_segments=stats.inputs.num_sequences)

    lengths, total = totals(torch.ones_like(mismatch)), totals(mismatch)
    drift = importance.bounded(total).exp()
    return [
        torch.ones_like(lengths),
        drift,
        drift.square(),
        (-total / lengths).exp(),
        totals(stats.correction.is_kept) > 0,
        totals(stats.is_idle) == lengths,
    ]


def _sum_by(buckets: Tensor, columns: list[Tensor]) -> Tensor:
    # A one-hot product is deterministic and does not synchronize with the GPU.
    one_hot = torch.nn.functional.one_hot(buckets, len(LAG_BUCKETS)).double()
    return torch.stack([column.double() for column in columns]) @ one_hot


def describe(counts: Counts) -> dict[str, float]:
    """Name -> metric over all buckets, if it has a token or trajectory."""
    described: dict[str, float] = {}
    if counts.tokens[0].any():
        tokens = dict(zip(TOKEN_SUMS, counts.tokens.sum(1).tolist(), strict=True))
        largest = dict(zip(MAXIMA, counts.maxima.amax(1).tolist(), strict=True))
        mean = {name: value / tokens["tokens"] for name, value in tokens.items()}
        weight_square, ratio_square = mean.pop("weight_squared"), mean.pop("mismatch_ratio_squared")
        described = {
            **mean,
            **largest,
            "tokens": tokens["tokens"],
            "weight_std": math.sqrt(max(0.0, weight_square - mean["weight_mean"] ** 2)),
            "weight_min": -largest["weight_min"],
            "ess": mean["mismatch_ratio_mean"] ** 2 / ratio_square,
            "chi2": ratio_square - 1,
        }
    if counts.trajectories[0].any():
        sums = counts.trajectories.sum(1)
        mean = dict(zip(TRAJECTORY_SUMS, (sums / sums[0]).tolist(), strict=True))
        described |= {
            "ess_trajectories": mean["drift"] ** 2 / mean["drift_squared"],
            "chi2_trajectories": mean["drift_squared"] - 1,
            "perplexity_ratio": mean["perplexity_ratio"],
            "kept_trajectories_fraction": mean["kept"],
            "idle_trajectories_fraction": mean["idle"],
        }
    return described


def describe_by_lag(counts: Counts) -> dict[str, float]:
    """Compute metrics per bucket of lags: `<bucket>/<name>` -> metric."""
    return {
        f"{bucket}/{name}": value
        for index, bucket in enumerate(LAG_BUCKETS)
        for name, value in describe(Counts(*(table[:, [index]] for table in counts))).items()
    }


class TokenRecorder:
    """Log-probability and entropy per token. Life: add* -> collect, on every rank."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._values = tokens.generator_logprobs.new_zeros(2, len(tokens.sequences))

    @torch.no_grad()
    def add(self, microbatch: Microbatch, outputs: Mapping[str, Tensor]) -> None:
        """Does not synchronize with the device."""
        self._values[:, microbatch.indices] = torch.stack([outputs[name].float() for name in ("logprobs", "entropies")])

    def collect(self, members: Iterable[tuple[Trajectory, np.ndarray]], *, ranks: Ranks) -> StepTokens | None:
        """Statistics on rank 0, else None. Collective.

        `members`: first trajectories of the batch with positions of trained tokens. Log-ratios are from the step's
        start if known, else, like entropies, from the loss.
        """
        # Each token is in one share.
        logprobs, entropies = ranks.sum(self._values)
        if not ranks.is_first:
            return None
        start, generator = self._tokens.start_logprobs, self._tokens.generator_logprobs
        log_ratios = (logprobs if start is None else start) - generator
        trained = [(trajectory, positions) for trajectory, positions in members if len(positions)]
        num_tokens = sum(len(positions) for _, positions in trained)
        columns = {"log_ratio": log_ratios, "entropy": entropies}
        return StepTokens(
            ids=[trajectory.id for trajectory, _ in trained],
            lengths=[trajectory.num_tokens for trajectory, _ in trained],
            positions=[positions for _, positions in trained],
            columns={name: column[:num_tokens].cpu().numpy() for name, column in columns.items()},
        )


class StepMetrics:
    """Statistics of a step's losses. Life: (add_forward -> add)* -> report, on every rank."""

    def __init__(self, recorder: TokenRecorder | None = None) -> None:
        self.recorder = recorder
        self._counts = no_counts()
        self._loss = torch.zeros((), dtype=torch.float64)
        self._computed_tokens = torch.zeros((), dtype=torch.float64)
        self._routed: dict[str, Any] = {}

    @torch.no_grad()
    def add_forward(self, microbatch: Microbatch, outputs: Mapping[str, Tensor]) -> None:
        self._computed_tokens += microbatch.num_tokens
        if self.recorder:
            self.recorder.add(microbatch, outputs)
        for name in outputs.keys() & {"expert_load", "aux_loss"}:
            self._routed[name] = self._routed.get(name, 0.0) + outputs[name].double()

    @torch.no_grad()
    def add(self, stats: TokenStats, *, loss: Tensor) -> None:
        """`loss`: the microbatch's part. May be without tokens."""
        # Reading sums would wait for the forward pass.
        self._counts = self._counts.merge(count_tokens(stats))
        self._loss = self._loss.to(loss.device) + loss.double()

    def report(self, ranks: Ranks, *, num_updates: int, layers: Sequence[int] = ()) -> dict[str, float]:
        """Metrics over all ranks. `layers`: layer index of each router. Collective."""
        counts = Counts(*(table.cpu() for table in self._counts.over(ranks)))
        loss, computed_tokens = ranks.sum(torch.stack([self._loss.cpu(), self._computed_tokens])).tolist()
        load, aux_loss = (self._routed.get(name) for name in ("expert_load", "aux_loss"))
        return {
            "learner/loss": loss / max(1, num_updates),
            "learner/computed_tokens": computed_tokens,
            "learner/tokens": 0.0,
            "learner/reference_kl": 0.0,
            **{f"learner/{name}": value for name, value in describe(counts).items()},
            **{f"learner/by_lag/{name}": value for name, value in describe_by_lag(counts).items()},
            **({} if load is None else describe_experts(ranks.sum(load).cpu(), layers)),
            **({} if aux_loss is None else {"learner/aux_loss": float(ranks.sum(aux_loss)) / num_updates}),
        }


def describe_experts(load: Float[Tensor, "M E"], layers: Sequence[int]) -> dict[str, float]:
    """Metrics of the tokens per router and expert. `layers`: as in `report`.

    violation = max over experts of tokens / mean over experts of tokens - 1

    Source: MaxVio of auxiliary-loss-free load balancing, arXiv:2408.15664.
    """
    shares = load / load.sum(1, keepdim=True).clamp(min=1)
    violations = shares.amax(1) * load.shape[1] - 1
    entropies = torch.special.entr(shares).sum(1) / math.log(load.shape[1])
    by_layer = zip(layers, violations.tolist(), strict=True)
    return {
        "learner/expert_violation_max": float(violations.max()),
        "learner/expert_violation_mean": float(violations.mean()),
        "learner/expert_violation_min": float(violations.min()),
        "learner/expert_idle_fraction": float((load == 0).double().mean()),
        "learner/expert_entropy": float(entropies.mean()),
        **{f"learner/by_layer/{layer}/expert_violation": value for layer, value in by_layer},
    }


_MAX_ENTRIES = 2**20
"""Per optimizer step on this rank."""
_MAX_UNREPORTED = 1024


class GradientSimilarity:
    """Records an optimizer's gradients. Life: ((optimizer step)+ -> end_update)* -> report, repeatedly.

    Samples the same entries of every gradient, at most 17 MB per optimizer step. Ranks may hold pieces or copies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
        self._seed = seed
        self._indices: list[list[Tensor]] = []
        self._previous: list[Tensor] = []
        self._previous_square = torch.zeros(())
        self._spare: list[Tensor] = []
        self._current: list[Tensor] = []
        # Bounded in case `report` is never called.
        self._products: deque[Tensor] = deque(maxlen=_MAX_UNREPORTED)
        optimizer.register_step_pre_hook(self._record)

    def end_update(self) -> None:
        square = _product(self._current, self._current)
        if self._previous and self._current:
            self._products.append(torch.stack([_product(self._current, self._previous), square, self._previous_square]))
        self._spare, self._previous, self._current = self._previous, self._current, []
        self._previous_square = square

    def report(self, ranks: Ranks) -> dict[str, float]:
        """Mean cosine since the last report; {} if no update had a predecessor. Collective."""
        if not self._products:
            return {}
        sums = ranks.sum_all(torch.stack(list(self._products)).double()).tolist()
        self._products.clear()
        cosines = [dot / math.sqrt(now * before) for dot, now, before in sums if now * before > 0]
        return {"learner/grad_cosine": sum(cosines) / len(cosines)} if cosines else {}

    @torch.no_grad()
    def _record(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Pre-step hook. With ZeRO-3, an update has a step per subgroup of shards."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        total = sum(parameter.numel() for parameter in parameters)
        if total <= _MAX_ENTRIES:
            self._keep([_gradient(parameter).flatten().float() for parameter in parameters])
            return
        if len(self._indices) == len(self._current):
            generator = torch.Generator().manual_seed(self._seed + len(self._indices))
            drawn = torch.randint(total, (_MAX_ENTRIES,), generator=generator).unique()
            ends = torch.tensor([parameter.numel() for parameter in parameters]).cumsum(0)
            parts = zip(drawn.tensor_split(torch.searchsorted(drawn, ends)[:-1]), [0, *ends[:-1].tolist()], strict=True)
            own = zip(parts, parameters, strict=True)
            self._indices.append([(part - start).to(parameter.device) for (part, start), parameter in own])
        indices = self._indices[len(self._current)]
        sampled = [_gradient(p).flatten()[index].float() for p, index in zip(parameters, indices, strict=True)]
        # Products of scaled samples estimate those of full gradients.
        self._keep(sampled).mul_(math.sqrt(total / sum(len(index) for index in indices)))

    def _keep(self, pieces: list[Tensor]) -> Tensor:
        """Reuse the buffer of the gradient before the previous: allocation dominates the cost."""
        index = len(self._current)
        self._current.append(torch.cat(pieces, out=self._spare[index] if self._spare else None))
        return self._current[index]


def _product(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return sum((one.dot(two) for one, two in zip(first, second, strict=True)), start=torch.zeros(()))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
