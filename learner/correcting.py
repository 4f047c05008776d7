"""Correcting: weights and masks for tokens that another policy sampled, as configs/correction.py says."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from configs.correction import CorrectionConfig, RejectionConfig
from learner.algorithms import importance, rejection, segments
from learner.batch import Tokens


class Correction(NamedTuple):
    """Without gradient."""

    weights: Tensor
    """float32[N], what each token's policy loss is multiplied by."""
    is_kept: Tensor
    """bool[N], whether each token is in the loss at all."""
    is_bounded: Tensor
    """bool[N], whether each weight lay outside its bounds, and was truncated or masked."""


@torch.no_grad()
def correct(log_ratio: Tensor, tokens: Tokens, *, num_sequences: int, config: CorrectionConfig) -> Correction:
    """From log(proximal/generator) of the tokens of whole trajectories, float32[N]."""
    is_kept = _kept(log_ratio, tokens.sequences, num_sequences=num_sequences, config=config)
    if config.level == "none":
        return Correction(torch.ones_like(log_ratio), is_kept, torch.zeros_like(is_kept))
    ratios = importance.LEVELS[config.level](log_ratio, tokens.sequences, num_sequences=num_sequences)
    high = _upper_bound(tokens, num_sequences=num_sequences, config=config)
    return Correction(
        _weights(ratios, tokens.sequences, num_sequences=num_sequences, high=high, config=config),
        is_kept,
        is_bounded=(ratios > high) | (ratios < (config.low or 0.0)),
    )


def _weights(
    ratios: Tensor, sequences: Tensor, *, num_sequences: int, high: float | Tensor, config: CorrectionConfig
) -> Tensor:
    if config.bound == "mask":
        weights = importance.mask(ratios, low=config.low or 0.0, high=high)
    else:
        weights = importance.truncate(ratios, low=config.low, high=high)
    if not config.normalise:
        return weights
    counted = weights
    if config.level != "token":
        counted = importance.one_per_sequence(weights, sequences, num_sequences=num_sequences)
    return importance.normalise(weights, mean=counted.mean())


def _upper_bound(tokens: Tokens, *, num_sequences: int, config: CorrectionConfig) -> float | Tensor:
    """One number, or one per token; a trajectory's lag is that of its oldest token."""
    high = math.inf if config.high is None else config.high
    if not config.by_lag:
        return high
    lags = tokens.lags
    if config.level != "token":
        lags = segments.maxima(lags, tokens.sequences, num_segments=num_sequences)[tokens.sequences]
    return importance.bound_by_lag(lags, bounds={0: high, **{entry.min_lag: entry.high for entry in config.by_lag}})


def _kept(log_ratio: Tensor, sequences: Tensor, *, num_sequences: int, config: CorrectionConfig) -> Tensor:
    is_kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for entry in config.reject:
        is_kept = is_kept & _passes(log_ratio, sequences, num_sequences=num_sequences, entry=entry)
    if config.veto:
        low, high = config.veto
        is_kept = is_kept & rejection.veto(log_ratio, sequences, num_sequences=num_sequences, low=low, high=high)
    return is_kept


def _passes(log_ratio: Tensor, sequences: Tensor, *, num_sequences: int, entry: RejectionConfig) -> Tensor:
    high = math.inf if entry.high is None else entry.high
    if entry.statistic == "k1":
        return rejection.keep_k1(
            log_ratio, sequences, num_sequences=num_sequences, over=entry.over, low=entry.low or 0.0, high=high
        )
    keep = rejection.keep_k2 if entry.statistic == "k2" else rejection.keep_k3
    return keep(log_ratio, sequences, num_sequences=num_sequences, over=entry.over, high=high)
