import math
from functools import partial
from itertools import combinations, product
from math import comb
from statistics import fmean, pstdev

import pytest
import torch

from slipstream.learner.algorithms import advantages, segments
from slipstream.learner.errors import BatchError
from tests.cases import cases
from tests.unit.learner.inputs import advantage_inputs, checked, whole, wide


def formula(name):
    function = checked(getattr(advantages, name))
    return lambda rewards, groups, *size, **settings: function(advantage_inputs(rewards, groups, *size), **settings)


NAMES = ("grpo", "dr_grpo", "rloo", "lite_ppo", "opo", "gpg", "maxrl", "win_rate", "reinforce_plus_plus_baseline")
grpo, dr_grpo, rloo, lite_ppo, opo, gpg, maxrl, win_rate, reinforce_plus_plus_baseline = map(formula, NAMES)
grpo_passk, pass_at_k = formula("grpo_passk"), formula("pass_at_k")
EPSILON = 1e-9


def gdpo(parts, groups, *, weights=None, epsilon=EPSILON):
    inputs = advantage_inputs(torch.zeros_like(groups).double(), groups, parts=parts)
    return checked(advantages.gdpo)(inputs, weights=weights or {}, epsilon=epsilon)


def of_parts(rewards, groups, lengths):
    """Two parts with equal signs and different scales."""
    return gdpo({"a": rewards, "b": 100 * rewards + 3}, groups, weights={"a": 1.0, "b": 2.0}).to(rewards.dtype)


WITHIN_GROUPS = {
    "grpo": partial(grpo, epsilon=EPSILON),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "maxrl": partial(maxrl, epsilon=EPSILON),
    "win_rate": win_rate,
    "grpo_passk": grpo_passk,
    "grpo_passk by deviation": partial(grpo_passk, normalize=True),
}
OVER_THE_BATCH = {
    "lite_ppo": partial(lite_ppo, epsilon=EPSILON),
    "gpg": gpg,
    "gdpo": of_parts,
    "reinforce_plus_plus_baseline": partial(reinforce_plus_plus_baseline, epsilon=EPSILON),
}
ALL = WITHIN_GROUPS | OVER_THE_BATCH
SELECTIVE = {"grpo_passk", "grpo_passk by deviation"}
"""Functions that give an advantage only to the best member of a group."""


