"""Metrics of a training step, overall and by lag; docs/metrics.md describes each."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.learner.batching.answer_metrics import ANSWER_METRICS, BY_SOURCE
from slipstream.learner.metrics.step_tokens import TokenRecorder
from slipstream.learner.metrics.token_stats import TokenStats, count_tokens, describe, describe_by_lag, no_counts
from slipstream.learner.ranks import Ranks

TOKEN_METRICS = {
    "tokens": "tokens trained on",
    "ratio_mean": "mean pi_learner / pi_proximal; 1 with one update per step",
    "ratio_max": "largest pi_learner / pi_proximal",
    "ratio_tail_fraction": "share of tokens with |log(pi_learner / pi_proximal)| > ln 2",
    "idle_fraction": "share of tokens whose gradient the policy loss took away, as a clip does",
    "idle_trajectories_fraction": "share of trajectories of which it took every token's",
    "kept_fraction": "share of tokens that the correction did not reject",
    "kept_trajectories_fraction": "share of trajectories with a token that it did not reject",
    "weight_mean": "mean importance weight after truncation or masking",
    "weight_std": "standard deviation of these weights",
    "weight_min": "smallest of them",
    "weight_max": "largest of them",
    "weight_changed_fraction": "share of tokens whose importance weight was truncated or masked",
    "mismatch_k1": "KL(generator || learner), estimator k1, nats per token",
    "mismatch_k3": "KL(generator || learner), estimator k3, nats per token; staleness and numerics together",
    "mismatch_mean": "mean |log pi_learner - log pi_generator|, nats",
    "mismatch_p50": "median of it, to 12 %",
    "mismatch_p99": "99th percentile of it, to 12 %",
    "mismatch_max": "largest of it",
    "mismatch_tail_fraction": "share of tokens where it exceeds ln 2",
    "mismatch_ratio_mean": "mean pi_learner / pi_generator",
    "probability_gap_mean": "mean |pi_learner - pi_generator| of the sampled tokens",
    "probability_gap_max": "largest of it",
    "perplexity_ratio": "perplexity of the learner / of the generator, mean over trajectories",
    "ess": "effective sample size of pi_learner / pi_generator per token, share of the tokens",
    "ess_trajectories": "the same of its product over a trajectory, share of the trajectories",
    "chi2": "chi-square divergence, mean (pi_learner / pi_generator)^2 - 1 over tokens",
    "chi2_trajectories": "the same of the products over trajectories",
    "nonfinite_fraction": "share of tokens with a ratio that was not finite and was set to 1; those that the learner "
    "finds impossible (-inf) have no loss",
    "entropy": "mean entropy at the sampled tokens, nats",
    "reference_kl": "KL(learner || reference policy), by the configured estimator; 0 without a reference",
}
"""Name -> description, of all tokens as `learner/<name>` and of those of one lag as `learner/by_lag/<lag>/<name>`. A
metric without a token, or a trajectory, is missing; only `learner/tokens` and `learner/reference_kl` are 0 then."""

BY_LAG = "learner/by_lag/<lag>/<name>"
BY_LAYER = "learner/by_layer/<layer>/expert_violation"

METRICS = {
    "learner/loss": "minimised loss, mean over the step's optimizer updates",
    "learner/grad_norm": "global gradient norm before clipping, mean over updates",
    "learner/grad_cosine": "cosine of a gradient with that of the update before, mean over updates",
    "learner/learning_rate": "learning rate of the last update",
    "learner/updates": "optimizer updates made in this step; an update without a trainable token is left out",
    "learner/computed_tokens": "input tokens of forward passes with gradient, padding included",
    "learner/trajectories": "trajectories claimed",
    **{f"learner/{name}": meaning for name, meaning in TOKEN_METRICS.items()},
    BY_LAG: "any token metric, of the tokens of that lag; trajectories by their oldest token",
    BY_SOURCE: "any metric of the answers to one kind of task, `data_source`: "
    + "; ".join(f"`{name}`: {meaning}" for name, meaning in ANSWER_METRICS.items()),
    "learner/kl_coefficient": "price of one nat of the reference KL per token",
    "learner/learning_rate_scale": "factor of the learning rate for this step's effective sample size",
    "learner/reward_mean": "mean reward of trajectories whose reward function answered",
    "learner/advantage_mean": "mean advantage of the tokens to be trained on",
    "learner/advantage_std": "standard deviation of their advantages",
    "learner/advantage_zero_fraction": "share of those tokens whose advantage is exactly 0: their group is all equal",
    "learner/stale_fraction": "share of model-written tokens masked because they are older than max_lag",
    "learner/stale_length_ratio": "mean length of the trajectories that such tokens were masked of / of all",
    "learner/failed_fraction": "share of trajectories masked because their reward function did not answer",
}
"""Key -> description of all that `Trainer.step` returns; BY_LAG and BY_SOURCE stand for all keys of their
kinds."""

EXPERT_METRICS = {
    "learner/expert_violation_max": "tokens of a router's busiest expert / mean over its experts, minus 1; largest "
    "over the routers",
    "learner/expert_violation_mean": "mean of it over the routers",
    "learner/expert_violation_min": "smallest of it over the routers",
    BY_LAYER: "the same of the router in that layer",
    "learner/expert_idle_fraction": "share of experts without a token, mean over the routers",
    "learner/expert_entropy": "entropy of the tokens over a router's experts / its largest, mean over the routers; 1: "
    "even",
    "learner/aux_loss": "loss that balances the experts, with its coefficient, mean over the step's optimizer updates",
}
"""Key -> description. Steps of a mixture of experts report these beside METRICS; `aux_loss` with such a loss alone."""


class StepMetrics:
    """Statistics of a step's losses. Life: `add` on every rank, then `report` on every rank."""

    def __init__(self, recorder: TokenRecorder | None = None) -> None:
        self.recorder = recorder
        """Keeps the numbers of single tokens; None: nothing does."""
        self._counts = no_counts()
        self._loss = torch.zeros((), dtype=torch.float64)
        self._computed_tokens = torch.zeros((), dtype=torch.float64)
        self._load: Tensor | None = None
        self._aux_loss: Tensor | None = None

    def count_forward(self, num_tokens: int) -> None:
        """Count the input tokens of a forward pass with gradient."""
        self._computed_tokens += num_tokens

    @torch.no_grad()
    def count_experts(self, outputs: Mapping[str, Tensor]) -> None:
        """Count the tokens of a mixture's experts in a forward pass with gradient; of other models it has none."""
        if "expert_load" in outputs:
            self._load = outputs["expert_load"] + (0.0 if self._load is None else self._load)
        if "aux_loss" in outputs:
            self._aux_loss = outputs["aux_loss"].double() + (0.0 if self._aux_loss is None else self._aux_loss)

    @torch.no_grad()
    def add(self, stats: TokenStats, *, loss: Tensor) -> None:
        """Add one microbatch, possibly without tokens, and its share of the loss."""
        # Sums stay on the device, because reading them here would wait for the forward pass.
        self._counts = self._counts.merge(count_tokens(stats))
        self._loss = self._loss.to(loss.device) + loss.double()

    def report(self, ranks: Ranks, *, num_updates: int, layers: Sequence[int] = ()) -> dict[str, float]:
        """Metrics over all ranks; collective. `layers`: those of the routers."""
        counts = self._counts.over(ranks).to_cpu()
        loss, computed_tokens = ranks.sum(torch.stack([self._loss.cpu(), self._computed_tokens])).tolist()
        return {
            "learner/loss": loss / max(1, num_updates),
            "learner/computed_tokens": computed_tokens,
            "learner/tokens": 0.0,
            "learner/reference_kl": 0.0,
            **{f"learner/{name}": value for name, value in describe(counts).items()},
            **{f"learner/by_lag/{name}": value for name, value in describe_by_lag(counts).items()},
            **({} if self._load is None else describe_experts(ranks.sum(self._load).cpu(), layers)),
            **({} if self._aux_loss is None else {"learner/aux_loss": float(ranks.sum(self._aux_loss)) / num_updates}),
        }


def describe_experts(load: Float[Tensor, "M E"], layers: Sequence[int]) -> dict[str, float]:
    """`learner/...` of the tokens of each expert of each router; `layers` are the routers'.

    violation = max over experts of tokens / mean over experts of tokens - 1

    Source: MaxVio of auxiliary-loss-free load balancing, arXiv:2408.15664.
    """
    shares = load / load.sum(1, keepdim=True).clamp(min=1)
    violations = shares.amax(1) * load.shape[1] - 1
    entropies = torch.special.entr(shares).sum(1) / math.log(load.shape[1])
    return {
        "learner/expert_violation_max": float(violations.max()),
        "learner/expert_violation_mean": float(violations.mean()),
        "learner/expert_violation_min": float(violations.min()),
        "learner/expert_idle_fraction": float((load == 0).double().mean()),
        "learner/expert_entropy": float(entropies.mean()),
        **{BY_LAYER.replace("<layer>", str(at)): float(own) for at, own in zip(layers, violations, strict=True)},
    }
