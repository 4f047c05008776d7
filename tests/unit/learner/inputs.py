"""Builders of the algorithm functions' input records. Importing this module enables shape checks of these records."""

import dataclasses
import math
from functools import partial

import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import inputs, policy_losses

checked = partial(jaxtyped, typechecker=beartype)
for name in ("Advantage", "Loss", "Mask", "Ratio", "Kl", "Aggregation"):
    checked(getattr(inputs, f"{name}Inputs"))

HALF = math.log(0.5)
_CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
POLICY_LOSSES = {
    "ppo_clip": partial(checked(policy_losses.ppo_clip), **_CLIPS),
    "dual_clip": partial(checked(policy_losses.ppo_clip), **_CLIPS, dual_clip=3.0),
    "reinforce": checked(policy_losses.reinforce),
    "unclipped": checked(policy_losses.unclipped),
    "clip_cov": partial(checked(policy_losses.clip_cov), **_CLIPS),
    "kl_cov": partial(checked(policy_losses.kl_cov), beta=0.1),
    "cispo": partial(checked(policy_losses.cispo), **_CLIPS),
    "sapo": partial(checked(policy_losses.sapo), tau_positive=1.0, tau_negative=1.05),
    "dro": partial(checked(policy_losses.dro), beta=0.1),
    "aspo": partial(checked(policy_losses.aspo), **_CLIPS, cap=3.0),
    "dppo_tv": partial(checked(policy_losses.dppo), divergence="tv", clip_low=0.2, clip_high=0.2),
    "dppo_kl": partial(checked(policy_losses.dppo), divergence="kl", clip_low=0.05, clip_high=0.05),
    "gspo": partial(checked(policy_losses.gspo), **_CLIPS),
    "gspo_token": partial(checked(policy_losses.gspo), **_CLIPS, form="token"),
    "luspo": partial(checked(policy_losses.gspo), **_CLIPS, form="length_scaled"),
    "gmpo": partial(checked(policy_losses.gmpo), clip_low=0.4, clip_high=0.4),
    "topr": checked(policy_losses.topr),
    "vespo": checked(policy_losses.vespo),
}
"""Name -> loss with settings, without SPPO, which needs win rates as advantages."""


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def advantage_inputs(rewards, groups=None, lengths=None, *, sequences=None, **columns) -> inputs.AdvantageInputs:
    """Trajectories with these rewards, by default in one group and with one token each."""
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else groups
    sequences = torch.arange(len(rewards)) if sequences is None else sequences
    zeros = torch.zeros_like(sequences)
    lengths = torch.bincount(sequences, minlength=len(rewards)) if lengths is None else lengths
    greedy_rewards, sources = torch.full_like(rewards, math.nan), ["test"] * len(rewards)
    defaults = {"num_trained": lengths, "is_correct": rewards > 0.5, "greedy_rewards": greedy_rewards, "parts": {}}
    defaults |= {"sources": sources, "turns": zeros, "positions": zeros, "positions_in_turn": zeros}
    defaults |= {"token_rewards": zeros.double(), "generator_logprobs": zeros.float()}
    own = {"rewards": rewards, "groups": groups, "lengths": lengths, "sequences": sequences}
    return inputs.AdvantageInputs(**(own | defaults | columns))


def token_inputs(token_rewards, sequences, *, num_sequences: int, groups=None, **columns) -> inputs.AdvantageInputs:
    rewards = torch.zeros(num_sequences, dtype=torch.float64)
    return advantage_inputs(rewards, groups, sequences=sequences, token_rewards=token_rewards, **columns)


def loss_inputs(log_ratio, advantages, sequences=None, num_sequences=None, **columns) -> inputs.LossInputs:
    """By default each token is a trajectory. The anchor assigns probability 0.5 to every token."""
    sequences = torch.arange(len(log_ratio)) if sequences is None else sequences
    count = int(sequences.max()) + 1 if len(sequences) else 0
    learner_logprobs = columns.pop("learner_logprobs", HALF + log_ratio.detach())
    count = count if num_sequences is None else num_sequences
    return inputs.LossInputs(log_ratio, advantages, learner_logprobs, sequences, count, **columns)


def over_ratios(function):
    function = checked(function)
    return lambda x, of, *, num_sequences, **settings: function(inputs.RatioInputs(x, of, num_sequences), **settings)


def find_idle(loss, columns: inputs.LossInputs) -> torch.Tensor:
    """Tokens with an advantage that the loss leaves without gradient."""
    leaf = columns.log_ratio.detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(dataclasses.replace(columns, log_ratio=leaf))
    return checked(policy_losses.idle_tokens)(losses, leaf, columns.advantages)
