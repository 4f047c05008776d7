from statistics import fmean, pstdev

import msgspec
import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.advantages import (
    CustomAdvantageConfig,
    DrGrpoConfig,
    GaeConfig,
    GdpoConfig,
    OptimalTokenBaselineConfig,
)
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, RejectionConfig, RewardShapingConfig
from slipstream.configs.policy_losses import KlCovConfig, M2poConfig
from slipstream.learner.algorithms.inputs import RatioInputs
from slipstream.learner.training.loss_inputs import correct, describe_advantages
from slipstream.learner.training.objective import Objective
from tests.unit.learner.builders import make_batch, make_groups, make_response


def make_objective(**settings):
    return Objective(AlgorithmConfig(**({"advantage": DrGrpoConfig()} | settings)), max_tokens=8)


def prepared(groups, *, num_updates: int = 1, weights=None, **settings):
    batch = make_batch(groups, num_updates=num_updates, weights=weights or [1.0] * len(groups)).batch
    return make_objective(**settings).prepare(batch)


def of_trajectories(batch, column):
    first = [int((batch.tokens.sequences == index).nonzero()[0]) for index in range(batch.num_trajectories)]
    return getattr(batch.tokens, column)[first].tolist()


def make_scored(group, index, **reward):
    return msgspec.structs.replace(make_response(group, index), reward=Reward(**reward))


def test_advantages_are_those_of_the_own_group():
    groups = [
        [make_response(0, 0, reward=1.0), make_response(0, 1, reward=3.0)],
        [make_response(1, 0, reward=70.0), make_response(1, 1, reward=80.0)],
    ]
    assert of_trajectories(prepared(groups), "advantages") == [-1, 1, -5, 5]


TWO_TURNS = {
    "response": (5, 6, 9, 9, 9, 7, 1),
    "model_mask": np.array([0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=np.bool_),
    "num_turns": 2,
}
"""Two tokens of the model, three of a tool, two of the model."""


def test_a_users_advantage_sees_turns_parts_and_sources():
    own = CustomAdvantageConfig("tests.unit.learner.own_algorithm:of_turns_parts_and_sources")
    of_code = make_response(0, 0, reward=1.0, data_source="code", **TWO_TURNS)
    # Without a reward it is excluded, and groups are renumbered.
    failed = msgspec.structs.replace(of_code, id="0-0-1", index=1, reward=Reward(0.0, status="error"))
    answers = [of_code, failed, make_response(0, 2, reward=0.25, data_source="maths")]
    found = prepared([answers], advantage=own).tokens
    assert [found.advantages[found.sequences == index].tolist() for index in (0, 2)] == [[112] * 4, [26] * 4]


def test_gae_steps_over_the_tokens_of_a_tool():
    batch = make_batch([[make_response(0, 0, reward=3.0, **TWO_TURNS)]]).batch
    batch = batch.with_tokens(values=torch.tensor([0.5, 1.0, 2.0, 1.5]))
    found = make_objective(advantage=GaeConfig(gamma=0.5, lam=0.5)).prepare(batch)
    # From the end: r - V; then gamma * V of the model's next token - V, plus gamma * lambda * the advantage after it.
    expected = [3.0 - 1.5]
    for value, following in ((2.0, 1.5), (1.0, 2.0), (0.5, 1.0)):
        expected.insert(0, 0.5 * following - value + 0.25 * expected[0])
    whitened = [(each - fmean(expected)) / pstdev(expected) for each in expected]
    assert found.tokens.advantages.tolist() == pytest.approx(whitened, rel=1e-5)


def test_token_weights_count_over_the_whole_update_and_are_multiplied_by_the_groups_weight():
    short, long = make_response(0, 0, response=(5, 6)), make_response(0, 1, response=(5, 6, 7, 1))
    assert of_trajectories(prepared([[short, long]]), "token_weights") == pytest.approx([1 / 6, 1 / 6])
    groups = [[short], [make_response(1, 0, response=(5, 6, 7, 1))]]
    assert of_trajectories(prepared(groups, num_updates=2), "token_weights") == pytest.approx([1 / 2, 1 / 4])
    weighed = prepared(groups, weights=[1.0, 0.25])
    assert of_trajectories(weighed, "token_weights") == pytest.approx([1 / 6, 0.25 / 6])


def test_only_entirely_right_answers_are_imitated_and_those_of_a_group_drawn_for_less_for_less():
    right, wrong = {"total": 1.0, "is_correct": True}, {"total": 0.9, "is_correct": False}
    groups = [[make_scored(group, 0, **right), make_scored(group, 1, **wrong)] for group in range(2)]
    for weights, expected in (([1.0, 1.0], [1.0, 0, 1.0, 0]), ([1.0, 0.25], [1.0, 0, 0.25, 0])):
        found = prepared(groups, weights=weights, positive_nll_coef=0.5)
        assert of_trajectories(found, "nll_weights") == pytest.approx([0.5 / 8 * share for share in expected])


def with_the_last_rejected(**correction):
    """Three trajectories of four tokens, rewards 0, 1, and 5. Every token of the last one is rejected."""
    batch = make_batch([[make_response(0, index, reward=reward) for index, reward in enumerate((0.0, 1.0, 5.0))]]).batch
    drift = torch.where(batch.tokens.sequences == 2, 1.0, 0.0)
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs + drift)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)], **correction)
    return make_objective(correction=rejects).prepare(batch)


