import msgspec
import numpy as np
import pytest

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.errors import BatchError
from tests.unit.learner.builders import GREEDY, VOCABULARY, make_groups, make_response


def built(groups, **overrides):
    settings = {
        "learner_version": 5,
        "max_lags": [2] * len(groups),
        "weights": [1.0] * len(groups),
        "num_updates": 1,
        "vocab_size": VOCABULARY,
    }
    return build_batch(groups, **(settings | overrides))


def fresh(index: int, **overrides):
    return make_response(0, index, version=5, **overrides)


def test_columns_lie_group_by_group_and_token_by_token():
    groups = [
        [make_response(0, 0, reward=1.0, version=5), make_response(0, 1, reward=3.0, version=3, response=(5, 1))],
        [make_response(1, 0, reward=70.0, version=4)],
    ]
    batch = built(groups, weights=[1.0, 0.25]).batch
    assert batch.trajectories.groups.tolist() == [0, 0, 1]
    assert batch.trajectories.rewards.tolist() == [1, 3, 70]
    assert batch.trajectories.num_trained.tolist() == batch.trajectories.lengths.tolist() == [4, 2, 4]
    assert batch.trajectories.draw_weights.tolist() == [1.0, 1.0, 0.25]
    assert batch.tokens.sequences.tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert batch.tokens.lags.tolist() == [0] * 4 + [2] * 2 + [1] * 4
    assert batch.tokens.generator_logprobs.tolist() == [-2.0] * 10


def test_samples_have_their_indices_in_the_columns():
    updates = built(make_groups(num_groups=4, version=5), num_updates=2).updates
    indices = np.concatenate([sample.indices for samples in updates for sample in samples])
    assert sorted(indices.tolist()) == list(range(len(indices)))
    batch = built(make_groups(num_groups=4, version=5), num_updates=2).batch
    for update, samples in enumerate(updates):
        own = batch.tokens.sequences[np.concatenate([sample.indices for sample in samples])]
        assert set(batch.trajectories.updates[own].tolist()) == {update}


def test_turns_are_counted_by_runs_of_model_written_tokens():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    batch = built([[fresh(0, model_mask=mask, version_spans=[VersionSpan(2, 5)])]]).batch
    assert batch.tokens.turns.tolist() == [0, 0, 1, 1, 1]
    assert batch.tokens.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.tokens.positions_in_turn.tolist() == [0, 1, 0, 1, 2]


def test_turns_and_positions_are_each_trajectorys_own():
    ends_written, begins_written = np.array([0, 1, 1, 0, 0, 1]), np.array([1, 1, 0, 1])
    groups = [
        [
            fresh(0, prompt=(4, 8), response=(2, 9, 5, 1), model_mask=ends_written.astype(bool)),
            fresh(1, prompt=(4, 8), response=(2, 1), model_mask=begins_written.astype(bool)),
        ],
        [fresh(0, prompt=(4,), response=(2, 1))],
    ]
    tokens = built(groups).batch.tokens
    # Nothing predicts the first token of a trajectory, so it is counted but not trained.
    assert tokens.sequences.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tokens.turns.tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert tokens.positions.tolist() == [0, 1, 2, 1, 2, 0, 1]
    assert tokens.positions_in_turn.tolist() == [0, 1, 0, 1, 0, 0, 1]


def test_a_trajectory_of_two_contexts_is_one_member_with_two_samples():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    tokens = {"prompt": (4, 8), "response": (2, 9, 5, 1, 7, 3)}
    two = fresh(0, model_mask=mask, version_spans=[VersionSpan(2, 5)], context_starts=[6], **tokens)
    found = built([[two, fresh(1, reward=3.0, prompt=(4, 8), response=(2, 1))]])
    columns = found.batch.tokens
    # The second context begins inside what would be one turn. Nothing predicts its first token.
    assert columns.sequences.tolist() == [0, 0, 0, 0, 1, 1]
    assert columns.contexts.tolist() == [0, 0, 0, 1, 2, 2]
    assert columns.turns.tolist() == [0, 0, 1, 2, 0, 0]
    assert columns.positions_in_turn.tolist() == [0, 1, 0, 1, 0, 1]
    first, second, other = found.updates[0]
    assert (first.token_ids.tolist(), first.trained.tolist()) == ([4, 8, 2, 9, 5, 1], [2, 3, 5])
    assert (second.token_ids.tolist(), second.trained.tolist()) == ([7, 3], [1])
    assert [sample.indices.tolist() for sample in (first, second, other)] == [[0, 1, 2], [3], [4, 5]]
    assert len(found.batch.trajectories.rewards) == 2


