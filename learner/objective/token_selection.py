"""Choosing: tokens picked out among all of an optimizer update by how far the learner has moved since they were made.

Needs the learner's log-probabilities at the start of the update, of all its tokens; so any split of the update into
microbatches or ranks picks the same ones.
"""

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.policy_losses import ClipCovConfig, KlCovConfig, M2poConfig, OpsmConfig
from slipstream.learner.algorithms import importance, token_masks
from slipstream.learner.batching.batch import Batch, Tokens, known


@torch.no_grad()
def select_tokens(batch: Batch, *, config: AlgorithmConfig, update: int, seed: int) -> Batch:
    """Fill `is_trusted` and `is_selected` for the tokens of optimizer update `update` of the step."""
    own = batch.trajectories.updates[batch.tokens.sequences] == update
    tokens = batch.tokens
    is_trusted = torch.ones_like(own) if tokens.is_trusted is None else tokens.is_trusted.clone()
    is_trusted[own] = _passes_masks(batch, own, config=config)
    is_selected = torch.zeros_like(own) if tokens.is_selected is None else tokens.is_selected.clone()
    is_selected[own] = _selected(batch, own, config=config, seed=seed)
    return batch.with_tokens(is_trusted=is_trusted, is_selected=is_selected)


def _passes_masks(batch: Batch, own: Tensor, *, config: AlgorithmConfig) -> Tensor:
    tokens = batch.tokens.take(own)
    counts = _counts(tokens)
    log_ratio = importance.token_log_ratio(known(tokens.current_logprobs), tokens.generator_logprobs)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for mask in config.masks:
        if isinstance(mask, M2poConfig):
            kept[counts] &= token_masks.m2po_mask(
                log_ratio[counts], known(tokens.advantages)[counts], threshold=mask.threshold
            )
        elif isinstance(mask, OpsmConfig):
            kept &= token_masks.opsm_mask(
                log_ratio,
                known(tokens.advantages),
                tokens.sequences,
                num_sequences=batch.num_trajectories,
                delta=mask.delta,
            )
    return kept


def _selected(batch: Batch, own: Tensor, *, config: AlgorithmConfig, seed: int) -> Tensor:
    """Tokens that Clip-Cov leaves in, or those that KL-Cov holds back; none for other losses."""
    loss, tokens = config.policy_loss, batch.tokens.take(own)
    if not isinstance(loss, ClipCovConfig | KlCovConfig):
        return torch.zeros(len(tokens.sequences), dtype=torch.bool, device=own.device)
    counts = _counts(tokens)
    selected = torch.zeros_like(counts)
    covariances = token_masks.covariance(known(tokens.advantages)[counts], known(tokens.current_logprobs)[counts])
    if isinstance(loss, KlCovConfig):
        selected[counts] = token_masks.kl_cov_mask(covariances, share=loss.share)
        return selected
    selected[counts] = token_masks.clip_cov_mask(
        covariances,
        share=loss.share,
        low=loss.covariance_low,
        high=loss.covariance_high,
        generator=torch.Generator().manual_seed(seed),
    )
    return selected


def _counts(tokens: Tokens) -> Tensor:
    """bool[N]: what the correction, where it is known by now, leaves in the policy loss; to choose among others would
    spend a share, or a mean, on tokens that no loss is made of."""
    if tokens.is_kept is None:
        return torch.ones_like(tokens.sequences, dtype=torch.bool)
    return tokens.is_kept & (known(tokens.correction_weights) > 0)