def test_rejected_tokens_stay_in_the_baseline_and_leave_the_denominator_if_so_configured():
    assert of_trajectories(with_the_last_rejected(), "advantages") == [-2, -1, 3]
    assert of_trajectories(with_the_last_rejected(), "token_weights")[:2] == pytest.approx([1 / 12] * 2)
    kept = with_the_last_rejected(loss_denominator="kept_tokens")
    assert of_trajectories(kept, "token_weights")[:2] == pytest.approx([1 / 8] * 2)


def test_a_description_of_no_token_is_zeros():
    batch = prepared(make_groups())
    empty = batch.select(torch.zeros(batch.num_trajectories, dtype=torch.bool))
    assert set(describe_advantages(empty).values()) == {0.0}


def test_parts_are_added_up_by_weight():
    parts = ({"a": 1.0, "b": 10.0}, {"a": 2.0, "b": -10.0})
    groups = [[make_scored(0, index, total=0.3, parts=each) for index, each in enumerate(parts)]]
    found = prepared(groups, reward=RewardShapingConfig(parts={"b": 0.5, "a": 2.0}))
    assert found.trajectories.rewards.tolist() == [7, -1]


def test_groups_of_equal_rewards_have_no_advantage_of_their_parts():
    groups = [
        [make_scored(0, i, total=0.3, parts={"a": 0.1, "b": 0.2}) for i in range(3)],
        [make_scored(1, i, total=0.3, parts={"a": 0.1, "b": b}) for i, b in enumerate((0, 1, 3))],
    ]
    found = of_trajectories(prepared(groups, advantage=GdpoConfig()), "advantages")
    assert found[:3] == [0, 0, 0]
    assert found[3:] != [0, 0, 0]


def test_a_token_baseline_compares_tokens_at_the_same_position_though_older_ones_are_masked():
    old = make_response(0, 0, reward=1.0, version_spans=[VersionSpan(4, 0), VersionSpan(6, 9)])
    groups = [[old, make_response(0, 1, reward=0.0, version=9)]]
    batch = make_batch(groups, learner_version=9, max_lags=[2]).batch
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs, collisions=torch.full((6,), 0.5))
    found = make_objective(advantage=OptimalTokenBaselineConfig()).prepare(batch).tokens.advantages
    # Both have tokens at the last two positions. Only the young one has tokens at the first two.
    assert (found[:2] > 0).all()
    assert found[2:4].tolist() == [0, 0]
    assert (found[4:] < 0).all()


def test_tokens_are_selected_among_those_that_the_correction_leaves():
    batch = make_batch(make_groups()).batch
    tokens = batch.tokens
    drift = torch.where(torch.arange(len(tokens.sequences)) % 4 == 0, 1.0, 0.01)
    start = tokens.generator_logprobs + drift
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)])
    masked = make_objective(masks=[M2poConfig(threshold=0.05)], correction=rejects)
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "what is far is rejected already"
    penalized = make_objective(policy_loss=KlCovConfig(fraction=0.5), correction=rejects)
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert not selected[drift == 1].any()
    assert int(selected.sum()) == int((drift < 1).sum()) // 2


