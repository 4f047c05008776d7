"""What a user might write: an advantage and a policy loss of their own."""

import torch


def centred(rewards, groups):
    """Rewards minus the batch's mean."""
    return rewards - rewards.mean()


def squashed(log_ratio, advantages, sequences, *, sharpness):
    """A ratio that saturates."""
    return -advantages * torch.tanh(sharpness * log_ratio) / sharpness


def group_means_gone(rewards, groups):
    """Trusts that groups are counted without gaps."""
    means = torch.stack([rewards[groups == group].mean() for group in range(int(groups.max()) + 1)])
    assert means.isfinite().all()
    return rewards - means[groups]


def weighed_by_length(log_ratio, advantages, sequences):
    """Trusts that sequences are counted without gaps, and that there is one."""
    lengths = torch.bincount(sequences)
    assert (lengths > 0).all()
    return -advantages * log_ratio.exp() / lengths[sequences]
