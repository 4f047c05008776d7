import itertools

import pytest
import torch

from slipstream.learner.algorithms import advantages, segments, token_advantages
from tests.cases import cases
from tests.unit.learner.inputs import HALF, advantage_inputs, checked, token_inputs, whole, wide

length_adaptive_lambda = checked(token_advantages.length_adaptive_lambda)
PLAIN = {"gamma": 1.0, "lam": 1.0, "critic_lam": 1.0, "length_adaptive_alpha": None, "epsilon": None}


def gae(rewards, values, sequences, *, num_sequences, lam, **settings):
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
    inputs = advantage_inputs(wide(1, 0, 0, 1), whole(0, 0, 0, 1), sequences=sequences, process_rewards=rewards)
    found = checked(token_advantages.prime)(inputs, gamma=0.5)
    first, others = 1.0, -0.5
    expected = [first - 1.5 + 0.25, first + 0.5, others + 2.5, others - 3 - 0.5, others - 1, 0]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


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


def test_gae_and_length_adaptive_lambda_by_hand():
    rewards, values = wide(0, 1, 2), wide(0.5, 1, -1)
    advantages, returns = gae(rewards, values, ALONE, num_sequences=1, gamma=0.5, lam=0.5)
    # The errors are 0 + 0.5 - 0.5, then 1 - 0.5 - 1, then 2 + 1.
    assert advantages.tolist() == [0.0 + 0.25 * 0.25, -0.5 + 0.25 * 3, 3.0]
    assert returns.tolist() == [0.5625, 1.25, 2.0]
    found = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 2000]), alpha=0.05)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.99])
    lam = float(length_adaptive_lambda(torch.tensor([400]), alpha=0.05))
    assert sum(lam**k for k in range(100_000)) == pytest.approx(0.05 * 400, rel=1e-4)


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


def test_lambda_may_adapt_and_with_epsilon_advantages_are_whitened_and_returns_are_not():
    inputs = token_inputs(drawn(0), SEQUENCES, num_sequences=4, values=drawn(1))
    settings = PLAIN | {"gamma": 0.9, "length_adaptive_alpha": 0.5, "critic_lam": 0.7}
    advantages, returns = token_advantages.gae(inputs, **settings)
    lam = length_adaptive_lambda(torch.tensor(LENGTHS), alpha=0.5)
    for index in (0, 1, 3):
        own = index == SEQUENCES
        alone, _ = gae(drawn(0), drawn(1), SEQUENCES, num_sequences=4, gamma=0.9, lam=float(lam[index]))
        assert torch.allclose(advantages[own], alone[own])
    assert returns.equal(gae(drawn(0), drawn(1), SEQUENCES, num_sequences=4, gamma=0.9, lam=0.7)[1])
    settings = {"num_sequences": 4, "gamma": 0.9, "lam": 0.8}
    plain, returns = gae(drawn(0), drawn(1), SEQUENCES, **settings)
    whitened, same = gae(drawn(0), drawn(1), SEQUENCES, epsilon=1e-12, **settings)
    assert torch.allclose(whitened, (plain - plain.mean()) / plain.std(correction=0))
    assert same.equal(returns)
    inputs = token_inputs(drawn(0), SEQUENCES, num_sequences=4)
    returns = returns_to_go(drawn(0), SEQUENCES, gamma=0.9, num_sequences=4)
    found = checked(token_advantages.reinforce_plus_plus)(inputs, gamma=0.9, epsilon=1e-12)
    assert torch.allclose(found, (returns - returns.mean()) / returns.std(correction=0))


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (5.0, 0.5), (1e9, 1e9)])
def test_vtrace_is_its_definition(rho_bar, c_bar):
    rewards, values, ratio = drawn(0), drawn(1), drawn(2).exp()
    settings = {"gamma": 0.9, "lam": 0.8, "rho_bar": rho_bar, "c_bar": c_bar}
    advantages, targets = vtrace(rewards, values, ratio.log(), SEQUENCES, num_sequences=4, **settings)
    parts = [masked_vtrace(*part, **settings) for part in per_trajectory(rewards, values, ratio) if len(part[0])]
    assert torch.allclose(advantages, torch.cat([part[0] for part in parts]))
    assert torch.allclose(targets, torch.cat([part[1] for part in parts]))


clipped_value_loss = checked(token_advantages.clipped_value_loss)
explained_variance = checked(token_advantages.explained_variance)