def ragged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, groups and lengths of groups of 1, 2, 3 and 6 in a random order; group 2 has no members."""
    torch.manual_seed(0)
    groups = whole(0, 1, 1, 3, 3, 3, 4, 4, 4, 4, 4, 4)[torch.randperm(12)]
    return torch.rand(12, dtype=torch.float64) + 0.5, groups, torch.randint(1, 9, (12,))


def test_hand_computed_values_of_group_baselines_win_rates_and_gpg():
    rewards, groups = wide(1, 2, 3, 10, 20), whole(0, 0, 0, 1, 1)
    assert dr_grpo(rewards, groups).tolist() == [-1, 0, 1, -5, 5]
    assert rloo(rewards, groups).tolist() == [-1.5, 0, 1.5, -10, 10]
    assert maxrl(rewards, groups, epsilon=1e-12).tolist() == pytest.approx([-1 / 2, 0, 1 / 2, -1 / 3, 1 / 3])
    assert win_rate(rewards, groups).tolist() == [-0.5, 0, 0.5, -0.5, 0.5]
    assert opo(rewards, groups, whole(1, 1, 2, 3, 1)).tolist() == [-1.25, -0.25, 0.75, -2.5, 7.5]
    expected = wide(-(1.5**0.5), 0, 1.5**0.5, -1, 1)
    assert torch.allclose(grpo(rewards, groups, epsilon=EPSILON), expected, atol=2e-6)
    assert opo(wide(1, 3, 100), whole(0, 0, 0), whole(2, 2, 0)).tolist() == [-1, 1, 98], "without tokens, no share"
    assert maxrl(wide(-1, 1, 0, 0, -3, -1), whole(0, 0, 1, 1, 2, 2), epsilon=EPSILON).tolist() == [0] * 6
    rewards, groups = wide(0, 1, 1, 1, 1, 0, 0), whole(0, 0, 1, 1, 1, 2, 2)
    assert gpg(rewards, groups).tolist() == [-1.75, 1.75, 0, 0, 0, 0, 0]
    # Two of four rewards are 0, yet every trajectory has a gradient: alpha is 1.
    assert gpg(wide(0, 1, 0, 1), whole(0, 0, 1, 1)).tolist() == [-0.5, 0.5, -0.5, 0.5]
    assert win_rate(wide(2, 1, 1, 0), whole(0, 0, 0, 0)).tolist() == pytest.approx([1 / 2, 0, 0, -1 / 2])
    assert win_rate(wide(5, 5, 1), whole(0, 0, 0)).tolist() == [0.25, 0.25, -0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_groups_of_equal_rewards_give_exactly_zero(name, dtype):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7], dtype=dtype)
    values = ALL[name](rewards, whole(0, 0, 0, 1, 1, 1, 1), whole(3, 1, 4, 1, 5, 9, 2))
    assert values.eq(0).all()
    assert values.dtype == dtype


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_gives_zero_and_neither_the_order_of_members_nor_the_numbering_of_groups_matters(name):
    assert ALL[name](wide(3.3), whole(0), whole(7)).tolist() == [0]
    among_others = ALL[name](wide(1, 9.9, 4), whole(0, 1, 0), whole(5, 3, 2))
    assert among_others[1] == 0
    assert (among_others[[0, 2]] != 0).sum() == (1 if name in SELECTIVE else 2)
    assert ALL[name](wide(1, 2, 5, 9), whole(0, 0, 2, 2), whole(1, 2, 3, 4)).isfinite().all()
    rewards, groups, lengths = ragged()
    order, found = torch.randperm(12), ALL[name](rewards, groups, lengths)
    moved = ALL[name](rewards[order], groups[order], lengths[order])
    assert torch.allclose(found[order], moved, atol=1e-12)
    assert found.equal(ALL[name](rewards, whole(7, 3, 2, 0, 5)[groups], lengths))


@pytest.mark.parametrize("poison", [-70.0, 70.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("name", [*WITHIN_GROUPS, "pass_at_k"])
def test_another_groups_rewards_change_not_one_bit(name, poison):
    rewards, groups, lengths = ragged()
    estimate = WITHIN_GROUPS.get(name, lambda rewards, groups, _: pass_at_k(rewards - 0.4, groups, k=2))
    other = groups == 3
    before, after = (estimate(values, groups, lengths) for values in (rewards, rewards.where(~other, poison)))
    assert before[~other].equal(after[~other])
    assert before[~other].any()


def test_lite_ppo_and_reinforce_plus_plus_baseline_divide_by_the_spread_of_the_batch_and_of_its_tokens():
    rewards, groups = wide(1, 1.01, 0, 10), whole(0, 0, 1, 1)
    expected = dr_grpo(rewards, groups) / rewards.std(correction=0)
    assert torch.allclose(lite_ppo(rewards, groups, epsilon=1e-12), expected)
    assert lite_ppo(rewards, groups, epsilon=EPSILON)[:2].abs().max() < 2e-3
    assert grpo(rewards, groups, epsilon=EPSILON)[:2].abs().min() > 0.99
    rewards, groups, lengths = wide(0, 1, 2, 7), whole(0, 0, 1, 1), whole(1, 3, 2, 5)
    tokens = dr_grpo(rewards, groups).repeat_interleave(lengths)
    expected = (tokens - tokens.mean()) / tokens.std(correction=0)
    values = reinforce_plus_plus_baseline(rewards, groups, lengths, epsilon=1e-12)
    assert torch.allclose(values.repeat_interleave(lengths), expected)
    more = torch.cat([rewards, wide(50)]), torch.cat([groups, whole(2)]), torch.cat([lengths, whole(99)])
    assert reinforce_plus_plus_baseline(*more, epsilon=1e-12).equal(torch.cat([values, wide(0)]))


def test_gdpo_weighs_the_named_parts_tells_them_apart_and_refuses_those_that_an_answer_lacks():
    parts, groups = {"a": wide(0, 1, 1), "b": wide(1, 0, 1)}, whole(0, 0, 0)
    summed = grpo(parts["a"], groups, epsilon=EPSILON) + grpo(parts["b"], groups, epsilon=EPSILON)
    assert torch.allclose(gdpo(parts, groups), summed / summed.std(correction=0))
    rare = {"a": wide(0, 0, 0, 1), "b": wide(0, 50, 100, 0)}
    assert gdpo(rare, whole(0, 0, 0, 0))[3] > 0
    assert grpo(rare["a"] + rare["b"], whole(0, 0, 0, 0), epsilon=EPSILON)[3] < 0
    parts, groups = {"a": wide(0, 1), "b": wide(1, 0), "c": wide(math.nan, 0)}, whole(0, 0)
    assert gdpo(parts, groups, weights={"a": 3.0, "b": 1.0}).tolist() == pytest.approx([-1, 1])
    assert gdpo(parts, groups, weights={"a": 1.0, "b": 1.0}).tolist() == [0, 0]
    for weights in ({"c": 1.0}, {"missing": 1.0}, {}):
        with pytest.raises(BatchError, match="gdpo needs reward parts"):
            gdpo(parts, groups, weights=weights)


def test_remax_compares_with_the_greedy_answer_and_the_moving_baseline_with_earlier_steps():
    def remax(rewards, greedy_rewards):
        return checked(advantages.remax)(advantage_inputs(rewards, greedy_rewards=greedy_rewards)).tolist()

    assert remax(wide(1, 0, 1, 1), wide(0.5, 0.5, 1, 0)) == [0.5, -0.5, 0, 1]
    assert remax(wide(3), wide(1)) == [2]
    assert remax(wide(1, 0, 3), wide(math.nan, math.nan, 1)) == [0, 0, 2]

    def moving_baseline(rewards, state, decay):
        return checked(advantages.moving_baseline)(advantage_inputs(rewards, state=state), decay=decay).tolist()

    state = {}
    assert moving_baseline(wide(1, 3), state, 0.75) == [-1, 1]
    assert state == {"baseline": 2.0}
    assert moving_baseline(wide(6), state, 0.75) == [4]
    assert state == {"baseline": 3.0}


def enumerated(correct: list[bool], k: int) -> list[float]:
    """Every k-subset is a sample with reward any(correct), normalized over all subsets. A member gets its mean."""
    subsets = list(combinations(range(len(correct)), k))
    rewards = [float(any(correct[i] for i in subset)) for subset in subsets]
    mean, deviation = fmean(rewards), pstdev(rewards)
    if deviation == 0:
        return [0.0] * len(correct)
    normalized = [(reward - mean) / deviation for reward in rewards]
    return [fmean(a for a, s in zip(normalized, subsets, strict=True) if i in s) for i in range(len(correct))]


def pass_at_k_of(num_correct: int, size: int, *, k: int) -> torch.Tensor:
    return pass_at_k((torch.arange(size) < num_correct).double(), torch.zeros(size, dtype=torch.int64), k=k)


@pytest.mark.parametrize("size", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(size):
    for k, num_correct in product(range(1, size + 1), range(size + 1)):
        expected = enumerated([i < num_correct for i in range(size)], k)
        assert pass_at_k_of(num_correct, size, k=k).tolist() == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_of_large_groups_does_not_overflow_and_only_the_best_of_a_group_gets_its_lead():
    values = pass_at_k_of(3, 4096, k=512)
    assert values.isfinite().all()
    miss = comb(4093, 512) / comb(4096, 512)
    assert values[0].item() == pytest.approx((miss / (1 - miss)) ** 0.5)
    assert pass_at_k_of(1, 2, k=3).tolist() == pass_at_k_of(1, 2, k=100).tolist() == [0, 0]
    assert grpo_passk(wide(1, 5, 3, 2, 9), whole(0, 0, 0, 1, 1)).tolist() == [0, 2, 0, 0, 7]
    assert grpo_passk(wide(5, 5, 1, 0), whole(0, 0, 0, 0)).tolist() == [0, 0, 0, 0]
    rewards, groups = wide(0, 0, 3), whole(0, 0, 0)
    assert grpo_passk(rewards, groups, normalize=True, epsilon=1e-12).tolist() == pytest.approx([0, 0, 3 / 2**0.5])


NO_TURNS = (0, 0, 0, 0, 0, 0)


def test_the_overlong_penalty_falls_over_a_buffer_of_one_token_up_to_everything():
    overlong_penalty = checked(advantages.overlong_penalty)
    lengths = whole(0, 79, 80, 85, 90, 99, 100, 101, 5000)
    expected = [0, 0, 0, -0.25, -0.5, -0.95, -1, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=20.0).tolist() == pytest.approx(expected)
    assert overlong_penalty(whole(8, 9, 10, 11), max_length=10, buffer=1.0).tolist() == [0, 0, -1, -1]
    assert overlong_penalty(whole(0, 5, 10), max_length=10, buffer=10.0).tolist() == [0, -0.5, -1]


@cases(
    "kl, coefficient, turns, totals, tokens",
    ((1, 2, 3, 4, 5, 6), 0.5, NO_TURNS, [7, 18, 30, 34.5], [-0.5, -1, 8.5, 18, -2.5, 37]),
    ((0, 0, 0, 0, 1, 0), 0.5, (0, 0.5, 0, 2, 1, 0), [10, 20, 30, 39.5], [0, 0.5, 9.5, 20, 0.5, 39]),
    ((9, 9, 9, 9, 9, 9), 0.0, NO_TURNS, [10, 20, 30, 40], [0, 0, 10, 20, 0, 40]),
    ((), 0.5, (), [10, 20, 30, 40], []),
)
def test_kl_is_charged_at_every_token_a_turn_paid_at_its_end_the_rest_at_the_last_token(
    kl, coefficient, turns, totals, tokens
):
    rewards, sequences = wide(10, 20, 30, 40), whole(0, 0, 0, 1, 3, 3)[: len(kl)]
    settings = {"coefficient": coefficient} | ({"turn_rewards": wide(*turns)} if any(turns) else {})
    found = checked(advantages.kl_in_reward)(rewards, wide(*kl).requires_grad_(), sequences, **settings)
    assert [each.tolist() for each in found] == [totals, tokens]
    assert not any(each.requires_grad for each in found)


whiten, standardized = checked(segments.whiten), checked(segments.standardized)


def test_whitening_by_hand_takes_a_weight_as_repetitions():
    assert whiten(wide(1, 3), epsilon=1e-12).tolist() == pytest.approx([-1, 1])
    assert whiten(wide(0, 0, 0, 4), epsilon=1e-12).tolist() == pytest.approx([-(3**-0.5)] * 3 + [3**0.5])
    assert whiten(wide(0, 2), epsilon=3.0).tolist() == [-0.25, 0.25]
    assert whiten(wide(1, 2), epsilon=EPSILON, weights=wide(0, 0)).tolist() == [0, 0]
    values = standardized(wide(1, 3, 100, 500, 9), whole(0, 0, 1, 1, 2), epsilon=1e-12)
    assert values.tolist() == pytest.approx([-1, 1, -1, 1, 0])
    values = whiten(torch.tensor([10000.0, 10001.0, 10002.0, 10003.0]), epsilon=EPSILON)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 5**0.5
    assert torch.allclose(values, expected, atol=1e-6)
    values, lengths = wide(3, -1, 4, 1), torch.tensor([2, 7, 1, 8])
    tokens = whiten(values.repeat_interleave(lengths), epsilon=EPSILON)
    trajectories = whiten(values, epsilon=EPSILON, weights=lengths.double())
    assert torch.allclose(trajectories.repeat_interleave(lengths), tokens, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6 / 7, 1e-30])
def test_equal_values_give_exactly_zero(value, dtype):
    values = torch.full((1001,), value, dtype=dtype)
    assert whiten(values, epsilon=1e-30).eq(0).all()
    assert whiten(values, epsilon=EPSILON, weights=torch.arange(1001, dtype=dtype)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_is_zero_exactly_where_it_equals_the_mean_of_its_segment(dtype):
    # Rewards in thirds, fifths and tenths, against rational arithmetic.
    for denominator in (3, 5, 10):
        numerators = torch.randint(0, denominator + 1, (2000, 8), generator=torch.Generator().manual_seed(denominator))
        rewards, rows = (numerators.to(dtype) / denominator).flatten(), torch.arange(2000).repeat_interleave(8)
        centered = segments.centered(rewards, rows)
        assert (centered == 0).equal((8 * numerators == numerators.sum(1, keepdim=True)).flatten())


@pytest.mark.parametrize("poison", [1e30, float("inf"), float("nan")])
def test_a_value_without_weight_changes_nothing_and_becomes_zero(poison):
    values, weights = wide(3, -1, 4), wide(1, 2, 3)
    more = whiten(torch.cat([values, wide(poison)]), epsilon=EPSILON, weights=torch.cat([weights, wide(0)]))
    assert torch.allclose(more[:3], whiten(values, epsilon=EPSILON, weights=weights), atol=1e-12)
    assert more[3] == 0
