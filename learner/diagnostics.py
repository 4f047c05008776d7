"""Diagnostics: what a step tells about itself, summed over microbatches, updates and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.ranks import Ranks

METRICS = {
    "learner/loss": "what was minimised, mean over the step's optimizer updates",
    "learner/grad_norm": "global gradient norm before clipping, mean over updates",
    "learner/learning_rate": "of the last update",
    "learner/updates": "optimizer updates made in this step; an update without a trainable token is left out",
    "learner/tokens": "tokens trained on",
    "learner/computed_tokens": "input tokens of forward passes with gradient, padding included",
    "learner/trajectories": "trajectories claimed",
    "learner/ratio_mean": "mean pi_learner / pi_proximal; 1 with one update per step",
    "learner/ratio_max": "largest pi_learner / pi_proximal",
    "learner/clip_fraction": "share of tokens whose gradient the PPO clip removed",
    "learner/weight_mean": "mean importance weight after truncation or masking",
    "learner/weight_changed_fraction": "share of tokens whose importance weight was truncated or masked",
    "learner/mismatch_k1": "KL(generator || proximal), estimator k1, nats per token",
    "learner/mismatch_k3": "KL(generator || proximal), estimator k3, nats per token; staleness and numerics together",
    "learner/mismatch_max": "largest |log pi_proximal - log pi_generator|, nats",
    "learner/ess": "effective sample size of the untruncated token weights, share of the tokens",
    "learner/nonfinite_fraction": "share of tokens with a ratio that was not finite and was set to 1",
    "learner/entropy": "mean entropy at the sampled tokens, nats",
    "learner/reference_kl": "KL(learner || initial policy), estimator k3; 0 when algorithm.kl_coefficient is 0",
    "learner/reward_mean": "mean reward of trajectories whose reward function answered",
    "learner/advantage_mean": "mean advantage of those trajectories",
    "learner/advantage_std": "standard deviation of those advantages",
    "learner/advantage_zero_fraction": "share of those whose advantage is exactly 0: their group is all equal",
    "learner/over_age_fraction": "share of model-written tokens masked because they are older than max_lag",
    "learner/failed_fraction": "share of trajectories masked because their reward function did not answer",
}
"""Key -> what it is. Everything `Trainer.step` returns is in here."""

_SUMS = (
    "tokens",
    "computed_tokens",
    "loss",
    "ratio",
    "clipped",
    "weight",
    "weight_changed",
    "k1",
    "k3",
    "raw_weight",
    "raw_weight_squared",
    "nonfinite",
    "entropy",
    "reference_k3",
)
_MAXIMA = ("ratio", "mismatch")


class Tally:
    """Sums and maxima over tokens. `add` on every rank, then `report` on every rank."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64)

    def add(self, sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor]) -> None:
        """Take in one microbatch; `maxima` hold token values, possibly none."""
        self._sums += _column([sums.get(name, 0.0) for name in _SUMS])
        largest = _column([maxima[name].max() if maxima[name].numel() else 0.0 for name in _MAXIMA])
        self._maxima = torch.maximum(self._maxima, largest)

    def report(self, ranks: Ranks, *, num_updates: int) -> dict[str, float]:
        """Metrics over all ranks; collective."""
        sums = dict(zip(_SUMS, ranks.sum(self._sums).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, ranks.max(self._maxima).tolist(), strict=True))
        tokens = max(1.0, sums["tokens"])
        return {
            "learner/loss": sums["loss"] / max(1, num_updates),
            "learner/tokens": sums["tokens"],
            "learner/computed_tokens": sums["computed_tokens"],
            "learner/ratio_mean": sums["ratio"] / tokens,
            "learner/ratio_max": maxima["ratio"],
            "learner/clip_fraction": sums["clipped"] / tokens,
            "learner/weight_mean": sums["weight"] / tokens,
            "learner/weight_changed_fraction": sums["weight_changed"] / tokens,
            "learner/mismatch_k1": sums["k1"] / tokens,
            "learner/mismatch_k3": sums["k3"] / tokens,
            "learner/mismatch_max": maxima["mismatch"],
            "learner/ess": sums["raw_weight"] ** 2 / max(tokens * sums["raw_weight_squared"], 1e-30),
            "learner/nonfinite_fraction": sums["nonfinite"] / tokens,
            "learner/entropy": sums["entropy"] / tokens,
            "learner/reference_kl": sums["reference_k3"] / tokens,
        }


def _column(values: list[Tensor | float]) -> Tensor:
    columns = [torch.as_tensor(value, dtype=torch.float64) for value in values]
    device = next((column.device for column in columns if column.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([column.to(device) for column in columns]).cpu()
