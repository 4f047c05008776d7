"""The learning rate as a function of how many optimizer updates came before."""

import math

from configs.learner import OptimizerConfig


def learning_rate(update: int, *, config: OptimizerConfig, total_updates: int) -> float:
    """Rate of the update after `update` others: linear warm-up to the peak, then the configured shape.

    `linear` and `cosine` reach zero after `total_updates`; `constant` stays at the peak.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    return config.learning_rate * _SHAPES[config.schedule](progress)


_SHAPES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}
