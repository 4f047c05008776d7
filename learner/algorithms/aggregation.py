"""Aggregation: how token losses become one number.

Each function gives the weight of a token in each of the B sequences of one optimizer update; the loss is
sum over tokens of weight * token loss. Weights come from counts over the whole update, all microbatches and all ranks,
so any split of the update into microbatches has the same gradient. Sequences without a loss token do not count.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_mean(num_tokens: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Every token counts the same.

    weight = 1 / sum_j T_j

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return _present(num_tokens) / num_tokens.sum().clamp(min=1)


def seq_mean_token_mean(num_tokens: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Every sequence counts the same; a token of a long one counts less.

    weight_i = 1 / (B * T_i)

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return _present(num_tokens) / (num_tokens.clamp(min=1) * _num_sequences(num_tokens))


def seq_mean_token_sum(num_tokens: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Token losses are added up within a sequence, and averaged over sequences.

    weight = 1 / B

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 (there divided by a constant length instead).
    """
    return _present(num_tokens) / _num_sequences(num_tokens)


def _present(num_tokens: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    return (num_tokens > 0).to(torch.float64)


def _num_sequences(num_tokens: Int[Tensor, "B"]) -> Int[Tensor, ""]:
    return (num_tokens > 0).sum().clamp(min=1)
