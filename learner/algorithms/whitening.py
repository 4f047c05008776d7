"""Whitening: values of a whole batch brought to mean 0 and standard deviation 1.

Only over what the model wrote: other tokens are not in the arrays. Over the whole batch of an update, never over
a microbatch or one rank's part, or the split would change the values. Variances are the population's; epsilon > 0.
REINFORCE++ (arXiv:2501.03262) is `whiten` of `reward_shaping.returns_to_go`.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def whiten(
    values: Float[Tensor, "N"], *, epsilon: float, weights: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "N"]:
    """Values minus their mean, divided by their standard deviation.

    y_i = (x_i - mean(x)) / (std(x) + epsilon)

    A value of weight w >= 0 counts as w equal values, and one of weight 0 not at all: it becomes 0.
    Equal values, and a single one, become exactly 0.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, its code.
    Differs: epsilon is added to the deviation, as everywhere here, not to the variance; the variance is not Bessel's.
    """
    weights = torch.ones_like(values) if weights is None else weights
    counts = weights > 0
    if not counts.any():
        return torch.zeros_like(values)
    lowest = values[counts].min()
    above_lowest = torch.where(counts, values - lowest, 0)
    mean = _mean(above_lowest, weights)
    deviations = above_lowest - mean
    whitened = deviations / (_mean(deviations.square(), weights).sqrt() + epsilon)
    return torch.where(counts, whitened, 0)


def _mean(values: Float[Tensor, "N"], weights: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    return (weights * values).sum() / weights.sum()
