"""Token selection: tokens picked among all of an optimizer update by the learner's distance from their generator.

It takes the learner's log-probabilities of all tokens of the update as it begins, so any split into microbatches or
ranks picks the same tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.learner.algorithms import importance
from slipstream.learner.algorithms.inputs import MaskInputs, known
from slipstream.learner.batching.batch import Batch, Tokens

Mask = Callable[[MaskInputs], Tensor]


@torch.no_grad()
def select_tokens(batch: Batch, *, masks: Sequence[Mask], selector: Mask | None, update: int, seed: int) -> Batch:
    """Fill `is_trusted` by the masks and `is_selected` by the policy loss's selector, for the tokens of one update.

    `batch` must have `current_logprobs` there; `seed` is for random picks.
    """
    own = batch.trajectories.updates[batch.tokens.sequences] == update
    tokens = batch.tokens.take(own)
    inputs = mask_inputs(tokens, known(tokens.current_logprobs), num_sequences=batch.num_contexts, seed=seed)
    is_trusted = torch.ones_like(own) if batch.tokens.is_trusted is None else batch.tokens.is_trusted.clone()
    for mask in masks:
        is_trusted[own] &= mask(inputs)
    is_selected = torch.zeros_like(own) if batch.tokens.is_selected is None else batch.tokens.is_selected.clone()
    if selector:
        is_selected[own] = selector(inputs)
    return batch.with_tokens(is_trusted=is_trusted, is_selected=is_selected)


def mask_inputs(tokens: Tokens, learner_logprobs: Tensor, *, num_sequences: int, seed: int = 0) -> MaskInputs:
    """Collect what masks decide from; `learner_logprobs` have no gradient."""
    is_counted = torch.ones_like(tokens.sequences, dtype=torch.bool)
    if tokens.is_kept is not None:
        # A share or a mean over rejected tokens would be spent on tokens that no loss is made of.
        is_counted = tokens.is_kept & (known(tokens.correction_weights) > 0)
    return MaskInputs(
        log_ratio=importance.token_log_ratio(learner_logprobs, tokens.generator_logprobs),
        advantages=known(tokens.advantages),
        learner_logprobs=learner_logprobs,
        sequences=tokens.contexts,
        num_sequences=num_sequences,
        is_counted=is_counted,
        seed=seed,
    )