def test_turn_rewards_are_at_the_last_trained_token():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    turns = msgspec.structs.replace(
        fresh(0, prompt=(4, 8), response=(2, 9, 5, 1, 7, 3), model_mask=mask, version_spans=[VersionSpan(2, 5)]),
        reward=Reward(total=3.0, turns=[0.5, 1.0]),
    )
    assert built([[turns, fresh(1, response=(2, 1))]]).batch.tokens.turn_rewards.tolist() == [0, 0.5, 0, 0, 1, 0, 0]
    assert built([[fresh(1)]]).batch.tokens.turn_rewards is None


def test_positions_count_the_tokens_that_are_too_old_as_well():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    batch = built([[fresh(0, model_mask=mask, version_spans=[VersionSpan(2, 0), VersionSpan(6, 5)])]]).batch
    assert batch.tokens.turns.tolist() == [1, 1]
    assert batch.tokens.positions.tolist() == [3, 4]
    assert batch.tokens.positions_in_turn.tolist() == [1, 2]


def test_parts_of_rewards_are_columns_by_name():
    both = fresh(0, reward=0.0)
    both = msgspec.structs.replace(both, reward=Reward(total=3.0, parts={"format": 1.0, "answer": 2.0}))
    one = msgspec.structs.replace(fresh(1), reward=Reward(total=1.0, parts={"format": 1.0}))
    batch = built([[both, one]]).batch
    assert batch.part_names == ("answer", "format")
    assert batch.trajectories.parts[0].tolist() == [2.0, 1.0]
    assert np.isnan(batch.trajectories.parts[1, 0].item())


def test_a_failed_reward_leaves_the_loss_and_the_baseline():
    failed = fresh(2)
    failed = msgspec.structs.replace(failed, reward=Reward(total=0.0, status="timeout"))
    result = built([[fresh(0, reward=4.0), fresh(1, reward=2.0), failed]])
    (samples,) = result.updates
    assert result.batch.trajectories.is_member.tolist() == [True, True, False]
    assert [len(s.trained) for s in samples] == [4, 4, 0]
    assert result.metrics["learner/failed_fraction"] == pytest.approx(1 / 3)
    assert result.metrics["learner/reward_mean"] == 3.0


def test_metrics_are_plain_numbers_which_the_store_can_hold():
    metrics = built([[fresh(0, reward=4.0), fresh(1, reward=2.0)]]).metrics
    assert {type(value) for value in metrics.values()} == {float}


def test_stale_tokens_leave_the_loss_and_stay_in_the_baseline():
    old = fresh(0, reward=4.0, version_spans=[VersionSpan(4, 2), VersionSpan(6, 3)])
    result = built([[old, fresh(1, reward=2.0)]])
    (samples,) = result.updates
    assert samples[0].trained.tolist() == [6, 7]
    assert result.batch.trajectories.is_member.all()
    assert result.metrics["learner/stale_fraction"] == pytest.approx(2 / 8)
    assert result.metrics["learner/stale_length_ratio"] == 1.0


def test_the_mean_length_of_stale_answers_is_compared_with_the_overall_mean():
    long = make_response(0, 0, response=(5,) * 9, version_spans=[VersionSpan(4, 2), VersionSpan(6, 3)])
    short = make_response(0, 1, response=(5,) * 3, version=3)
    metrics = built([[long, short]]).metrics
    assert metrics["learner/stale_fraction"] == pytest.approx(2 / 12)
    assert metrics["learner/stale_length_ratio"] == pytest.approx(9 / 6)
    assert "learner/stale_length_ratio" not in built([[short]]).metrics


def test_every_token_has_the_lag_of_the_version_that_sampled_it():
    mixed = fresh(0, version_spans=[VersionSpan(4, 3), VersionSpan(6, 5)])
    assert built([[mixed]]).batch.tokens.lags.tolist() == [2, 2, 0, 0]


def test_tokens_newer_than_the_learner_are_trained_on():
    (samples,) = built([[fresh(0, version_spans=[VersionSpan(4, 9)])]]).updates
    assert len(samples[0].trained) == 4


def test_the_first_token_is_never_trained():
    whole = fresh(0, model_mask=np.ones(8, dtype=bool), version_spans=[VersionSpan(0, 5)])
    (samples,) = built([[whole]]).updates
    assert samples[0].trained.tolist() == list(range(1, 8))