def test_the_clipped_value_loss_by_hand_stops_exactly_the_clipped_tokens_and_trains_only_the_critic():
    values, returns, before = wide(1, 2, 2, 0, 5), wide(1.5, 3, 1, 3, 2), wide(1, 1, 1, 1, 1)
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.5)
    # within the bound; beyond it toward R; beyond it with R on the other side (twice); below it away from R
    assert loss.tolist() == [0.125, 1.125, 0.5, 4.5, 4.5]
    assert clipped.tolist() == [False, True, False, False, False]
    loss, clipped = clipped_value_loss(wide(1, 9), wide(3, 9), wide(100, 100), clip=None)
    assert loss.tolist() == [2, 0]
    assert not clipped.any()
    values, returns, before = leaves = torch.randn(3, 200, dtype=torch.float64, requires_grad=True).unbind()
    loss, clipped = clipped_value_loss(values, returns, before, clip=0.3)
    gradient, *none = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    assert clipped.equal(gradient == 0)
    assert 0 < clipped.sum() < 200
    assert torch.allclose(gradient[~clipped], (values - returns)[~clipped])
    assert none == [None, None]


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


turn_returns, gigpo = checked(token_advantages.turn_returns), checked(token_advantages.gigpo)

# Two answers to one prompt, A: two tokens, then one; B: one token, then two. Rewards at the turns' last tokens.
COLUMNS = {"turns": whole(0, 0, 1, 0, 1, 1), "token_rewards": wide(0, 1, 0, 0, 0, 4)}
TWO = advantage_inputs(wide(1, 4), sequences=whole(0, 0, 0, 1, 1, 1), **COLUMNS)


@cases(
    "settings, expected",
    # With gamma 1/2 the returns are 1 + 0 / 2 and 0 of A, 0 + 4 / 2 and 4 of B.
    ({"over": "index", "normalize": False}, [-0.5, -0.5, -2, 0.5, 2, 2]),
    # The mean over all four turns is 1.75.
    ({"over": "group", "normalize": False}, [-0.75, -0.75, -1.75, 0.25, 2.25, 2.25]),
    # The deviations are 0.5 and 2.
    ({"over": "index", "epsilon": 0.5}, [-0.5, -0.5, -0.8, 0.5, 0.8, 0.8]),
)
def test_turn_returns_by_hand(settings, expected):
    assert turn_returns(TWO, gamma=0.5, **settings).tolist() == pytest.approx(expected, abs=1e-12)


def test_answers_with_one_turn_get_the_advantages_of_grpo():
    rewards, groups = wide(1, 0, 0.5, 3, 3, 7), whole(0, 0, 0, 1, 1, 2)
    sequences = torch.arange(6).repeat_interleave(torch.tensor([2, 1, 3, 2, 2, 1]))
    is_last = torch.cat([sequences.diff() > 0, torch.tensor([True])])
    token_rewards = torch.where(is_last, rewards[sequences], 0)
    inputs = advantage_inputs(rewards, groups, sequences=sequences, token_rewards=token_rewards)
    expected = advantages.grpo(inputs, epsilon=1e-6)[sequences]
    for over in ("index", "group"):
        assert turn_returns(inputs, gamma=0.3, over=over, epsilon=1e-6).allclose(expected, atol=1e-12)


def test_gigpo_by_hand_with_states_that_two_answers_share_or_one_meets_twice_and_that_other_groups_have():
    inputs = advantage_inputs(
        wide(1, 0, 2, 3),
        whole(0, 0, 1, 1),
        sequences=whole(0, 0, 1, 1, 2, 2, 3, 3),
        turns=whole(0, 1, 0, 1, 0, 1, 0, 0),
        token_rewards=wide(0, 1, 0, 0, 0, 2, 0, 3),
        observations=whole(10, 11, 10, 12, 10, 10, 10, 10),
    )
    # Episodes: +-0.5. Returns at state 10 are 1/2 and 0 in the first group, and 1, 2, and 3 in the second.
    found = gigpo(inputs, gamma=0.5, step_weight=2.0, normalize=False)
    assert found.tolist() == [0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5, -0.5 - 2, -0.5, 0.5 + 2, 0.5 + 2]
    # Divided by deviations of 0.5 of the episodes, 0.25 and (2/3)^0.5 of the returns, each plus 0.25.
    found = gigpo(inputs, gamma=0.5, step_weight=2.0, epsilon=0.25)
    first, second = 2 * 0.5, 2 / ((2 / 3) ** 0.5 + 0.25)
    expected = [2 / 3 + first, 2 / 3, -2 / 3 - first, -2 / 3, -2 / 3 - second, -2 / 3, *[2 / 3 + second] * 2]
    assert found.tolist() == pytest.approx(expected)


