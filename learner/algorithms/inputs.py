"""Input records of algorithm functions, built-in and user-defined, which must not modify tensors in place.

Log-probabilities are in nats and named by policy: generator (which sampled the token), learner, reference.
"""

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def known(column: Tensor | None) -> Tensor:
    """Assert that a column is filled."""
    assert column is not None, "a column is filled before it is read"
    return column


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """A step's B >= 1 trajectories that count in a baseline, and their N trained tokens in order.

    Group sizes vary, because trajectories need a valid reward.

    Example, token columns left out: AdvantageInputs(rewards=[1, 0, 1], groups=[0, 0, 1], lengths=[4, 2, 3],
    num_trained=[4, 2, 3], is_correct=[True, False, True], greedy_rewards=[nan, nan, nan], parts={}, ...)
    """

    rewards: Float[Tensor, "B"]
    """float64, after shaping by `algorithm.reward`."""
    groups: Int[Tensor, "B"]
    """From 0 without gaps."""
    lengths: Int[Tensor, "B"]
    """Model-written tokens, trained or not."""
    num_trained: Int[Tensor, "B"]
    is_correct: Bool[Tensor, "B"]
    """True if entirely correct."""
    greedy_rewards: Float[Tensor, "B"]
    """float64, reward of the greedy answer to the same prompt, or NaN."""
    parts: dict[str, Tensor]
    """Name -> float64[B], NaN for trajectories without this reward part."""
    sources: list[str]

    sequences: Int[Tensor, "N"]
    """Trajectory of each token."""
    turns: Int[Tensor, "N"]
    """From 0 in each trajectory."""
    positions: Int[Tensor, "N"]
    """Among the trajectory's model-written tokens, trained or not."""
    positions_in_turn: Int[Tensor, "N"]
    """Among those of the turn."""
    token_rewards: Float[Tensor, "N"]
    """float64: each turn's reward at its last token, the rest at the trajectory's, minus any KL penalty."""
    generator_logprobs: Float[Tensor, "N"]
    """float32, under the sampled distribution."""
    observations: Int[Tensor, "N"] | None = None
    """Hash of the tokens between the turn and the previous one, or the context's start; None unless needed."""
    learner_logprobs: Float[Tensor, "N"] | None = None
    """float32, at the start of the step; None unless needed."""
    collisions: Float[Tensor, "N"] | None = None
    """Probability that two samples of the learner are equal; None unless needed."""
    values: Float[Tensor, "N"] | None = None
    """float32, critic's value of the state before each token."""
    process_rewards: Float[Tensor, "N"] | None = None
    """float32, from the process reward model."""
    correction_weights: Float[Tensor, "N"] | None = None
    """float32, importance weights; None if they are computed with the loss."""
    state: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the function keeps across steps and checkpoints."""

    @property
    def num_sequences(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A microbatch's N >= 1 tokens that count in the policy loss.

    Sequences are sampling contexts without rejected and masked tokens. A trajectory may have several.

    Example: LossInputs(log_ratio=[0.1, -0.2, 0], advantages=[1, 1, -1], learner_logprobs=[-0.5, -1, -2],
    sequences=[0, 0, 1], num_sequences=2)
    """

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_proximal), float32 within +-20. The only field with a gradient, that of log pi_learner."""
    advantages: Float[Tensor, "N"]
    """float32, as returned by `algorithm.advantage`."""
    learner_logprobs: Float[Tensor, "N"]
    """float32, without gradient: formulas differentiate `log_ratio`."""
    sequences: Int[Tensor, "N"]
    """Context of each token, from 0 without gaps."""
    num_sequences: int
    is_selected: Bool[Tensor, "N"] | None = None
    """Tokens picked by the loss's selector, if any, from the whole update."""

    def take(self, is_taken: Bool[Tensor, "N"]) -> "LossInputs":
        """Select tokens and renumber their contexts."""
        numbers, sequences = torch.unique(self.sequences[is_taken], return_inverse=True)
        is_selected = None if self.is_selected is None else self.is_selected[is_taken]
        log_ratio, advantages, logprobs = (
            column[is_taken] for column in (self.log_ratio, self.advantages, self.learner_logprobs)
        )
        return LossInputs(log_ratio, advantages, logprobs, sequences, len(numbers), is_selected)


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """N tokens before their optimizer update, from all microbatches and ranks, without gradient.

    Local masks (`MaskConfig.is_local`) get one microbatch.
    """

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_generator), float32 within +-20."""
    advantages: Float[Tensor, "N"]
    """float32."""
    learner_logprobs: Float[Tensor, "N"]
    """float32."""
    sequences: Int[Tensor, "N"]
    """Context of each token. Numbers may have gaps."""
    num_sequences: int
    """Upper bound of the context numbers, exclusive."""
    is_counted: Bool[Tensor, "N"]
    """False for tokens that the correction rejects."""
    seed: int = 0
    """Equal on every rank."""


@dataclass(frozen=True, slots=True)
class RatioInputs:
    """N tokens in complete contexts, for importance weights and rejection."""

    log_ratio: Float[Tensor, "N"]
    """log(pi_numerator / pi_denominator), float32 within +-20."""
    sequences: Int[Tensor, "N"]
    """Context of each token. Numbers may have gaps."""
    num_sequences: int
    """Upper bound of the context numbers, exclusive."""


@dataclass(frozen=True, slots=True)
class KlInputs:
    """Log-probabilities of the same N tokens under the compared policies, float32."""

    learner_logprobs: Float[Tensor, "N"]
    """With gradient if the estimate is a loss."""
    reference_logprobs: Float[Tensor, "N"]
    """Without gradient."""
    generator_logprobs: Float[Tensor, "N"] | None = None
    """Without gradient; None if the learner is the sampler."""


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """An optimizer update's B trajectories, over all microbatches and ranks."""

    num_tokens: Int[Tensor, "B"]
    """Tokens in the denominator, with or without rejected ones (`correction.loss_denominator`)."""
    groups: Int[Tensor, "B"]
    length: int
    """Constant of `seq_mean_token_sum_norm`, tokens."""
