"""Aggregation: reduction of token losses to one number.

Each function returns one weight per sequence of an optimizer update. loss = sum over tokens of weight * token loss.
T_i is `AggregationInputs.num_tokens`, and B counts the sequences with T_i > 0, over all microbatches and ranks. If T_i
includes rejected tokens, rejection shrinks the step.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import AggregationInputs


def token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Mean over all tokens.

    weight = 1 / sum_j T_j

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return _present(inputs) / inputs.num_tokens.sum().clamp(min=1)


def token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Sum over all tokens, so the step grows with the batch.

    weight = 1

    Source: REINFORCE, Williams 1992, eq. 11, before any mean.
    """
    return _present(inputs)


def seq_mean_token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Mean over the tokens of a sequence, mean over sequences.

    weight_i = 1 / (B * T_i)

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return _present(inputs) / (inputs.num_tokens.clamp(min=1) * _num_present(inputs.num_tokens))


def seq_mean_token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Sum over the tokens of a sequence, mean over sequences.

    weight = 1 / B

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 (also divides by a constant length).
    """
    return _present(inputs) / _num_present(inputs.num_tokens)


def seq_mean_token_sum_norm(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """`seq_mean_token_sum` divided by a constant length.

    weight = 1 / (B * length)

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    return seq_mean_token_sum(inputs) / inputs.length


def prompt_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Equal weight per prompt, divided evenly over its sequences' tokens.

    weight_i = 1 / (G * sum_{j in group of i} T_j), G = number of groups with tokens

    Source: ScaleRL, arXiv:2510.13786 (prompt average); per prompt as in DAPO, arXiv:2503.14476, eq. 8.
    """
    lengths, groups = inputs.num_tokens.to(torch.float64), inputs.groups
    per_group = segments.sums(lengths, groups, num_segments=segments.count(groups))
    return _present(inputs) / (per_group.clamp(min=1)[groups] * _num_present(per_group))


def _present(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    return (inputs.num_tokens > 0).to(torch.float64)


def _num_present(num_tokens: Int[Tensor, "B"] | Float[Tensor, "B"]) -> Int[Tensor, ""]:
    return (num_tokens > 0).sum().clamp(min=1)
