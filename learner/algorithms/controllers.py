"""Controllers: a coefficient and a measurement of one step -> the coefficient of the next. A fixed one needs none."""

import math

KL_ERROR_BOUND = 0.2
"""How far a measured KL may count as off its target, relative to it."""


def adaptive_kl_coefficient(coefficient: float, *, kl: float, target: float, num_sequences: int, horizon: int) -> float:
    """The KL coefficient, raised while the measured KL is above its target and lowered while below.

    beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    `kl` is what was measured in the step, nats, in the unit of `target`; `horizon` is in sequences.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    Differs: num_sequences / horizon counts as 1 at most, so that no step size turns beta negative; a KL that is not a
    number leaves beta as it is.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1, -KL_ERROR_BOUND), KL_ERROR_BOUND)
    return coefficient * (1 + error * min(num_sequences / horizon, 1.0))


def ess_learning_rate_scale(ess: float, *, power: float = 0.5, floor: float) -> float:
    """Factor of the learning rate by how many samples carry the gradient; `ess` is their share, between 0 and 1.

    scale = max(ess^power, floor), power 1/2 for Adam-like optimizers, 1 for SGD

    Source: VCPO, arXiv:2602.17616, learning rate by effective sample size.
    Differs: the floor, and that a share that is not a number (no weight is left) counts as 0.
    """
    return max(floor, min(ess, 1.0) ** power) if ess > 0 else floor