score_norms = checked(token_advantages.score_norms)


def advantages_of(returns, norms, sequences, groups=None, *, weights=None, turns=None):
    """Advantages of tokens with these returns, by default of one group, aligned within turns if `turns` is given."""
    num_turns, size = 2, int(sequences.max()) + 1
    following = torch.cat([returns[1:], wide(0)])
    is_last = torch.cat([sequences[1:] != sequences[:-1], torch.tensor([True])])
    per_turn, turns = turns is not None, torch.zeros_like(sequences) if turns is None else turns
    rows = sequences * num_turns + turns
    columns = {
        "turns": turns,
        "positions": segments.indices_in_rows(sequences, num_sequences=size),
        "positions_in_turn": segments.indices_in_rows(rows, num_sequences=size * num_turns),
        # At probability 1/2 the norm of a token's gradient is its collision probability.
        "learner_logprobs": torch.full_like(norms, HALF),
        "collisions": norms,
        "correction_weights": weights,
    }
    rewards = torch.where(is_last, returns, returns - following)
    inputs = token_inputs(rewards, sequences, num_sequences=size, groups=groups, **columns)
    return checked(token_advantages.optimal_token_baseline)(inputs, per_turn=per_turn)


def baseline(returns, norms, *places, **settings):
    return returns - advantages_of(returns, norms, *places, **settings)


def test_the_score_norm_is_the_squared_gradient_and_equal_rewards_give_exactly_no_advantage():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    squared = logprobs.exp().square().sum()
    for token in range(4):
        (gradient,) = torch.autograd.grad(logprobs[token], logits, retain_graph=True)
        assert score_norms(logprobs[token : token + 1], squared[None]).item() == pytest.approx(gradient.square().sum())
    assert score_norms(torch.tensor([0.0]), torch.tensor([0.9999])).tolist() == [0.0]
    equal = torch.full((9,), 0.1, dtype=torch.float64)
    assert not advantages_of(equal, drawn(1).abs(), SEQUENCES, whole(0, 1, 0, 0)).any()


def test_by_hand_the_baseline_has_the_smallest_weighted_square_and_a_token_without_company_no_advantage():
    # The energies are 1, 3, 4 of the first and 3, 3 of the second. The third is of another group.
    sequences, groups = whole(0, 0, 0, 1, 1, 2), whole(0, 0, 1)
    values = baseline(wide(1, 1, 1, 3, 3, 70), wide(1, 2, 1, 3, 0, 9), sequences, groups)
    assert values.tolist() == pytest.approx([10 / 4, 12 / 6, 1, 10 / 4, 12 / 6, 70])
    # Weights are squared: the energies are 4 and 5 of the first, and 1 of the second.
    values = baseline(wide(1, 1, 5), wide(1, 1, 1), whole(0, 0, 1), weights=wide(2, 1, 1))
    assert values.tolist() == pytest.approx([9 / 5, 1, 9 / 5])
    # Within turns, the second token of the one meets the third of the other.
    settings = {"turns": whole(0, 1, 0, 0, 1)}
    values = baseline(wide(1, 1, 3, 3, 3), torch.ones(5, dtype=torch.float64), whole(0, 0, 1, 1, 1), **settings)
    assert values.tolist() == pytest.approx([2, 11 / 5, 2, 3, 11 / 5])
    # The mean, where no member could have done otherwise.
    flat = baseline(wide(1, 2, 6), wide(0, 0, 0), torch.tensor([0, 1, 2]))
    assert flat.tolist() == pytest.approx([3, 3, 3])
    assert advantages_of(wide(2, 3), wide(1, 1), torch.tensor([0, 0])).tolist() == [0, 0]
    for rewards in itertools.product((0.0, 1.0), repeat=3):
        returns, norms = wide(*rewards), wide(0.1, 2.0, 0.7)
        values = baseline(returns, norms, torch.arange(3))
        power = [(norms * (returns - b).square()).sum() for b in (values[0], values[0] + 0.01, values[0] - 0.01)]
        assert power[0] <= min(power[1:])
