import itertools

import pytest
import torch

from slipstream.learner.algorithms import token_advantages
from tests.unit.learner.inputs import advantage_inputs, checked, token_inputs, wide

length_adaptive_lambda = checked(token_advantages.length_adaptive_lambda)
PLAIN = {"gamma": 1.0, "lam": 1.0, "critic_lam": 1.0, "length_adaptive_alpha": None, "epsilon": None}


def gae(rewards, values, sequences, *, num_sequences, lam, **settings):
    """Advantages, and returns with the same lambda."""
    inputs = token_inputs(rewards, sequences, num_sequences=num_sequences, values=values)
    return checked(token_advantages.gae)(inputs, **(PLAIN | settings | {"lam": lam, "critic_lam": lam}))


def vtrace(rewards, values, log_ratio, sequences, *, num_sequences, **settings):
    columns = {"learner_logprobs": log_ratio, "generator_logprobs": torch.zeros_like(log_ratio), "values": values}
    inputs = token_inputs(rewards, sequences, num_sequences=num_sequences, **columns)
    return checked(token_advantages.vtrace)(inputs, **settings)


def returns_to_go(rewards, sequences, *, gamma, num_sequences):
    inputs = token_inputs(rewards, sequences, num_sequences=num_sequences)
    return checked(token_advantages.returns_to_go)(inputs, gamma=gamma)


LENGTHS = [3, 1, 0, 5]
SEQUENCES = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ALONE = torch.zeros(3, dtype=torch.int64)


def drawn(seed: int, size: int = 9) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def per_trajectory(*columns: torch.Tensor):
    return zip(*(column.split(LENGTHS) for column in columns), strict=True)


def sums_to_go(values: torch.Tensor, decay: float) -> torch.Tensor:
    sums, running = [], 0.0
    for value in reversed(values.tolist()):
        running = value + decay * running
        sums.append(running)
    return wide(*reversed(sums))


def test_process_rewards_are_compared_with_the_mean_token_of_the_other_members():
    # Token means 2, 4, 1, so the baselines of the first group are 2.5, 1.5, 3. The last trajectory is alone.
    rewards = torch.tensor([1.0, 3.0, 4.0, 0.0, 2.0, 9.0])
    sequences = torch.tensor([0, 0, 1, 2, 2, 3])
    inputs = advantage_inputs(
        wide(1, 0, 0, 1), torch.tensor([0, 0, 0, 1]), sequences=sequences, process_rewards=rewards
    )
    found = checked(token_advantages.prime)(inputs, gamma=0.5)
    first, others = 1.0, -0.5
    expected = [first - 1.5 + 0.25, first + 0.5, others + 2.5, others - 3 - 0.5, others - 1, 0]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def masked_gae(rewards, values, is_ours, *, gamma, lam):
    """Loop over one trajectory that skips tool tokens."""
    advantages, following, running = torch.zeros_like(rewards), 0.0, 0.0
    for index in reversed(range(len(rewards))):
        if is_ours[index]:
            running = rewards[index] + gamma * following - values[index] + gamma * lam * running
            following = values[index]
            advantages[index] = running
    return advantages


def masked_vtrace(rewards, values, ratio, *, gamma, lam, rho_bar, c_bar):
    """v_s by its definition as a sum of products, without recursion."""
    following, targets = torch.cat([values[1:], wide(0)]), values.clone()
    for start in range(len(values)):
        for index in range(start, len(values)):
            error = min(rho_bar, ratio[index]) * (rewards[index] + gamma * following[index] - values[index])
            traces = [lam * min(c_bar, float(r)) for r in ratio[start:index]]
            targets[start] += gamma ** (index - start) * torch.tensor(traces).prod() * error
    nexts = torch.cat([targets[1:], wide(0)])
    return ratio.clamp(max=rho_bar) * (rewards + gamma * nexts - values), targets


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_returns_are_what_a_loop_over_each_sequence_gives_and_leave_their_input_alone(gamma):
    torch.manual_seed(0)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100]
    sequences = torch.arange(11).repeat_interleave(torch.tensor(lengths))
    rewards = torch.randn(len(sequences), dtype=torch.float64)
    expected = [value for part in rewards.split(lengths) for value in sums_to_go(part, gamma).tolist()]
    given = rewards.clone()
    returns = returns_to_go(given, sequences, gamma=gamma, num_sequences=11)
    assert torch.allclose(returns, wide(*expected), atol=1e-12)
    assert given.equal(rewards)


@pytest.mark.parametrize("length", [3, 4, 200])
def test_another_sequence_changes_not_one_bit_however_long(length):
    torch.manual_seed(0)
    mine = torch.randn(3, dtype=torch.float64)
    alone = returns_to_go(mine, ALONE, gamma=0.97, num_sequences=1)
    other = torch.full((length,), 1e30, dtype=torch.float64)
    sequences = torch.arange(2).repeat_interleave(torch.tensor([3, length]))
    assert returns_to_go(torch.cat([mine, other]), sequences, gamma=0.97, num_sequences=2)[:3].equal(alone)


