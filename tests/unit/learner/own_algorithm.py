"""User-defined advantages and policy losses."""

import torch


def centered(inputs):
    """Rewards minus the batch's mean."""
    return inputs.rewards - inputs.rewards.mean()


def squashed(inputs, *, sharpness):
    """A ratio that saturates."""
    return -inputs.advantages * torch.tanh(sharpness * inputs.log_ratio) / sharpness


def of_turns_parts_and_sources(inputs):
    """Turns of each trajectory, 10 for one of code, 100 times a part of its reward."""
    turns = torch.stack([inputs.turns[inputs.sequences == index].max() + 1 for index in range(inputs.num_sequences)])
    is_code = torch.tensor([source == "code" for source in inputs.sources])
    return turns + 10.0 * is_code + 100 * inputs.parts["a"]


def minus_group_means(inputs):
    """Requires group numbers without gaps."""
    groups = range(int(inputs.groups.max()) + 1)
    means = torch.stack([inputs.rewards[inputs.groups == group].mean() for group in groups])
    assert means.isfinite().all()
    return inputs.rewards - means[inputs.groups]


def weighted_by_length(inputs):
    """Requires sequence numbers without gaps, and at least one sequence."""
    lengths = torch.bincount(inputs.sequences)
    assert (lengths > 0).all()
    assert len(lengths) == inputs.num_sequences
    return -inputs.advantages * inputs.log_ratio.exp() / lengths[inputs.sequences]
