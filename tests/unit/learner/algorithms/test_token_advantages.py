import itertools

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import reward_shaping, token_advantages

gae = jaxtyped(token_advantages.gae, typechecker=beartype)
length_adaptive_lambda = jaxtyped(token_advantages.length_adaptive_lambda, typechecker=beartype)
returns_to_go = jaxtyped(reward_shaping.returns_to_go, typechecker=beartype)
vtrace = jaxtyped(token_advantages.vtrace, typechecker=beartype)

LENGTHS = [3, 1, 0, 5]
SEQUENCES = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ALONE = torch.zeros(3, dtype=torch.int64)
NONE = torch.zeros(0, dtype=torch.int64)


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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


def masked_gae(rewards, values, is_ours, *, gamma, lam):
    """The loop over one trajectory with tool tokens in it, which are stepped over."""
    advantages, following, running = torch.zeros_like(rewards), 0.0, 0.0
    for index in reversed(range(len(rewards))):
        if is_ours[index]:
            running = rewards[index] + gamma * following - values[index] + gamma * lam * running
            following = values[index]
            advantages[index] = running
    return advantages


def masked_vtrace(rewards, values, ratio, *, gamma, lam, rho_bar, c_bar):
    """v_s by its definition, a sum of products, not by the recursion."""
    following, targets = torch.cat([values[1:], wide(0)]), values.clone()
    for start in range(len(values)):
        for index in range(start, len(values)):
            error = min(rho_bar, ratio[index]) * (rewards[index] + gamma * following[index] - values[index])
            traces = [lam * min(c_bar, float(r)) for r in ratio[start:index]]
            targets[start] += gamma ** (index - start) * torch.tensor(traces).prod() * error
    nexts = torch.cat([targets[1:], wide(0)])
    return ratio.clamp(max=rho_bar) * (rewards + gamma * nexts - values), targets


def test_gae_of_three_tokens_by_hand():
    rewards, values = wide(0, 1, 2), wide(0.5, 1, -1)
    advantages, returns = gae(rewards, values, ALONE, num_sequences=1, gamma=0.5, lam=0.5)
    # The errors are 0 + 0.5 - 0.5, then 1 - 0.5 - 1, then 2 + 1.
    assert advantages.tolist() == [0.0 + 0.25 * 0.25, -0.5 + 0.25 * 3, 3.0]
    assert returns.tolist() == [0.5625, 1.25, 2.0]


def test_lam_one_is_the_discounted_future_less_the_value():
    rewards, values = drawn(0), drawn(1)
    advantages, returns = gae(rewards, values, SEQUENCES, num_sequences=4, gamma=0.9, lam=1.0)
    future = torch.cat([sums_to_go(part, 0.9) for (part,) in per_trajectory(rewards)])
    assert torch.allclose(advantages, future - values)
    assert torch.allclose(returns, future)


def test_lam_zero_is_the_temporal_difference():
    rewards, values = drawn(0), drawn(1)
    advantages, _ = gae(rewards, values, SEQUENCES, num_sequences=4, gamma=0.9, lam=0.0)
    parts = [r + 0.9 * torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) - v for r, v in per_trajectory(rewards, values)]
    assert torch.allclose(advantages, torch.cat(parts))


def test_without_values_a_terminal_reward_is_discounted_back():
    for lam in (0.95, 1.0):
        advantages, _ = gae(wide(0, 0, 7), wide(0, 0, 0), ALONE, num_sequences=1, gamma=0.5, lam=lam)
        assert torch.allclose(advantages, 7 * (0.5 * lam) ** wide(2, 1, 0))


def test_a_perfect_critic_leaves_no_advantage():
    rewards = drawn(0)
    values = returns_to_go(rewards, SEQUENCES, num_sequences=4, gamma=0.9)
    advantages, returns = gae(rewards, values, SEQUENCES, num_sequences=4, gamma=0.9, lam=0.7)
    assert advantages.abs().max() < 1e-12
    assert torch.allclose(returns, values)