def test_gae_of_three_tokens_by_hand():
    rewards, values = wide(0, 1, 2), wide(0.5, 1, -1)
    advantages, returns = gae(rewards, values, ALONE, num_sequences=1, gamma=0.5, lam=0.5)
    # The errors are 0 + 0.5 - 0.5, then 1 - 0.5 - 1, then 2 + 1.
    assert advantages.tolist() == [0.0 + 0.25 * 0.25, -0.5 + 0.25 * 3, 3.0]
    assert returns.tolist() == [0.5625, 1.25, 2.0]


def test_masked_tool_tokens_are_as_good_as_deleted():
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        rewards, values = (torch.randn(12, dtype=torch.float64, generator=generator) for _ in range(2))
        is_ours = torch.rand(12, generator=generator) < 0.6
        poisoned = torch.where(is_ours, values, 1e30)
        kept = torch.zeros(int(is_ours.sum()), dtype=torch.int64)
        advantages, _ = gae(rewards[is_ours], values[is_ours], kept, num_sequences=1, gamma=0.9, lam=0.8)
        assert torch.allclose(advantages, masked_gae(rewards, poisoned, is_ours, gamma=0.9, lam=0.8)[is_ours])


def test_lambda_may_adapt_to_the_length_and_differ_from_the_critics():
    inputs = token_inputs(drawn(0), SEQUENCES, num_sequences=4, values=drawn(1))
    settings = PLAIN | {"gamma": 0.9, "length_adaptive_alpha": 0.5, "critic_lam": 0.7}
    advantages, returns = token_advantages.gae(inputs, **settings)
    lam = length_adaptive_lambda(torch.tensor(LENGTHS), alpha=0.5)
    for index in (0, 1, 3):
        own = index == SEQUENCES
        alone, _ = gae(drawn(0), drawn(1), SEQUENCES, num_sequences=4, gamma=0.9, lam=float(lam[index]))
        assert torch.allclose(advantages[own], alone[own])
    assert returns.equal(gae(drawn(0), drawn(1), SEQUENCES, num_sequences=4, gamma=0.9, lam=0.7)[1])


def test_with_epsilon_advantages_are_whitened_and_returns_are_not_as_in_reinforce_plus_plus():
    settings = {"num_sequences": 4, "gamma": 0.9, "lam": 0.8}
    plain, returns = gae(drawn(0), drawn(1), SEQUENCES, **settings)
    whitened, same = gae(drawn(0), drawn(1), SEQUENCES, epsilon=1e-12, **settings)
    assert torch.allclose(whitened, (plain - plain.mean()) / plain.std(correction=0))
    assert same.equal(returns)
    inputs = token_inputs(drawn(0), SEQUENCES, num_sequences=4)
    returns = returns_to_go(drawn(0), SEQUENCES, gamma=0.9, num_sequences=4)
    found = checked(token_advantages.reinforce_plus_plus)(inputs, gamma=0.9, epsilon=1e-12)
    assert torch.allclose(found, (returns - returns.mean()) / returns.std(correction=0))


def test_a_trajectory_does_not_see_the_others():
    rewards, values, ratio = drawn(0), drawn(1), drawn(2) / 2
    settings = {"gamma": 0.9, "lam": 0.8}
    bounded = settings | {"rho_bar": 1.0, "c_bar": 1.0}
    together = gae(rewards, values, SEQUENCES, num_sequences=4, **settings)
    corrected = vtrace(rewards, values, ratio, SEQUENCES, num_sequences=4, **bounded)
    for chosen in range(4):
        mine, alone = chosen == SEQUENCES, torch.zeros(LENGTHS[chosen], dtype=torch.int64)
        few = gae(rewards[mine], values[mine], alone, num_sequences=1, **settings)
        few_corrected = vtrace(rewards[mine], values[mine], ratio[mine], alone, num_sequences=1, **bounded)
        for all_of_them, one in zip((*together, *corrected), (*few, *few_corrected), strict=True):
            assert all_of_them[mine].equal(one), chosen


def test_length_adaptive_lambda_by_hand_weighs_errors_by_alpha_times_the_length():
    found = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 2000]), alpha=0.05)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.99])
    lam = float(length_adaptive_lambda(torch.tensor([400]), alpha=0.05))
    assert sum(lam**k for k in range(100_000)) == pytest.approx(0.05 * 400, rel=1e-4)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (5.0, 0.5), (1e9, 1e9)])
def test_vtrace_is_its_definition(rho_bar, c_bar):
    rewards, values, ratio = drawn(0), drawn(1), drawn(2).exp()
    settings = {"gamma": 0.9, "lam": 0.8, "rho_bar": rho_bar, "c_bar": c_bar}
    advantages, targets = vtrace(rewards, values, ratio.log(), SEQUENCES, num_sequences=4, **settings)
    parts = [masked_vtrace(*part, **settings) for part in per_trajectory(rewards, values, ratio) if len(part[0])]
    assert torch.allclose(advantages, torch.cat([part[0] for part in parts]))
    assert torch.allclose(targets, torch.cat([part[1] for part in parts]))


