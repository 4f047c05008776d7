"""Input records of the algorithm functions: all that a function may look at, beside its settings.

A user's own function gets the same record as the built-in ones. Tensors must not be changed in place.
Log-probabilities are in nats and named by the policy that gives them: generator (which sampled the token), learner,
reference.
"""

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def known(column: Tensor | None) -> Tensor:
    """A column that the settings guarantee to be there."""
    assert column is not None, "a column is filled before it is read"
    return column


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The B trajectories of a step that count in a baseline, at least one, and their N tokens that are trained on.

    Tokens lie trajectory after trajectory, in order; tokens of tools are not among them. Trajectories whose reward
    function failed are not here, so a group may have any number of members.

    Example, token columns left out: AdvantageInputs(rewards=[1, 0, 1], groups=[0, 0, 1], lengths=[4, 2, 3],
    num_trained=[4, 2, 3], is_correct=[True, False, True], greedy_rewards=[nan, nan, nan], parts={}, ...)
    """

    rewards: Float[Tensor, "B"]
    """float64, after the shaping of `algorithm.reward`."""
    groups: Int[Tensor, "B"]
    """Group of each trajectory, numbered from 0 without gaps."""
    lengths: Int[Tensor, "B"]
    """Tokens that the model wrote, trained on or not."""
    num_trained: Int[Tensor, "B"]
    """Tokens that are trained on."""
    is_correct: Bool[Tensor, "B"]
    """Whether the answer is entirely right."""
    greedy_rewards: Float[Tensor, "B"]
    """float64, reward of the greedy answer to the same prompt; NaN where there is none."""
    parts: dict[str, Tensor]
    """Named addends of the reward, float64[B]; NaN where a trajectory lacks one."""
    sources: list[str]
    """Data source of each trajectory, B of them."""

    sequences: Int[Tensor, "N"]
    """Trajectory of each token, 0 <= trajectory < B."""
    turns: Int[Tensor, "N"]
    """Turn of the trajectory, from 0."""
    positions: Int[Tensor, "N"]
    """Position among the tokens that the model wrote in the trajectory, counting those that are not trained on."""
    positions_in_turn: Int[Tensor, "N"]
    """Position among those of the turn."""
    token_rewards: Float[Tensor, "N"]
    """float64: what each turn earned at its last token, the rest of the trajectory's reward at its last token, minus
    each token's KL where that is charged in the reward."""
    generator_logprobs: Float[Tensor, "N"]
    """float32, of the distribution each token was sampled from."""
    learner_logprobs: Float[Tensor, "N"] | None = None
    """float32, at the start of the step; None unless the settings, as `algorithm.proximal=recompute`, ask for them."""
    collisions: Float[Tensor, "N"] | None = None
    """Chance that two draws from the learner's distribution are equal; None unless the advantage needs it."""
    values: Float[Tensor, "N"] | None = None
    """float32, the critic's value of the state before each token; None without a critic."""
    correction_weights: Float[Tensor, "N"] | None = None
    """float32, importance weights; None where they are formed with the loss."""
    state: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the function keeps from step to step, empty at first: it may write here, and checkpoints save it."""

    @property
    def num_sequences(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The N tokens of a microbatch that count in the policy loss, each context whole; at least one.

    A trajectory has one context or several; each is a sequence here.

    Example: LossInputs(log_ratio=[0.1, -0.2, 0], advantages=[1, 1, -1], learner_logprobs=[-0.5, -1, -2],
    sequences=[0, 0, 1], num_sequences=2)
    """

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_proximal), float32 within +-20. The only one with a gradient: that of log pi_learner."""
    advantages: Float[Tensor, "N"]
    """float32, whitened or not, as `algorithm.advantage` returns them."""
    learner_logprobs: Float[Tensor, "N"]
    """float32 values alone: formulas differentiate `log_ratio`."""
    sequences: Int[Tensor, "N"]
    """Context of each token, numbered from 0 without gaps."""
    num_sequences: int
    """Number of contexts in the microbatch."""
    is_selected: Bool[Tensor, "N"] | None = None
    """Tokens that the loss's own selector picked among all of the update; None where it has none."""

    def take(self, is_taken: Bool[Tensor, "N"]) -> "LossInputs":
        """The tokens where `is_taken` is true, their contexts numbered anew."""
        numbers, sequences = torch.unique(self.sequences[is_taken], return_inverse=True)
        return LossInputs(
            self.log_ratio[is_taken],
            self.advantages[is_taken],
            self.learner_logprobs[is_taken],
            sequences,
            len(numbers),
            None if self.is_selected is None else self.is_selected[is_taken],
        )

    def with_log_ratio(self, log_ratio: Float[Tensor, "N"]) -> "LossInputs":
        return dataclasses.replace(self, log_ratio=log_ratio)


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """The N tokens of one optimizer update, of all its microbatches and ranks, as the update begins; no gradient."""

    log_ratio: Float[Tensor, "N"]
    """log(pi_learner / pi_generator), float32 within +-20."""
    advantages: Float[Tensor, "N"]
    """float32, as in `LossInputs`."""
    learner_logprobs: Float[Tensor, "N"]
    """float32, of the sampled tokens."""
    sequences: Int[Tensor, "N"]
    """Context of each token; numbers may be missing."""
    num_sequences: int
    """One more than the largest possible number."""
    is_counted: Bool[Tensor, "N"]
    """Tokens that the correction leaves in the loss: a share or a mean is taken over them alone."""
    seed: int = 0
    """Seed of random picks, the same on every rank."""


@dataclass(frozen=True, slots=True)
class RatioInputs:
    """The N tokens of whole contexts that importance weights and rejections are made of; no gradient is used."""

    log_ratio: Float[Tensor, "N"]
    """log(pi_numerator / pi_denominator), float32 within +-20."""
    sequences: Int[Tensor, "N"]
    """Context of each token; numbers may be missing."""
    num_sequences: int
    """One more than the largest possible number."""


@dataclass(frozen=True, slots=True)
class KlInputs:
    """Log-probabilities of the same N tokens under the policies that are compared, float32."""

    learner_logprobs: Float[Tensor, "N"]
    """With gradient where the estimate is a loss."""
    reference_logprobs: Float[Tensor, "N"]
    """The reference policy's, without gradient."""
    generator_logprobs: Float[Tensor, "N"] | None = None
    """Without gradient; None where the learner itself is taken to have sampled."""


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """The B trajectories of one optimizer update, of all its microbatches and ranks."""

    num_tokens: Int[Tensor, "B"]
    """Tokens that the denominator counts; `correction.denominator` decides whether rejected ones are among them."""
    groups: Int[Tensor, "B"]
    """Group of each trajectory, as claimed."""
    length: int
    """The constant of `seq_mean_token_sum_norm`, tokens."""
