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
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, RejectionConfig
from slipstream.configs.policy_losses import KlCovConfig, M2poConfig
from slipstream.learner.algorithms.inputs import RatioInputs
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.training.loss_inputs import correct, describe_advantages
from slipstream.learner.training.objective import Objective
from tests.unit.learner.builders import VOCABULARY, make_groups, make_response


def batch_of(groups, *, num_updates: int = 1, weights=None):
    return build_batch(
        groups,
        learner_version=0,
        max_lags=[None] * len(groups),
        weights=weights or [1.0] * len(groups),
        num_updates=num_updates,
        vocab_size=VOCABULARY,
    ).batch


def prepared(groups, *, num_updates: int = 1, weights=None, **settings):
    config = AlgorithmConfig(**({"advantage": DrGrpoConfig()} | settings))
    return Objective(config, max_tokens=8).prepare(batch_of(groups, num_updates=num_updates, weights=weights))


def of_trajectories(batch, column):
    first = [int((batch.tokens.sequences == index).nonzero()[0]) for index in range(batch.num_trajectories)]
    return getattr(batch.tokens, column)[first].tolist()


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
    batch = batch_of([[make_response(0, 0, reward=3.0, **TWO_TURNS)]])
    values = [0.5, 1.0, 2.0, 1.5]
    batch = batch.with_tokens(values=torch.tensor(values))
    settings = {"gamma": 0.5, "lam": 0.5, "epsilon": None}
    found = Objective(AlgorithmConfig(advantage=GaeConfig(**settings)), max_tokens=8).prepare(batch)
    # From the end: r - V; then gamma * V of the model's next token - V, plus gamma * lambda * the advantage after it.
    expected = [3.0 - 1.5]
    for value, following in ((2.0, 1.5), (1.0, 2.0), (0.5, 1.0)):
        expected.insert(0, 0.5 * following - value + 0.25 * expected[0])
    assert found.tokens.advantages.tolist() == pytest.approx(expected)


def test_token_weights_count_over_the_whole_update():
    groups = [[make_response(0, 0, response=(5, 6)), make_response(0, 1, response=(5, 6, 7, 1))]]
    assert of_trajectories(prepared(groups), "token_weights") == pytest.approx([1 / 6, 1 / 6])


def test_each_update_has_denominators_of_its_own():
    groups = [[make_response(0, 0, response=(5, 6))], [make_response(1, 0, response=(5, 6, 7, 1))]]
    assert of_trajectories(prepared(groups, num_updates=2), "token_weights") == pytest.approx([1 / 2, 1 / 4])


def test_a_groups_weight_multiplies_the_weight_of_its_tokens():
    groups = make_groups(num_groups=2, group_size=2)
    plain, weighed = prepared(groups), prepared(groups, weights=[1.0, 0.25])
    ratios = torch.tensor(of_trajectories(weighed, "token_weights")) / torch.tensor(
        of_trajectories(plain, "token_weights")
    )
    assert ratios.tolist() == pytest.approx([1.0, 1.0, 0.25, 0.25])


def test_a_group_that_is_drawn_for_less_is_imitated_for_less():
    right = Reward(total=1.0, is_correct=True)
    groups = [[make_response(group, index) for index in range(2)] for group in range(2)]
    groups = [[msgspec.structs.replace(member, reward=right) for member in group] for group in groups]
    settings = {"positive_nll_coefficient": 0.5}
    plain, weighed = prepared(groups, **settings), prepared(groups, weights=[1.0, 0.25], **settings)
    own = plain.tokens.sequences >= 2
    assert plain.tokens.nll_weights[own].any()
    assert weighed.tokens.nll_weights[own].equal(0.25 * plain.tokens.nll_weights[own])
    assert weighed.tokens.nll_weights[~own].equal(plain.tokens.nll_weights[~own])


def test_after_a_rejection_the_baseline_still_has_who_was_masked_for_its_length():
    cut = make_response(0, 2, reward=0.0, stop_reason="length")
    groups = [[make_response(0, 0, reward=1.0), make_response(0, 1, reward=0.0), cut]]
    correction = CorrectionConfig(rebaseline=True, veto=(0.1, 10.0))
    config = AlgorithmConfig(advantage=DrGrpoConfig(), correction=correction)
    batch = build_batch(
        groups,
        learner_version=0,
        max_lags=[None],
        weights=[1.0],
        num_updates=1,
        vocab_size=VOCABULARY,
        masks_truncated=True,
    ).batch
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs)
    found = Objective(config, max_tokens=8).prepare(batch)
    assert found.tokens.advantages.unique().tolist() == pytest.approx([-1 / 3, 2 / 3])


