import itertools

import pytest
import torch

from slipstream.learner.algorithms import segments, token_advantages
from tests.unit.learner.inputs import HALF, checked, token_inputs, wide

score_norms = checked(token_advantages.score_norms)

LENGTHS = [3, 1, 0, 5, 2, 4]
SEQUENCES = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
GROUPS = torch.tensor([0, 1, 0, 0, 1, 0])
TURNS = torch.tensor([0, 0, 1, 0, 0, 1, 1, 1, 2, 0, 0, 0, 0, 0, 1])


def drawn(seed: int, size: int = 15) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def advantages_of(returns, norms, sequences=SEQUENCES, groups=GROUPS, *, epsilon=1e-8, weights=None, turns=None):
    """Advantages of tokens with these returns, aligned within turns if `turns` is given."""
    num_turns, size = 3, len(groups)
    following = torch.cat([returns[1:], wide(0)])
    is_last = torch.cat([sequences[1:] != sequences[:-1], torch.tensor([True])])
    turns = torch.zeros_like(sequences) if turns is None else turns
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
    per_turn = bool(turns.any())
    return checked(token_advantages.optimal_token_baseline)(inputs, per_turn=per_turn, epsilon=epsilon)


def baseline(returns, norms, *places, **settings):
    return returns - advantages_of(returns, norms, *places, **settings)


def looped(returns, norms, weights, turns, *, epsilon):
    """Baseline computed token by token over the group members that reach the position."""
    tokens, energy = [], []
    for sequence, length in enumerate(LENGTHS):
        start, total, indices = sum(LENGTHS[:sequence]), 0.0, {}
        for token in range(start, start + length):
            total += float(norms[token] * weights[token] ** 2)
            turn = int(turns[token])
            indices[turn] = indices.get(turn, -1) + 1
            tokens.append((int(GROUPS[sequence]), turn, indices[turn]))
            energy.append(total + epsilon)
    result = []
    for position in tokens:
        members = [other for other, theirs in enumerate(tokens) if theirs == position]
        share = sum(energy[m] * float(returns[m]) for m in members) / sum(energy[m] for m in members)
        result.append(share if len(members) > 1 else float(returns[members[0]]))
    return wide(*result)


def test_the_score_norm_is_the_squared_gradient_of_the_logits_and_never_negative():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    squared = logprobs.exp().square().sum()
    for token in range(4):
        (gradient,) = torch.autograd.grad(logprobs[token], logits, retain_graph=True)
        assert score_norms(logprobs[token : token + 1], squared[None]).item() == pytest.approx(gradient.square().sum())
    assert score_norms(torch.tensor([0.0]), torch.tensor([0.9999])).tolist() == [0.0]


def test_by_hand_the_baseline_has_the_smallest_weighted_square_and_a_token_without_company_no_advantage():
    sequences, groups = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0])
    values = baseline(wide(1, 1, 1, 3, 3), wide(1, 2, 1, 3, 0), sequences, groups)
    # The energies are 1, 3, 4 of the first and 3, 3 of the second.
    assert values.tolist() == pytest.approx([10 / 4, 12 / 6, 1, 10 / 4, 12 / 6])
    # The mean, where no member could have done otherwise.
    flat = baseline(wide(1, 2, 6), wide(0, 0, 0), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]))
    assert flat.tolist() == pytest.approx([3, 3, 3])
    assert advantages_of(wide(2, 3), wide(1, 1), torch.tensor([0, 0]), torch.tensor([0])).tolist() == [0, 0]
    ragged = torch.tensor([0, 0, 1]), torch.tensor([0, 0])
    assert advantages_of(wide(1, 1, 5), wide(1, 1, 1), *ragged).tolist() == pytest.approx([-2, 0, 2])
    for rewards in itertools.product((0.0, 1.0), repeat=3):
        returns, norms = wide(*rewards), wide(0.1, 2.0, 0.7)
        values = baseline(returns, norms, torch.arange(3), torch.zeros(3, dtype=torch.int64))
        power = [(norms * (returns - b).square()).sum() for b in (values[0], values[0] + 0.01, values[0] - 0.01)]
        assert power[0] <= min(power[1:])


@pytest.mark.parametrize("turns", [None, TURNS])
@pytest.mark.parametrize("weights", [None, drawn(3) * 2])
def test_ragged_groups_equal_the_loop(turns, weights):
    returns, norms = drawn(0), drawn(1)
    of_one, without_turns = torch.ones(15) if weights is None else weights, torch.zeros(15) if turns is None else turns
    expected = looped(returns, norms, of_one, without_turns, epsilon=1e-3)
    assert torch.allclose(baseline(returns, norms, epsilon=1e-3, weights=weights, turns=turns), expected)


def test_equal_rewards_give_exactly_no_advantage():
    rewards = torch.zeros(15, dtype=torch.float64).index_fill(0, torch.tensor([2, 3, 8, 10, 14]), 0.1)
    columns = {"groups": GROUPS, "learner_logprobs": drawn(0), "collisions": drawn(1)}
    inputs = token_inputs(rewards, SEQUENCES, num_sequences=6, **columns)
    assert not token_advantages.optimal_token_baseline(inputs, per_turn=False, epsilon=1e-8).any()
