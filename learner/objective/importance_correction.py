"""Correcting: weights and masks for tokens that another policy sampled, as configs/correction.py says."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.configs.correction import CorrectionConfig, RejectionConfig
from slipstream.learner.algorithms import importance, rejection, segments
from slipstream.learner.algorithms.importance import Bound
from slipstream.learner.batching.batch import Tokens


class Correction(NamedTuple):
    """Without gradient."""

    weights: Tensor
    """float32[N], what each token's policy loss is multiplied by."""
    is_kept: Tensor
    """bool[N], whether each token is in the loss at all."""
    is_bounded: Tensor
    """bool[N], whether each weight lay outside its bounds, and was truncated or masked."""


class _Bounds(NamedTuple):
    low: Bound
    high: Bound


@torch.no_grad()
def correct(
    log_ratio: Tensor, tokens: Tokens, *, learner_log_ratio: Tensor, num_sequences: int, config: CorrectionConfig
) -> Correction:
    """Of the tokens of whole trajectories: weights from log(proximal/generator), rejections from
    log(learner/generator), each float32[N]."""
    is_kept = _kept(learner_log_ratio, tokens, num_sequences=num_sequences, config=config)
    if config.level == "none":
        return Correction(torch.ones_like(log_ratio), is_kept, torch.zeros_like(is_kept))
    ratios = importance.LEVELS[config.level](log_ratio, tokens.sequences, num_sequences=num_sequences)
    bounds = _bounds(config, tokens, num_sequences=num_sequences, is_per_token=config.level == "token")
    return Correction(
        _weights(ratios, tokens.sequences, num_sequences=num_sequences, bounds=bounds, config=config),
        is_kept,
        is_bounded=(ratios > bounds.high) | (ratios < bounds.low),
    )


def _weights(
    ratios: Tensor, sequences: Tensor, *, num_sequences: int, bounds: _Bounds, config: CorrectionConfig
) -> Tensor:
    bound = importance.mask if config.bound == "mask" else importance.truncate
    weights = bound(ratios, low=bounds.low, high=bounds.high)
    if not config.normalise:
        return weights
    counted = weights
    if config.level != "token":
        counted = importance.one_per_sequence(weights, sequences, num_sequences=num_sequences)
    return importance.normalise(weights, mean=counted.mean())


def _bounds(
    config: CorrectionConfig | RejectionConfig, tokens: Tokens, *, num_sequences: int, is_per_token: bool
) -> _Bounds:
    """One number each, or one per token; a trajectory's lag is that of its oldest token."""
    low, high = config.low or 0.0, math.inf if config.high is None else config.high
    if not config.by_lag:
        return _Bounds(low, high)
    lags = tokens.lags
    if not is_per_token:
        lags = segments.maxima(lags, tokens.sequences, num_segments=num_sequences)[tokens.sequences]
    lows = {entry.min_lag: entry.low for entry in config.by_lag if entry.low is not None}
    highs = {entry.min_lag: entry.high for entry in config.by_lag if entry.high is not None}
    return _Bounds(
        importance.bound_by_lag(lags, bounds={0: low, **lows}), importance.bound_by_lag(lags, bounds={0: high, **highs})
    )


def _kept(log_ratio: Tensor, tokens: Tokens, *, num_sequences: int, config: CorrectionConfig) -> Tensor:
    is_kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for entry in config.reject:
        is_kept = is_kept & _passes(log_ratio, tokens, num_sequences=num_sequences, entry=entry)
    if config.veto:
        low, high = config.veto
        is_kept &= rejection.veto(log_ratio, tokens.sequences, num_sequences=num_sequences, low=low, high=high)
    return is_kept


def _passes(log_ratio: Tensor, tokens: Tokens, *, num_sequences: int, entry: RejectionConfig) -> Tensor:
    low, high = _bounds(entry, tokens, num_sequences=num_sequences, is_per_token=entry.over == "token")
    if entry.statistic == "k1":
        return rejection.keep_k1(
            log_ratio, tokens.sequences, num_sequences=num_sequences, over=entry.over, low=low, high=high
        )
    keep = rejection.keep_k2 if entry.statistic == "k2" else rejection.keep_k3
    return keep(log_ratio, tokens.sequences, num_sequences=num_sequences, over=entry.over, high=high)
