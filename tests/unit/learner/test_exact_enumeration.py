"""A policy small enough to write out: 3 tokens, length 3, 27 sequences, one softmax per prefix, everything in float64.

Expectations over the generator are sums, so bias shows without noise.
"""

from functools import cache, cached_property

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms import find, policy_losses, segments
from slipstream.learner.algorithms.importance import truncate
from slipstream.learner.algorithms.inputs import LossInputs, RatioInputs
from tests.unit.learner.inputs import POLICY_LOSSES

VOCABULARY, LENGTH = 3, 3
DRIFT = 0.7
PAIRS = 20
CAP = 2.0


class Enumeration:
    """All sequences with rewards and log-probabilities of learner and generator, and exact gradients."""

    def __init__(self, *, seed: int, drift: float) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.written = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
        self.num_sequences = len(self.written)
        self.sequences = torch.arange(self.num_sequences).repeat_interleave(LENGTH)
        self.states = self._states()
        num_states = int(self.states.max()) + 1
        self.logits = normal(num_states, VOCABULARY).requires_grad_()
        self.generator_logprobs = self.logprobs_of(self.logits.detach() + drift * normal(num_states, VOCABULARY))
        self.learner_logprobs = self.logprobs_of(self.logits)
        self.rewards = normal(self.num_sequences)
        self.frequencies = self.per_sequence(self.generator_logprobs).exp()
        self.advantages = (self.rewards - self.frequencies @ self.rewards)[self.sequences]

    def _states(self) -> Tensor:
        """Index of each token's prefix: 0, then 1 + first token, then 4 + 3 * first + second."""
        before, states = torch.zeros(self.num_sequences, dtype=torch.int64), []
        for index in range(LENGTH):
            states.append(before + (VOCABULARY**index - 1) // (VOCABULARY - 1))
            before = before * VOCABULARY + self.written[:, index]
        return torch.stack(states, dim=1)

    def logprobs_of(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(dim=1)[self.states, self.written].flatten()

    @property
    def log_ratio(self) -> Tensor:
        """Learner to generator, with gradient."""
        return self.learner_logprobs - self.generator_logprobs

    def inputs(self) -> LossInputs:
        """All tokens, with the generator as anchor. Tokens with A > 1 are selected."""
        places = self.sequences, self.num_sequences
        selected = self.advantages > 1
        return LossInputs(
            self.log_ratio, self.advantages, self.learner_logprobs.detach(), *places, is_selected=selected
        )

    def per_sequence(self, values: Tensor) -> Tensor:
        return segments.sums(values, self.sequences, num_segments=self.num_sequences)

    @cached_property
    def exact_gradient(self) -> Tensor:
        """d E_learner[R] / d logits."""
        return self._gradient((self.per_sequence(self.learner_logprobs).exp() * self.rewards).sum())

    def gradient(self, losses: Tensor) -> Tensor:
        """Minus d E_generator[sum over tokens of the loss] / d logits: the direction that a step takes."""
        return self._gradient(-(self.frequencies[self.sequences] * losses).sum())

    def score_gradient(self, weights: Tensor | float) -> Tensor:
        """`gradient` of the weighted score function."""
        return self.gradient(weights * policy_losses.reinforce(self.inputs()))

    def _gradient(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient


@cache
def enumeration(*, seed: int, drift: float) -> Enumeration:
    return Enumeration(seed=seed, drift=drift)


def relative_error(gradient: Tensor, exact: Tensor) -> float:
    return float((gradient - exact).norm() / exact.norm())


def weights_of(world: Enumeration, level: str) -> Tensor:
    """Untruncated importance weights of the tokens."""
    return find(f"importance.{level}_level")(
        RatioInputs(world.log_ratio.detach(), world.sequences, world.num_sequences)
    )


def test_sequence_weights_give_the_exact_gradient_with_any_baseline_and_truncated_or_token_weights_do_not():
    errors = []
    for seed in range(PAIRS):
        world = enumeration(seed=seed, drift=DRIFT)
        weights = weights_of(world, "sequence")
        assert float(world.frequencies @ weights[::LENGTH]) == pytest.approx(1, abs=1e-12)
        assert float(world.frequencies @ truncate(weights, high=CAP)[::LENGTH]) < 1
        for baseline in (-3.0, 0.0, 10.0):
            losses = -weights * (world.rewards - baseline)[world.sequences] * world.learner_logprobs
            assert relative_error(world.gradient(losses), world.exact_gradient) < 1e-6
        biased = truncate(weights, high=CAP), weights_of(world, "token"), 1.0
        errors.append([relative_error(world.score_gradient(each), world.exact_gradient) for each in biased])
    truncated, token, none = torch.tensor(errors).mean(0)
    assert 0.1 < truncated < token / 1.5 < 0.45
    assert token < none / 1.1


LOSSES = {name: loss for name, loss in POLICY_LOSSES.items() if name != "clip_cov"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_exact_gradient_at_ratio_one_and_still_points_uphill_near_the_generator(name):
    for seed in range(PAIRS):
        for drift in (0.0, 0.1):
            world = enumeration(seed=seed, drift=drift)
            # LUSPO's loss is LENGTH times as large.
            step = world.gradient(LOSSES[name](world.inputs())) / (LENGTH if name == "luspo" else 1)
            assert drift or relative_error(step, world.exact_gradient) < 1e-6
            assert torch.cosine_similarity(step.flatten(), world.exact_gradient.flatten(), dim=0) > 0.95, seed