def test_only_entirely_right_answers_are_imitated():
    scores = [Reward(total=1.0, is_correct=True), Reward(total=0.9, is_correct=False)]
    group = [msgspec.structs.replace(make_response(0, i), reward=reward) for i, reward in enumerate(scores)]
    found = prepared([group], positive_nll_coefficient=0.5)
    assert of_trajectories(found, "nll_weights") == pytest.approx([0.5 / 4, 0.0])


def with_the_last_rejected(**correction):
    """Three trajectories of four tokens, rewards 0, 1, and 5. Every token of the last one is rejected."""
    batch = batch_of([[make_response(0, index, reward=reward) for index, reward in enumerate((0.0, 1.0, 5.0))]])
    drift = torch.where(batch.tokens.sequences == 2, 1.0, 0.0)
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs + drift)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)], **correction)
    return Objective(AlgorithmConfig(advantage=DrGrpoConfig(), correction=rejects), max_tokens=8).prepare(batch)


def test_a_trajectory_that_is_rejected_entirely_leaves_the_baseline_if_so_configured():
    assert of_trajectories(with_the_last_rejected(), "advantages") == [-2, -1, 3]
    assert of_trajectories(with_the_last_rejected(rebaseline=True), "advantages") == [-0.5, 0.5, 0]


def test_the_denominator_counts_rejected_tokens_unless_it_is_of_those_kept():
    assert of_trajectories(with_the_last_rejected(), "token_weights")[:2] == pytest.approx([1 / 12] * 2)
    kept = with_the_last_rejected(denominator="kept")
    assert of_trajectories(kept, "token_weights")[:2] == pytest.approx([1 / 8] * 2)


def test_a_description_of_no_token_is_zeros():
    batch = prepared(make_groups())
    empty = batch.select(torch.zeros(batch.num_trajectories, dtype=torch.bool))
    assert set(describe_advantages(empty).values()) == {0.0}


def test_groups_of_equal_rewards_have_no_advantage_of_their_parts():
    def scored(group, index, parts):
        return msgspec.structs.replace(make_response(group, index), reward=Reward(total=0.3, parts=parts))

    groups = [
        [scored(0, i, {"a": 0.1, "b": 0.2}) for i in range(3)],
        [scored(1, i, {"a": 0.1, "b": i}) for i in (0, 1, 3)],
    ]
    found = prepared(groups, advantage=GdpoConfig())
    assert of_trajectories(found, "advantages")[:3] == [0, 0, 0]
    assert of_trajectories(found, "advantages")[3:] != [0, 0, 0]


def test_a_token_baseline_compares_tokens_at_the_same_position_though_older_ones_are_masked():
    old = make_response(0, 0, reward=1.0, version_spans=[VersionSpan(4, 0), VersionSpan(6, 9)])
    groups = [[old, make_response(0, 1, reward=0.0, version=9)]]
    batch = build_batch(
        groups, learner_version=9, max_lags=[2], weights=[1.0], num_updates=1, vocab_size=VOCABULARY
    ).batch
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs, collisions=torch.full((6,), 0.5))
    config = AlgorithmConfig(advantage=OptimalTokenBaselineConfig())
    found = Objective(config, max_tokens=8).prepare(batch).tokens.advantages
    # Both have tokens at the last two positions. Only the young one has tokens at the first two.
    assert (found[:2] > 0).all()
    assert found[2:4].tolist() == [0, 0]
    assert (found[4:] < 0).all()


def test_tokens_are_selected_among_those_that_the_correction_leaves():
    batch = batch_of(make_groups())
    tokens = batch.tokens
    drift = torch.where(torch.arange(len(tokens.sequences)) % 4 == 0, 1.0, 0.01)
    start = tokens.generator_logprobs + drift
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)])
    masked = Objective(
        AlgorithmConfig(advantage=DrGrpoConfig(), masks=[M2poConfig(threshold=0.05)], correction=rejects), max_tokens=8
    )
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "what is far is rejected already"
    penalized = Objective(
        AlgorithmConfig(advantage=DrGrpoConfig(), policy_loss=KlCovConfig(share=0.5), correction=rejects), max_tokens=8
    )
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert not selected[drift == 1].any()
    assert int(selected.sum()) == int((drift < 1).sum()) // 2


