"""A policy small enough to write out: 3 tokens, length 3, 27 sequences, one softmax per prefix, everything in float64.

Expectations over the generator are sums, so bias shows without noise.
"""

from functools import cache, partial

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms import find, policy_losses, segments
from slipstream.learner.algorithms.importance import truncate
from slipstream.learner.algorithms.inputs import LossInputs, RatioInputs
from tests.unit.learner.inputs import POLICY_LOSSES

DRIFT, PAIRS, CAP, LENGTH = 0.7, 20, 2.0, 3
WRITTEN = torch.cartesian_prod(*[torch.arange(3)] * LENGTH)
SEQUENCES = torch.arange(27).repeat_interleave(LENGTH)
STATES = torch.stack([0 * WRITTEN[:, 0], 1 + WRITTEN[:, 0], 4 + 3 * WRITTEN[:, 0] + WRITTEN[:, 1]], dim=1)
"""Index of each token's prefix."""


def logprobs_of(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=1)[STATES, WRITTEN].flatten()


def per_sequence(values: Tensor) -> Tensor:
    return segments.sums(values, SEQUENCES, num_segments=27)


@cache
class Enumeration:
    """All sequences with rewards and log-probabilities of learner and generator, and exact gradients."""

    def __init__(self, *, seed: int, drift: float) -> None:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logits = normal(13, 3).requires_grad_()
        generator_logprobs = logprobs_of(self.logits.detach() + drift * normal(13, 3))
        self.learner_logprobs = logprobs_of(self.logits)
        self.rewards = normal(27)
        self.frequencies = per_sequence(generator_logprobs).exp()
        advantages = (self.rewards - self.frequencies @ self.rewards)[SEQUENCES]
        log_ratio, learner = self.learner_logprobs - generator_logprobs, self.learner_logprobs.detach()
        self.inputs = LossInputs(log_ratio, advantages, learner, SEQUENCES, 27, is_selected=advantages > 1)
        # d E_learner[R] / d logits
        self.exact_gradient = self._gradient((per_sequence(self.learner_logprobs).exp() * self.rewards).sum())

    def weights(self, level: str) -> Tensor:
        """Untruncated importance weights of the tokens."""
        return find(f"importance.{level}_level")(RatioInputs(self.inputs.log_ratio.detach(), SEQUENCES, 27))

    def gradient(self, losses: Tensor) -> Tensor:
        """Minus d E_generator[sum over tokens of the loss] / d logits: the direction that a step takes."""
        return self._gradient(-(self.frequencies[SEQUENCES] * losses).sum())

    def error(self, losses: Tensor) -> float:
        """Relative to the exact gradient."""
        return float((self.gradient(losses) - self.exact_gradient).norm() / self.exact_gradient.norm())

    def _gradient(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient


def test_sequence_weights_give_the_exact_gradient_with_any_baseline_and_truncated_or_token_weights_do_not():
    errors = []
    for seed in range(PAIRS):
        world = Enumeration(seed=seed, drift=DRIFT)
        weights = world.weights("sequence")
        assert float(world.frequencies @ weights[::LENGTH]) == pytest.approx(1, abs=1e-12)
        assert float(world.frequencies @ truncate(weights, high=CAP)[::LENGTH]) < 1
        for baseline in (-3.0, 0.0, 10.0):
            assert world.error(-weights * (world.rewards - baseline)[SEQUENCES] * world.learner_logprobs) < 1e-6
        reinforce = policy_losses.reinforce(world.inputs)
        biased = truncate(weights, high=CAP), world.weights("token"), 1.0
        errors.append([world.error(each * reinforce) for each in biased])
    truncated, token, none = torch.tensor(errors).mean(0)
    assert 0.1 < truncated < token / 1.5 < 0.45
    assert token < none / 1.1


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"clip_cov"}))
def test_a_loss_has_the_exact_gradient_at_ratio_one_and_still_points_uphill_near_the_generator(name):
    for seed in range(PAIRS):
        for drift in (0.0, 0.1):
            world = Enumeration(seed=seed, drift=drift)
            # LUSPO's loss is LENGTH times as large.
            losses = POLICY_LOSSES[name](world.inputs) / (LENGTH if name == "luspo" else 1)
            assert drift or world.error(losses) < 1e-6
            uphill = torch.cosine_similarity(world.gradient(losses).flatten(), world.exact_gradient.flatten(), dim=0)
            assert uphill > 0.95, seed