def test_tokens_are_selected_in_one_update_by_its_own_tokens_alone():
    """Tokens of update 0 are close to the generator, those of update 1 are far from it."""
    batch = make_batch(make_groups(), num_updates=2).batch
    is_later = batch.trajectories.updates[batch.tokens.sequences] == 1
    start = batch.tokens.generator_logprobs + torch.where(is_later, 1.0, 0.01)
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    config = {"updates_per_step": 2, "correction": CorrectionConfig(level="none", max_weight=None)}
    masked = make_objective(masks=[M2poConfig(threshold=0.05)], **config)
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "those of the other update are not judged yet"
    found = masked.select_tokens(found, update=1, seed=0)
    assert found.tokens.is_trusted[~is_later].all()
    assert not found.tokens.is_trusted[is_later].all()
    penalized = make_objective(policy_loss=KlCovConfig(fraction=0.5), **config)
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert int(selected.sum()) == int((~is_later).sum()) // 2
    assert not selected[is_later].any()


DRIFT = torch.tensor([1.0, 4.0, 0.25, 1.0]).log()


def corrected(drift=DRIFT, learner_log_ratio=None, **settings):
    inputs, learner = (
        RatioInputs(x, torch.tensor([0, 0, 1, 1]), 2)
        for x in (drift, drift if learner_log_ratio is None else learner_log_ratio)
    )
    return correct(inputs, learner=learner, config=CorrectionConfig(**settings))


TOKEN, SEQUENCE = {"level": "token", "max_weight": 2.0}, {"level": "sequence", "max_weight": 2.0}


@pytest.mark.parametrize(
    ("settings", "weights", "is_bounded"),
    [
        ({"level": "none", "max_weight": None}, [1, 1, 1, 1], [False] * 4),
        (TOKEN | {"min_weight": 0.5}, [1, 2, 0.5, 1], [False, True, True, False]),
        # Masked weights are zero and stay in the count.
        (TOKEN | {"min_weight": 0.5, "outside": "mask"}, [1, 0, 0, 1], [False, True, True, False]),
        (SEQUENCE, [2, 2, 0.25, 0.25], [True, True, False, False]),
        # Normalized weights have the mean one over what they belong to.
        (TOKEN | {"normalize": True}, [w / 1.0625 for w in (1, 2, 0.25, 1)], [False, True, False, False]),
        (SEQUENCE | {"normalize": True}, [w / 1.125 for w in (2, 2, 0.25, 0.25)], [True, True, False, False]),
    ],
)
def test_weights_by_hand(settings, weights, is_bounded):
    found = corrected(**settings)
    assert found.weights.tolist() == pytest.approx(weights)
    assert found.is_bounded.tolist() == is_bounded
    assert found.is_kept.all()


def test_weights_are_the_proximal_policys_and_rejections_the_learners():
    entry = RejectionConfig(over="token", high=2.0)
    found = corrected(learner_log_ratio=torch.zeros(4), level="token", max_weight=2.0, reject=[entry], veto=(0.5, 2.0))
    assert found.weights.tolist() == [1, 2, 0.25, 1]
    assert found.is_kept.all()
    found = corrected(torch.zeros(4), learner_log_ratio=DRIFT, level="token", reject=[entry])
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.tolist() == [True, False, True, True]


LOW, HIGH = (RejectionConfig(statistic="k1", over="token", **bound) for bound in ({"low": 0.5}, {"high": 2.0}))


@pytest.mark.parametrize(
    ("reject", "veto", "kept"),
    [
        # A token stays when every entry keeps it.
        ([LOW], None, [True, True, False, True]),
        ([HIGH], None, [True, False, True, True]),
        ([LOW, HIGH], None, [True, False, False, True]),
        ([HIGH], (0.5, 10.0), [True, False, False, False]),
        # k2: ln(4)^2 / 2 = 0.96 of both; k3: 4 - 1 - ln 4 = 1.61, and 1/4 - 1 + ln 4 = 0.64.
        ([RejectionConfig(statistic="k2", over="max", high=0.9)], None, [False] * 4),
        ([RejectionConfig(statistic="k3", over="max", high=1.0)], None, [False, False, True, True]),
    ],
)
def test_rejections_by_hand(reject, veto, kept):
    assert corrected(reject=reject, veto=veto).is_kept.tolist() == kept
