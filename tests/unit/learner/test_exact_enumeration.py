"""A policy small enough to write out: 3 tokens, length 3, 27 sequences, one softmax per prefix, everything in float64.

Expectations over the generator are sums, so bias shows without noise.
"""

from functools import cache, cached_property, partial

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

    def inputs(self, log_ratio: Tensor | None = None) -> LossInputs:
        """All tokens, with the generator as anchor unless a log-ratio is given. Tokens with A > 1 are selected."""
        return LossInputs(
            self.log_ratio if log_ratio is None else log_ratio,
            self.advantages,
            self.learner_logprobs.detach(),
            self.sequences,
            self.num_sequences,
            is_selected=self.advantages > 1,
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


def test_the_enumeration_is_complete_and_its_gradient_that_of_finite_differences():
    world = enumeration(seed=0, drift=DRIFT)
    assert len({tuple(row) for row in world.written.tolist()}) == VOCABULARY**LENGTH == 27
    assert int(world.states.max()) == 12
    assert float(world.frequencies.sum()) == pytest.approx(1, abs=1e-12)
    assert float(world.per_sequence(world.learner_logprobs.detach()).exp().sum()) == pytest.approx(1, abs=1e-12)
    step = 1e-6

    def expected_reward(logits: Tensor) -> float:
        return float(world.per_sequence(world.logprobs_of(logits)).exp() @ world.rewards)

    exact = world.exact_gradient.flatten()
    for index in range(0, exact.numel(), 5):
        nudge = torch.zeros_like(exact)
        nudge[index] = step
        nudge = nudge.view_as(world.logits)
        below, above = (expected_reward(world.logits.detach() + sign * nudge) for sign in (-1, 1))
        assert float(exact[index]) == pytest.approx((above - below) / (2 * step), abs=1e-8)


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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_on_policy_weights_of_every_level_give_the_exact_gradient(level):
    world = enumeration(seed=0, drift=0.0)
    assert relative_error(world.score_gradient(weights_of(world, level)), world.exact_gradient) < 1e-12


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {name: loss for name, loss in POLICY_LOSSES.items() if name != "clip_cov"}
every_loss = pytest.mark.parametrize("name", LOSSES)


def step_of(name: str, world: Enumeration) -> Tensor:
    """Gradient of the loss. LUSPO's is LENGTH times as large."""
    return world.gradient(LOSSES[name](world.inputs())) / (LENGTH if name == "luspo" else 1)


@every_loss
def test_a_loss_has_the_exact_gradient_at_ratio_one_and_still_points_uphill_near_the_generator(name):
    for seed in range(3):
        world = enumeration(seed=seed, drift=0.0)
        assert relative_error(step_of(name, world), world.exact_gradient) < 1e-6
        assert relative_error(step_of(name, world), world.score_gradient(1.0)) < 1e-6
    for seed in range(PAIRS):
        world = enumeration(seed=seed, drift=0.1)
        cosine = torch.cosine_similarity(step_of(name, world).flatten(), world.exact_gradient.flatten(), dim=0)
        assert cosine > 0.95, seed


@pytest.mark.parametrize(
    "loss",
    [
        policy_losses.unclipped,
        partial(policy_losses.ppo_clip, clip_low=1.0, clip_high=float("inf")),
        partial(policy_losses.cispo, clip_low=None, clip_high=float("inf")),
        partial(policy_losses.dppo, divergence="tv", clip_low=1.0, clip_high=1.0, ratio_cap=float("inf")),
    ],
    ids=["unclipped", "ppo_clip", "cispo", "dppo_tv"],
)
def test_without_its_bounds_a_loss_anchored_at_the_generator_is_token_is(loss):
    world = enumeration(seed=0, drift=DRIFT)
    assert (
        relative_error(world.gradient(loss(world.inputs())), world.score_gradient(weights_of(world, "token"))) < 1e-12
    )


def test_vespo_with_the_plain_weight_is_sequence_is_and_ppo_around_a_recomputed_policy_token_tis_if_weighted():
    world = enumeration(seed=0, drift=DRIFT)
    settings = {"power_positive": 1.0, "power_negative": 1.0, "decay_positive": 0.0, "decay_negative": 0.0}
    gradient = world.gradient(policy_losses.vespo(world.inputs(), **settings))
    assert relative_error(gradient, world.exact_gradient) < 1e-6
    proximal = world.learner_logprobs.detach()
    losses = policy_losses.ppo_clip(world.inputs(world.learner_logprobs - proximal), **CLIPS)
    drift = (proximal - world.generator_logprobs).exp().clamp(max=CAP)
    token_tis = world.score_gradient(truncate(weights_of(world, "token"), high=CAP))
    assert relative_error(world.gradient(drift * losses), token_tis) < 1e-12
    assert relative_error(world.gradient(losses), world.score_gradient(1.0)) < 1e-12