def test_groups_are_dealt_out_to_the_updates():
    result = built(make_groups(num_groups=6, group_size=2, version=5), num_updates=3)
    assert [[s.group_id for s in update] for update in result.updates] == [
        ["0", "0", "3", "3"],
        ["1", "1", "4", "4"],
        ["2", "2", "5", "5"],
    ]
    assert result.batch.trajectories.updates.tolist() == [0, 0, 1, 1, 2, 2] * 2


def test_tokens_of_another_run_are_older_than_any_of_this_one():
    batch = built([[fresh(0)], [make_response(1, 0, version=100)]], max_lags=[2, None], num_mixed=1).batch
    assert batch.tokens.lags[:4].tolist() == [0] * 4
    assert batch.trajectories.num_trained.tolist() == [4, 4]
    assert (batch.tokens.lags[4:] > 1000).all()


@pytest.mark.parametrize(
    ("members", "has_baseline", "message"),
    [
        ([{"response": (VOCABULARY, 1)}], False, f"token ids must be < {VOCABULARY}, .* got {VOCABULARY} in 0-0-0"),
        ([{"sampling": GREEDY}], False, r"temperature > 0.*generators\.baseline=greedy"),
        ([{"sampling": msgspec.structs.replace(GREEDY, temperature=-1.0)}], True, "temperature > 0"),
        ([{}, {"sampling": GREEDY}, {"sampling": GREEDY}], True, "at most one greedy answer, got 0-0-1 and 0-0-2"),
    ],
    ids=["token_outside_the_vocabulary", "greedy_without_baseline", "negative_temperature", "two_greedy_answers"],
)
def test_invalid_trajectories_are_rejected_by_name(members, has_baseline, message):
    group = [fresh(index, **overrides) for index, overrides in enumerate(members)]
    with pytest.raises(BatchError, match=message):
        built([group], has_baseline=has_baseline)


def test_a_greedy_answer_is_its_groups_baseline_and_nothing_else():
    groups = [
        [fresh(0, reward=4.0), fresh(1, reward=2.0), fresh(2, reward=70.0, sampling=GREEDY)],
        [make_response(1, index, version=5, reward=1.0) for index in range(2)],
    ]
    result = built(groups, has_baseline=True)
    trajectories, without = result.batch.trajectories, built([groups[0][:2], groups[1]])
    assert trajectories.greedy_rewards.tolist()[:3] == [70.0] * 3
    assert trajectories.greedy_rewards[3:].isnan().all()
    assert trajectories.is_member.tolist() == [True, True, False, True, True]
    assert trajectories.num_trained.tolist() == [4, 4, 0, 4, 4]
    assert result.metrics == without.metrics
    assert result.batch.tokens.generator_logprobs.equal(without.batch.tokens.generator_logprobs)
    assert without.batch.trajectories.greedy_rewards.isnan().all()


def test_a_stale_greedy_answer_counts_no_stale_tokens():
    groups = [[fresh(0), fresh(1, sampling=GREEDY, version_spans=[VersionSpan(4, 0)])]]
    assert built(groups, has_baseline=True).metrics["learner/stale_fraction"] == 0.0


def test_a_greedy_answer_without_a_reward_gives_no_baseline():
    failed = msgspec.structs.replace(fresh(1, sampling=GREEDY), reward=Reward(total=0.0, status="timeout"))
    result = built([[fresh(0), failed]], has_baseline=True)
    assert result.batch.trajectories.greedy_rewards.isnan().all()
    assert result.metrics["learner/failed_fraction"] == 0.0


def test_a_reused_group_may_have_a_different_bound():
    old = [[make_response(0, index, version=0) for index in range(2)] for _ in range(3)]
    result = built(old, max_lags=[2, 5, None])
    assert [len(s.trained) for s in result.updates[0]] == [0, 0, 4, 4, 4, 4]
    assert result.metrics["learner/stale_fraction"] == pytest.approx(1 / 3)


def test_a_truncated_answer_may_leave_the_loss_and_stays_in_the_baseline():
    groups = [[fresh(0, stop_reason="length"), fresh(1)]]
    assert [len(s.trained) for s in built(groups).updates[0]] == [4, 4]
    result = built(groups, masks_truncated=True)
    assert [len(s.trained) for s in result.updates[0]] == [0, 4]
    assert result.batch.trajectories.is_member.all()
