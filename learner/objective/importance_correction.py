"""Importance correction: weights and rejections of tokens that another policy sampled, by `algorithm.correction`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.configs.algorithm_terms import CorrectionConfig, RejectionConfig
from slipstream.learner.algorithms import importance, rejection
from slipstream.learner.algorithms.inputs import RatioInputs


class Correction(NamedTuple):
    """Weights and rejections of N tokens, without gradient."""

    weights: Tensor
    """float32[N], factor of each token's policy loss."""
    is_kept: Tensor
    """bool[N], whether each token is in the loss at all."""
    is_bounded: Tensor
    """bool[N], whether each weight lay outside its bounds, and was truncated or masked."""


@torch.no_grad()
def correct(inputs: RatioInputs, *, learner: RatioInputs, config: CorrectionConfig) -> Correction:
    """Weights from log(proximal/generator), `inputs`, and rejections from log(learner/generator), `learner`.

    Both hold the same tokens of whole trajectories.
    """
    is_kept = _is_kept(learner, config=config)
    if config.level == "none":
        return Correction(torch.ones_like(inputs.log_ratio), is_kept, torch.zeros_like(is_kept))
    ratios = importance.LEVELS[config.level](inputs)
    low, high = _bounds(config)
    bound = importance.mask if config.bound == "mask" else importance.truncate
    weights = bound(ratios, low=low, high=high)
    if config.normalise:
        # A long trajectory holds one weight many times; the mean of trajectories counts it once.
        counted = weights if config.level == "token" else importance.one_per_sequence(weights, inputs)
        weights = importance.normalise(weights, mean=counted.mean())
    return Correction(weights, is_kept, is_bounded=(ratios > high) | (ratios < low))


def _is_kept(inputs: RatioInputs, *, config: CorrectionConfig) -> Tensor:
    is_kept = torch.ones_like(inputs.log_ratio, dtype=torch.bool)
    for entry in config.reject:
        low, high = _bounds(entry)
        is_kept &= rejection.STATISTICS[entry.statistic](inputs, over=entry.over, low=low, high=high)
    if config.veto:
        is_kept &= rejection.veto(inputs, low=config.veto[0], high=config.veto[1])
    return is_kept


def _bounds(config: CorrectionConfig | RejectionConfig) -> tuple[float, float]:
    return -math.inf if config.low is None else config.low, math.inf if config.high is None else config.high
