"""Advantages: rewards of groups -> one number per trajectory.

Groups may differ in size; `groups` says which group each reward belongs to. Deviations are taken from the group's
smallest reward before the mean, so that a group of equal rewards gives exactly 0, not a rounding error.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def grpo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, epsilon: float) -> Float[Tensor, "B"]:
    """Rewards normalised within their group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), with the population standard deviation (divided by n).

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    centered = dr_grpo(rewards, groups)
    std = _group_mean(centered.square(), groups).sqrt()
    return centered / (std[groups] + epsilon)


def dr_grpo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the mean of their group.

    A_i = r_i - mean(r)

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    above_lowest = rewards - _group_min(rewards, groups)[groups]
    return above_lowest - _group_mean(above_lowest, groups)[groups]


def rloo(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Rewards minus the mean of the others in their group; 0 in a group of one.

    A_i = r_i - mean_{j != i}(r_j) = n / (n - 1) * (r_i - mean(r))

    Source: Back to Basics, arXiv:2402.14740, eq. 7.
    """
    sizes = torch.bincount(groups)[groups].to(rewards.dtype)
    return dr_grpo(rewards, groups) * sizes / (sizes - 1).clamp(min=1)


def _group_min(values: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "G"]:
    return values.new_zeros(_num_groups(groups)).scatter_reduce(0, groups, values, "amin", include_self=False)


def _group_mean(values: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "G"]:
    sums = values.new_zeros(_num_groups(groups)).index_add(0, groups, values)
    return sums / torch.bincount(groups).clamp(min=1)


def _num_groups(groups: Int[Tensor, "B"]) -> int:
    return int(groups.max()) + 1 if groups.numel() else 0
