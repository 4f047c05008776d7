import math
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
import torch

from slipstream.learner.algorithms import advantages, token_advantages
from tests.unit.learner.inputs import advantage_inputs, checked, whole, wide

turn_returns, gigpo = checked(token_advantages.turn_returns), checked(token_advantages.gigpo)

# Two answers to one prompt, A: two tokens, then one; B: one token, then two. Rewards at the turns' last tokens.
TWO = advantage_inputs(
    wide(1, 4), sequences=whole(0, 0, 0, 1, 1, 1), turns=whole(0, 0, 1, 0, 1, 1), token_rewards=wide(0, 1, 0, 0, 0, 4)
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # With gamma 1/2 the returns are 1 + 0 / 2 and 0 of A, 0 + 4 / 2 and 4 of B.
        ({"over": "index", "normalize": False}, [-0.5, -0.5, -2, 0.5, 2, 2]),
        # The mean over all four turns is 1.75.
        ({"over": "group", "normalize": False}, [-0.75, -0.75, -1.75, 0.25, 2.25, 2.25]),
        # The deviations are 0.5 and 2.
        ({"over": "index", "epsilon": 0.5}, [-0.5, -0.5, -0.8, 0.5, 0.8, 0.8]),
    ],
)
def test_turn_returns_by_hand(settings, expected):
    assert turn_returns(TWO, gamma=0.5, **settings).tolist() == pytest.approx(expected, abs=1e-12)


def test_answers_with_one_turn_get_the_advantages_of_grpo():
    rewards, groups = wide(1, 0, 0.5, 3, 3, 7), whole(0, 0, 0, 1, 1, 2)
    sequences = torch.arange(6).repeat_interleave(torch.tensor([2, 1, 3, 2, 2, 1]))
    is_last = torch.cat([sequences.diff() > 0, torch.tensor([True])])
    inputs = advantage_inputs(
        rewards, groups, sequences=sequences, token_rewards=torch.where(is_last, rewards[sequences], 0)
    )
    expected = advantages.grpo(inputs, epsilon=1e-6)[sequences]
    for over in ("index", "group"):
        assert turn_returns(inputs, gamma=0.3, over=over, epsilon=1e-6).allclose(expected, atol=1e-12)


def test_gigpo_by_hand_for_two_answers_that_part_after_a_shared_state():
    inputs = advantage_inputs(
        wide(1, 0),
        sequences=whole(0, 0, 1, 1),
        turns=whole(0, 1, 0, 1),
        token_rewards=wide(0, 1, 0, 0),
        observations=whole(10, 11, 10, 12),
    )
    # Episodes: +-0.5. At the shared state the returns are 1/2 and 0, so +-1/4. The others are alone.
    found = gigpo(inputs, gamma=0.5, step_weight=2.0, normalize=False)
    assert found.tolist() == [0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5]
    # Divided by deviations of 0.5 and 0.25, each plus 0.25.
    found = gigpo(inputs, gamma=0.5, step_weight=2.0, epsilon=0.25)
    assert found.tolist() == pytest.approx([2 / 3 + 2 * 0.5, 2 / 3, -2 / 3 - 2 * 0.5, -2 / 3])


def slow_gigpo(episodes, *, gamma, weight, epsilon):
    """One episode: (group, [(observation, reward, tokens)]). Loops, by the equations of the paper."""

    def normalized(values):
        return [(value - fmean(values)) / (pstdev(values) + epsilon) for value in values]

    by_group, by_state = defaultdict(list), defaultdict(list)
    for number, (group, turns) in enumerate(episodes):
        by_group[group].append((number, math.fsum(reward for _, reward, _ in turns)))
        for index, (state, _, _) in enumerate(turns):
            following = turns[index:]
            value = math.fsum(gamma**later * reward for later, (_, reward, _) in enumerate(following))
            by_state[group, state].append((number, index, value))
    macro, micro = {}, {}
    for members in by_group.values():
        macro |= dict(zip([n for n, _ in members], normalized([r for _, r in members]), strict=True))
    for members in by_state.values():
        micro |= dict(zip([m[:2] for m in members], normalized([m[2] for m in members]), strict=True))
    return [
        macro[number] + weight * micro[number, index]
        for number, (_, turns) in enumerate(episodes)
        for index, (_, _, tokens) in enumerate(turns)
        for _ in range(tokens)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_gigpo_is_what_loops_over_states_give(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    # Few states, so that answers meet, also themselves, and other groups have the same ones.
    episodes = [
        (group, [(draw(3) - 1, draw(4) / 2, 1 + draw(3)) for _ in range(1 + draw(5))])
        for group in range(3)
        for _ in range(4)
    ]
    tokens = [
        (number, index, state, reward if token == count - 1 else 0.0)
        for number, (_, turns) in enumerate(episodes)
        for index, (state, reward, count) in enumerate(turns)
        for token in range(count)
    ]
    inputs = advantage_inputs(
        wide(*(sum(reward for _, reward, _ in turns) for _, turns in episodes)),
        whole(*(group for group, _ in episodes)),
        sequences=whole(*(number for number, *_ in tokens)),
        turns=whole(*(index for _, index, *_ in tokens)),
        observations=whole(*(state for _, _, state, _ in tokens)),
        token_rewards=wide(*(reward for *_, reward in tokens)),
    )
    found = gigpo(inputs, gamma=0.9, step_weight=0.7, epsilon=1e-3)
    assert found.tolist() == pytest.approx(slow_gigpo(episodes, gamma=0.9, weight=0.7, epsilon=1e-3), abs=1e-9)
    assert gigpo(inputs, gamma=0.9, step_weight=0.0, epsilon=1e-3).allclose(
        advantages.grpo(inputs, epsilon=1e-3)[inputs.sequences]
    )