def test_masked_tool_tokens_are_as_good_as_deleted():
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        rewards, values = (torch.randn(12, dtype=torch.float64, generator=generator) for _ in range(2))
        is_ours = torch.rand(12, generator=generator) < 0.6
        poisoned = torch.where(is_ours, values, 1e30)
        kept = torch.zeros(int(is_ours.sum()), dtype=torch.int64)
        advantages, _ = gae(rewards[is_ours], values[is_ours], kept, num_sequences=1, gamma=0.9, lam=0.8)
        assert torch.allclose(advantages, masked_gae(rewards, poisoned, is_ours, gamma=0.9, lam=0.8)[is_ours])


def test_lam_may_differ_between_trajectories():
    rewards, values, lam = drawn(0), drawn(1), wide(0.1, 0.5, 0.7, 1.0)
    together, _ = gae(rewards, values, SEQUENCES, num_sequences=4, gamma=0.9, lam=lam)
    for index in range(4):
        apart, _ = gae(rewards, values, SEQUENCES, num_sequences=4, gamma=0.9, lam=float(lam[index]))
        assert together[index == SEQUENCES].equal(apart[index == SEQUENCES])


def test_a_trajectory_does_not_see_the_others():
    rewards, values, ratio = drawn(0), drawn(1), drawn(2) / 2
    settings = {"gamma": 0.9, "lam": 0.8}
    for chosen in range(4):
        mine = chosen == SEQUENCES
        alone = torch.zeros(LENGTHS[chosen], dtype=torch.int64)
        few = (rewards[mine], values[mine], alone)
        together = gae(rewards, values, SEQUENCES, num_sequences=4, **settings)
        corrected = vtrace(rewards, values, ratio, SEQUENCES, num_sequences=4, rho_bar=1.0, c_bar=1.0, **settings)
        apart = vtrace(few[0], few[1], ratio[mine], alone, num_sequences=1, rho_bar=1.0, c_bar=1.0, **settings)
        for all_of_them, one in zip(together, gae(*few, num_sequences=1, **settings), strict=True):
            assert all_of_them[mine].equal(one)
        for all_of_them, one in zip(corrected, apart, strict=True):
            assert all_of_them[mine].equal(one)


def test_nothing_comes_of_nothing():
    assert [part.shape for part in gae(wide(), wide(), NONE, num_sequences=0, gamma=1.0, lam=1.0)] == [(0,), (0,)]
    assert [part.shape for part in gae(wide(), wide(), NONE, num_sequences=2, gamma=1.0, lam=wide(1, 1))] == [(0,)] * 2
    targets = vtrace(wide(), wide(), wide(), NONE, num_sequences=0, gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0)
    assert [part.shape for part in targets] == [(0,), (0,)]


def test_a_critics_targets_carry_no_gradient():
    values, ratio = drawn(1).requires_grad_(), drawn(2).requires_grad_()
    kept = gae(drawn(0), values, SEQUENCES, num_sequences=4, gamma=1.0, lam=1.0)
    corrected = vtrace(drawn(0), values, ratio, SEQUENCES, num_sequences=4, gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0)
    assert not any(part.requires_grad for part in (*kept, *corrected))


def test_length_adaptive_lambda_by_hand():
    assert length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 2000]), alpha=0.05).tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 0.5, 0.99]
    )


def test_length_adaptive_lambda_weighs_errors_by_alpha_times_the_length():
    lam = float(length_adaptive_lambda(torch.tensor([400]), alpha=0.05))
    assert sum(lam**k for k in range(100_000)) == pytest.approx(0.05 * 400, rel=1e-4)