class World:
    """All sequences of 3 tokens over a vocabulary of 3, with random generator, learner, and rewards."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        prefixes = [prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)]
        logits = {prefix: torch.randn(2, 3, dtype=torch.float64, generator=generator) for prefix in prefixes}
        self.writer = {prefix: both[0].softmax(0) for prefix, both in logits.items()}
        self.learner = {prefix: both[1].softmax(0) for prefix, both in logits.items()}
        self.rewards = {prefix: torch.randn(3, dtype=torch.float64, generator=generator) for prefix in prefixes}

    def values(self, rho_bar: float) -> dict:
        """Values of the policy proportional to min(rho_bar * writer, learner)."""
        values: dict = {}
        for prefix in sorted(self.rewards, key=len, reverse=True):
            weights = torch.minimum(rho_bar * self.writer[prefix], self.learner[prefix])
            following = wide(*(values.get((*prefix, token), 0.0) for token in range(3)))
            values[prefix] = float((weights / weights.sum() * (self.rewards[prefix] + following)).sum())
        return values

    def expected_targets(self, values: dict, *, rho_bar: float, c_bar: float) -> dict:
        """Target of each prefix: its expectation over all 27 texts under the generator."""
        texts = list(itertools.product(range(3), repeat=3))
        steps = [(text[:index], text[index]) for text in texts for index in range(3)]
        learner, writer = (
            torch.stack([policy[p][a] for p, a in steps]).log() for policy in (self.learner, self.writer)
        )
        rewards = torch.stack([self.rewards[p][a] for p, a in steps])
        sequences = torch.arange(27).repeat_interleave(3)
        settings = {"num_sequences": 27, "gamma": 1.0, "lam": 1.0, "rho_bar": rho_bar, "c_bar": c_bar}
        _, targets = vtrace(rewards, wide(*(values[p] for p, _ in steps)), learner - writer, sequences, **settings)
        chances = writer.reshape(27, 3).sum(1).exp().repeat_interleave(3)
        sums = {prefix: [0.0, 0.0] for prefix in values}
        for (prefix, _), chance, target in zip(steps, chances.tolist(), targets.tolist(), strict=True):
            sums[prefix] = [sums[prefix][0] + chance * target, sums[prefix][1] + chance]
        return {prefix: total / chance for prefix, (total, chance) in sums.items()}


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (1.0, 0.3), (0.4, 0.4), (1e6, 1.0), (1e6, 1e6)])
def test_rho_bar_decides_which_policys_values_vtrace_keeps_and_c_bar_does_not(rho_bar, c_bar):
    world = World()
    values = world.values(rho_bar)
    targets = world.expected_targets(values, rho_bar=rho_bar, c_bar=c_bar)
    assert targets == pytest.approx(values, abs=1e-12)


clipped_value_loss = checked(token_advantages.clipped_value_loss)
explained_variance = checked(token_advantages.explained_variance)


def test_clipped_value_loss_by_hand_and_half_the_squared_error_without_a_clip():
    values, returns, before = wide(1, 2, 2, 0, 5), wide(1.5, 3, 1, 3, 2), wide(1, 1, 1, 1, 1)
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.5)
    # within the bound; beyond it toward R; beyond it with R on the other side (twice); below it away from R
    assert loss.tolist() == [0.125, 1.125, 0.5, 4.5, 4.5]
    assert clipped.tolist() == [False, True, False, False, False]
    loss, clipped = clipped_value_loss(wide(1, 9), wide(3, 9), wide(100, 100), clip=None)
    assert loss.tolist() == [2, 0]
    assert not clipped.any()


def test_exactly_the_clipped_tokens_have_no_gradient():
    torch.manual_seed(0)
    values, returns, before = torch.randn(3, 200, dtype=torch.float64)
    values.requires_grad_()
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert clipped.equal(gradient == 0)
    assert 0 < clipped.sum() < 200
    assert torch.allclose(gradient[~clipped], (values - returns)[~clipped])


def test_only_the_critic_learns_and_its_gradient_is_that_of_the_formula():
    torch.manual_seed(0)
    values, returns, before = (each.requires_grad_() for each in torch.randn(3, 20, dtype=torch.float64).unbind())
    for clip in (None, 0.3):
        assert torch.autograd.gradcheck(
            lambda v, clip=clip: clipped_value_loss(v, returns.detach(), before.detach(), clip=clip)[0], values
        )
    clipped_value_loss(values * 2, returns * 3, before * 1, clip=5.0)[0].sum().backward()
    assert [each.grad is not None for each in (values, returns, before)] == [True, False, False]


def test_explained_variance_by_hand():
    returns = wide(1, 2, 3)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 5, returns) == pytest.approx(1)
    assert explained_variance(wide(7, 7, 7), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    # Returns that do not vary have no variance to explain.
    assert explained_variance(wide(1, 2, 3), torch.full((3,), 0.1, dtype=torch.float64)) == 0
    assert explained_variance(wide(1), wide(4)) == 0
    assert explained_variance(wide(), wide()) == 0