def test_tokens_are_selected_in_one_update_by_its_own_tokens_alone():
    """Tokens of update 0 are close to the generator, those of update 1 are far from it."""
    batch = batch_of(make_groups(), num_updates=2)
    is_later = batch.trajectories.updates[batch.tokens.sequences] == 1
    start = batch.tokens.generator_logprobs + torch.where(is_later, 1.0, 0.01)
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    config = {
        "advantage": DrGrpoConfig(),
        "updates_per_step": 2,
        "correction": CorrectionConfig(level="none", high=None),
    }
    masked = Objective(AlgorithmConfig(masks=[M2poConfig(threshold=0.05)], **config), max_tokens=8)
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "those of the other update are not judged yet"
    found = masked.select_tokens(found, update=1, seed=0)
    assert found.tokens.is_trusted[~is_later].all()
    assert not found.tokens.is_trusted[is_later].all()
    penalized = Objective(AlgorithmConfig(policy_loss=KlCovConfig(share=0.5), **config), max_tokens=8)
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert int(selected.sum()) == int((~is_later).sum()) // 2
    assert not selected[is_later].any()


# --- weights and rejections -------------------------------------------------------------------------------------------
DRIFT = torch.tensor([1.0, 4.0, 0.25, 1.0]).log()


def corrected(drift=DRIFT, learner_log_ratio=None, **settings):
    inputs, learner = (
        RatioInputs(x, torch.tensor([0, 0, 1, 1]), 2)
        for x in (drift, drift if learner_log_ratio is None else learner_log_ratio)
    )
    return correct(inputs, learner=learner, config=CorrectionConfig(**settings))


def test_without_a_level_every_token_counts_once():
    found = corrected(level="none", high=None)
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.all()
    assert not found.is_bounded.any()


def test_truncated_weights_are_reported_as_bounded():
    found = corrected(level="token", high=2.0, low=0.5)
    assert found.weights.tolist() == [1, 2, 0.5, 1]
    assert found.is_bounded.tolist() == [False, True, True, False]


def test_masked_weights_are_zero_and_stay_in_the_count():
    found = corrected(level="token", high=2.0, low=0.5, bound="mask")
    assert found.weights.tolist() == [1, 0, 0, 1]
    assert found.is_bounded.tolist() == [False, True, True, False]
    assert found.is_kept.all()


def test_a_sequence_is_bounded_as_one():
    found = corrected(level="sequence", high=2.0)
    assert found.weights.tolist() == pytest.approx([2, 2, 0.25, 0.25])
    assert found.is_bounded.tolist() == [True, True, False, False]


def test_normalized_weights_have_the_mean_one_over_what_they_belong_to():
    by_token = corrected(level="token", high=2.0, normalize=True)
    assert by_token.weights.tolist() == pytest.approx([1 / 1.0625, 2 / 1.0625, 0.25 / 1.0625, 1 / 1.0625])
    by_sequence = corrected(level="sequence", high=2.0, normalize=True)
    assert by_sequence.weights.tolist() == pytest.approx([2 / 1.125, 2 / 1.125, 0.25 / 1.125, 0.25 / 1.125])


def test_weights_are_the_proximal_policys_and_rejections_the_learners():
    entry = RejectionConfig(over="token", high=2.0)
    found = corrected(learner_log_ratio=torch.zeros(4), level="token", high=2.0, reject=[entry], veto=(0.5, 2.0))
    assert found.weights.tolist() == [1, 2, 0.25, 1]
    assert found.is_kept.all()
    found = corrected(torch.zeros(4), learner_log_ratio=DRIFT, level="token", reject=[entry])
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.tolist() == [True, False, True, True]


def test_a_token_stays_when_every_entry_keeps_it():
    low = RejectionConfig(statistic="k1", over="token", low=0.5)
    high = RejectionConfig(statistic="k1", over="token", high=2.0)
    assert corrected(reject=[low]).is_kept.tolist() == [True, True, False, True]
    assert corrected(reject=[high]).is_kept.tolist() == [True, False, True, True]
    assert corrected(reject=[low, high]).is_kept.tolist() == [True, False, False, True]
    assert corrected(reject=[high], veto=(0.5, 10.0)).is_kept.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("statistic", "high"), [("k2", 0.9), ("k3", 1.0)])
def test_each_statistic_may_be_that_of_its_largest_token(statistic, high):
    # k2: ln(4)^2 / 2 = 0.96 of both; k3: 4 - 1 - ln 4 = 1.61, and 1/4 - 1 + ln 4 = 0.64.
    entry = RejectionConfig(statistic=statistic, over="max", high=high)
    assert corrected(reject=[entry]).is_kept.tolist() == [False, False, statistic == "k3", statistic == "k3"]
