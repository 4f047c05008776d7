"""Aggregation: reduction of token losses to one number.

Each function returns the weight of a token in each of the B sequences of one optimizer update; the loss is
sum over tokens of weight * token loss. Weights come from counts over the whole update, all microbatches and all ranks,
so any split of the update into microbatches has the same gradient. Sequences without a loss token do not count.

`AggregationInputs.num_tokens` is the denominator. Counted before rejection, rejected tokens still count, the others
keep their weight, and the step shrinks with the loss. Counted after it (`rejection.num_kept`), the weights of the rest
add up as if nothing else had been there.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import AggregationInputs


def token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Every token counts the same.

    weight = 1 / sum_j T_j

    Source: DAPO, arXiv:2503.14476, eq. 12.
    """
    return _present(inputs) / inputs.num_tokens.sum().clamp(min=1)


def token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Every token counts 1: the size of the step grows with the batch.

    weight = 1

    Source: REINFORCE, Williams 1992, eq. 11, before any mean.
    """
    return _present(inputs)


def seq_mean_token_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Every sequence counts the same; a token of a long one counts less.

    weight_i = 1 / (B * T_i)

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return _present(inputs) / (inputs.num_tokens.clamp(min=1) * _num_present(inputs.num_tokens))


def seq_mean_token_sum(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Token losses are added up within a sequence, and averaged over sequences.

    weight = 1 / B

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 (there divided by a constant length instead).
    """
    return _present(inputs) / _num_present(inputs.num_tokens)


def seq_mean_token_sum_norm(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Token losses are added up within a sequence, divided by one constant length, and averaged over sequences.

    weight = 1 / (B * length)

    `length` is the same for the whole run, such as the longest response allowed.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    return seq_mean_token_sum(inputs) / inputs.length


def prompt_mean(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    """Every prompt counts the same, and so does every token of one prompt's sequences.

    weight_i = 1 / (G * sum_{j in group of i} T_j), G the groups that have a token

    Source: ScaleRL, arXiv:2510.13786 (prompt average); per prompt as in DAPO, arXiv:2503.14476, eq. 8.
    """
    lengths, groups = inputs.num_tokens.to(torch.float64), inputs.groups
    per_group = segments.sums(lengths, groups, num_segments=segments.count(groups))
    return _present(inputs) / (per_group.clamp(min=1)[groups] * _num_present(per_group))


AGGREGATIONS: dict[str, Callable[[AggregationInputs], Tensor]] = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}
"""`algorithm.aggregation` -> function: weight of a token in each trajectory, float64[B]."""


def _present(inputs: AggregationInputs) -> Float[Tensor, "B"]:
    return (inputs.num_tokens > 0).to(torch.float64)


def _num_present(num_tokens: Int[Tensor, "B"] | Float[Tensor, "B"]) -> Int[Tensor, ""]:
    return (num_tokens > 0).sum().clamp(min=1)