def test_vtrace_of_three_tokens_by_hand():
    rewards, values, ratio = wide(0, 0, 8), wide(1, 2, 4), wide(2, 0.5, 0.25)
    settings = {"num_sequences": 1, "gamma": 1.0, "lam": 1.0, "rho_bar": 1.5, "c_bar": 1.0}
    advantages, targets = vtrace(rewards, values, ratio.log(), ALONE, **settings)
    # The errors are 1.5 * 1, 0.5 * 2 and 0.25 * 4; carried back with 1 and 0.5 they are 3, 1.5 and 1.
    assert targets.tolist() == pytest.approx([4.0, 3.5, 5.0])
    assert advantages.tolist() == pytest.approx([1.5 * (3.5 - 1), 0.5 * (5 - 2), 0.25 * (8 - 4)])


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (5.0, 0.5), (1e9, 1e9)])
def test_vtrace_is_its_definition(rho_bar, c_bar):
    rewards, values, ratio = drawn(0), drawn(1), drawn(2).exp()
    settings = {"gamma": 0.9, "lam": 0.8, "rho_bar": rho_bar, "c_bar": c_bar}
    advantages, targets = vtrace(rewards, values, ratio.log(), SEQUENCES, num_sequences=4, **settings)
    parts = [masked_vtrace(*part, **settings) for part in per_trajectory(rewards, values, ratio) if len(part[0])]
    assert torch.allclose(advantages, torch.cat([part[0] for part in parts]))
    assert torch.allclose(targets, torch.cat([part[1] for part in parts]))


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_on_policy_the_targets_of_vtrace_are_the_returns_of_gae(lam):
    rewards, values = drawn(0), drawn(1)
    settings = {"num_sequences": 4, "gamma": 0.9, "lam": lam}
    _, targets = vtrace(rewards, values, torch.zeros_like(values), SEQUENCES, rho_bar=1.0, c_bar=1.0, **settings)
    assert torch.allclose(targets, gae(rewards, values, SEQUENCES, **settings)[1])


def test_on_policy_with_lam_one_vtrace_is_the_n_step_return_whatever_the_critic():
    rewards, values = drawn(0), drawn(1)
    advantages, targets = vtrace(
        rewards, values, 0 * values, SEQUENCES, num_sequences=4, gamma=0.9, lam=1.0, rho_bar=1.0, c_bar=1.0
    )
    future = returns_to_go(rewards, SEQUENCES, num_sequences=4, gamma=0.9)
    assert torch.allclose(targets, future)
    assert torch.allclose(advantages, future - values)


def test_vtrace_refuses_a_rho_bar_below_c_bar():
    with pytest.raises(ValueError, match=r"rho_bar must be >= c_bar \(1.0\), got 0.5"):
        vtrace(wide(1), wide(1), wide(0), ALONE[:1], num_sequences=1, gamma=1.0, lam=1.0, rho_bar=0.5, c_bar=1.0)


class World:
    """Three tokens, three of them in a row, a policy that writes them and one that learns, a reward for each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        prefixes = [prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)]
        logits = {prefix: torch.randn(2, 3, dtype=torch.float64, generator=generator) for prefix in prefixes}
        self.writer = {prefix: both[0].softmax(0) for prefix, both in logits.items()}
        self.learner = {prefix: both[1].softmax(0) for prefix, both in logits.items()}
        self.rewards = {prefix: torch.randn(3, dtype=torch.float64, generator=generator) for prefix in prefixes}

    def values(self, rho_bar: float) -> dict:
        """Of the policy proportional to min(rho_bar * writer, learner)."""
        values: dict = {}
        for prefix in sorted(self.rewards, key=len, reverse=True):
            weights = torch.minimum(rho_bar * self.writer[prefix], self.learner[prefix])
            following = wide(*(values.get((*prefix, token), 0.0) for token in range(3)))
            values[prefix] = float((weights / weights.sum() * (self.rewards[prefix] + following)).sum())
        return values

    def expected_targets(self, values: dict, *, rho_bar: float, c_bar: float) -> dict:
        """v of each prefix, averaged over all 27 texts as the writer writes them."""
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


@pytest.mark.parametrize("c_bar", [0.1, 1.0])
def test_vtrace_reaches_its_fixed_point_from_anywhere(c_bar):
    world = World()
    values = dict.fromkeys(world.rewards, 5.0)
    for _ in range(200):
        values = world.expected_targets(values, rho_bar=1.0, c_bar=c_bar)
    assert values == pytest.approx(world.values(1.0), abs=1e-6)


def test_without_truncation_one_step_of_vtrace_is_the_value_of_the_learner():
    world = World()
    nothing = dict.fromkeys(world.rewards, 0.0)
    targets = world.expected_targets(nothing, rho_bar=1e6, c_bar=1e6)
    assert targets == pytest.approx(world.values(1e6), abs=1e-12)
