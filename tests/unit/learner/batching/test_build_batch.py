import msgspec
import numpy as np
import pytest

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.learner.batching.build_batch import describe_answers
from slipstream.learner.errors import BatchError
from tests.builders import make_trajectory
from tests.cases import cases
from tests.unit.learner.builders import GREEDY, VOCABULARY, make_batch, make_groups, make_response

MASK = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
"""Two tokens of the model after a prompt, one of a tool, three of the model."""


def built(groups, **overrides):
    return make_batch(groups, **({"learner_version": 5, "max_lags": [2] * len(groups)} | overrides))


def fresh(index: int, **overrides):
    return make_response(0, index, version=5, **overrides)


def test_columns_lie_group_by_group_with_turns_and_positions_of_each_trajectory():
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
    ends_written, begins_written = np.array([0, 1, 1, 0, 0, 1]), np.array([1, 1, 0, 1])
    first = fresh(0, prompt=(4, 8), response=(2, 9, 5, 1), model_mask=ends_written.astype(bool))
    second = fresh(1, prompt=(4, 8), response=(2, 1), model_mask=begins_written.astype(bool))
    groups = [[first, second], [fresh(0, prompt=(4,), response=(2, 1))]]
    tokens = built(groups).batch.tokens
    # Nothing predicts the first token of a trajectory, so it is counted but not trained.
    assert tokens.sequences.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tokens.turns.tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert tokens.positions.tolist() == [0, 1, 2, 1, 2, 0, 1]
    assert tokens.positions_in_turn.tolist() == [0, 1, 0, 1, 0, 0, 1]


def test_contexts_and_groups_of_several_updates_keep_their_indices():
    result = built(make_groups(num_groups=6, group_size=2, version=5), num_updates=3)
    trajectories, tokens = result.batch.trajectories, result.batch.tokens
    groups = [[sample.group_id for sample in samples] for samples in result.updates]
    assert groups == [["0", "0", "3", "3"], ["1", "1", "4", "4"], ["2", "2", "5", "5"]]
    assert trajectories.updates.tolist() == [0, 0, 1, 1, 2, 2] * 2
    indices = [np.concatenate([sample.indices for sample in samples]) for samples in result.updates]
    assert sorted(np.concatenate(indices).tolist()) == list(range(len(tokens.sequences)))
    for update, own in enumerate(indices):
        assert set(trajectories.updates[tokens.sequences[own]].tolist()) == {update}
    tokens = {"prompt": (4, 8), "response": (2, 9, 5, 1, 7, 3)}
    two = fresh(0, model_mask=MASK, version_spans=[VersionSpan(2, 5)], context_starts=[6], **tokens)
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


def test_turn_rewards_are_at_the_last_trained_token_and_positions_count_those_too_old():
    tokens = {"prompt": (4, 8), "response": (2, 9, 5, 1, 7, 3)}
    written = fresh(0, model_mask=MASK, version_spans=[VersionSpan(2, 5)], **tokens)
    turns = msgspec.structs.replace(written, reward=Reward(total=3.0, turns=[0.5, 1.0]))
    assert built([[turns, fresh(1, response=(2, 1))]]).batch.tokens.turn_rewards.tolist() == [0, 0.5, 0, 0, 1, 0, 0]
    assert built([[fresh(1)]]).batch.tokens.turn_rewards is None
    batch = built([[fresh(0, model_mask=MASK, version_spans=[VersionSpan(2, 0), VersionSpan(6, 5)])]]).batch
    assert batch.tokens.turns.tolist() == [1, 1]
    assert batch.tokens.positions.tolist() == [3, 4]
    assert batch.tokens.positions_in_turn.tolist() == [1, 2]


def test_turns_that_answer_the_same_tokens_have_the_same_observation():
    # Prompt 4 8; each answer: a turn of two tokens, an observation, a turn of two tokens.
    mask = np.array([False, False, True, True, False, True, True])
    written = [
        fresh(number, model_mask=mask, version_spans=[VersionSpan(2, 5)], prompt=(4, 8), response=response)
        for number, response in enumerate([(2, 9, 5, 7, 3), (3, 3, 5, 2, 2), (2, 9, 6, 7, 3)])
    ]
    # A context that ends with an observation, and one with the same prompt.
    again = fresh(
        3,
        model_mask=np.array([False, False, True, False, False, False, True]),
        version_spans=[VersionSpan(2, 5)],
        context_starts=[4],
        prompt=(4, 8),
        response=(2, 5, 4, 8, 1),
    )
    tokens = built([[*written, again]], has_observations=True).batch.tokens
    first, _, second, _ = tokens.observations[:4].tolist()
    other = tokens.observations[10].item()
    expected = [first, first, second, second] * 2 + [first, first, other, other, first, first]
    assert tokens.observations.tolist() == expected
    assert len({first, second, other}) == 3
    assert built([written]).batch.tokens.observations is None


def test_parts_of_rewards_are_columns_and_a_failed_reward_leaves_the_loss_and_the_baseline():
    both = msgspec.structs.replace(fresh(0), reward=Reward(total=3.0, parts={"format": 1.0, "answer": 2.0}))
    one = msgspec.structs.replace(fresh(1), reward=Reward(total=1.0, parts={"format": 1.0}))
    batch = built([[both, one]]).batch
    assert batch.part_names == ("answer", "format")
    assert batch.trajectories.parts[0].tolist() == [2.0, 1.0]
    assert np.isnan(batch.trajectories.parts[1, 0].item())
    failed = msgspec.structs.replace(fresh(2), reward=Reward(total=0.0, status="timeout"))
    result = built([[fresh(0, reward=4.0), fresh(1, reward=2.0), failed]])
    (samples,) = result.updates
    assert result.batch.trajectories.is_member.tolist() == [True, True, False]
    assert [len(s.trained) for s in samples] == [4, 4, 0]
    assert result.metrics["learner/failed_fraction"] == pytest.approx(1 / 3)
    assert result.metrics["learner/reward_mean"] == 3.0
    assert {type(value) for value in result.metrics.values()} == {float}, "the store holds plain numbers"


def test_stale_tokens_leave_the_loss_and_lags_are_from_the_sampling_version_with_bounds_per_group():
    old = fresh(0, reward=4.0, version_spans=[VersionSpan(4, 2), VersionSpan(6, 3)])
    result = built([[old, fresh(1, reward=2.0)]])
    (samples,) = result.updates
    assert samples[0].trained.tolist() == [6, 7]
    assert result.batch.trajectories.is_member.all()
    assert result.metrics["learner/stale_fraction"] == pytest.approx(2 / 8)
    assert result.metrics["learner/stale_length_ratio"] == 1.0
    long = make_response(0, 0, response=(5,) * 9, version_spans=[VersionSpan(4, 2), VersionSpan(6, 3)])
    short = make_response(0, 1, response=(5,) * 3, version=3)
    metrics = built([[long, short]]).metrics
    assert metrics["learner/stale_fraction"] == pytest.approx(2 / 12)
    assert metrics["learner/stale_length_ratio"] == pytest.approx(9 / 6)
    assert "learner/stale_length_ratio" not in built([[short]]).metrics
    mixed, newer = fresh(0, version_spans=[VersionSpan(4, 3), VersionSpan(6, 5)]), make_response(0, 1, version=9)
    result = built([[mixed, newer]])
    assert result.batch.tokens.lags[:4].tolist() == [2, 2, 0, 0]
    assert [len(sample.trained) for sample in result.updates[0]] == [4, 4]
    batch = built([[fresh(0)], [make_response(1, 0, version=100)]], max_lags=[2, None], num_mixed=1).batch
    assert batch.tokens.lags[:4].tolist() == [0] * 4
    assert batch.trajectories.num_trained.tolist() == [4, 4]
    assert (batch.tokens.lags[4:] > 1000).all()
    old = [[make_response(0, index, version=0) for index in range(2)] for _ in range(3)]
    result = built(old, max_lags=[2, 5, None])
    assert [len(s.trained) for s in result.updates[0]] == [0, 0, 4, 4, 4, 4]
    assert result.metrics["learner/stale_fraction"] == pytest.approx(1 / 3)


@cases(
    "members, has_baseline, message",
    ([{"response": (VOCABULARY, 1)}], False, f"token ids must be < {VOCABULARY}, .* got {VOCABULARY} in 0-0-0"),
    ([{"sampling": GREEDY}], False, r"temperature > 0.*algorithm/advantage=remax"),
    ([{"sampling": msgspec.structs.replace(GREEDY, temperature=-1.0)}], True, "temperature > 0"),
    ([{}, {"sampling": GREEDY}, {"sampling": GREEDY}], True, "at most one greedy answer, got 0-0-1 and 0-0-2"),
)
def test_invalid_trajectories_are_rejected_by_name(members, has_baseline, message):
    group = [fresh(index, **overrides) for index, overrides in enumerate(members)]
    with pytest.raises(BatchError, match=message):
        built([group], has_baseline=has_baseline)


def test_greedy_answers_are_the_baseline_alone_and_truncated_ones_may_leave_the_loss():
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
    stale = fresh(1, sampling=GREEDY, version_spans=[VersionSpan(4, 0)])
    assert built([[fresh(0), stale]], has_baseline=True).metrics["learner/stale_fraction"] == 0.0
    failed = msgspec.structs.replace(fresh(1, sampling=GREEDY), reward=Reward(total=0.0, status="timeout"))
    result = built([[fresh(0), failed]], has_baseline=True)
    assert result.batch.trajectories.greedy_rewards.isnan().all()
    assert result.metrics["learner/failed_fraction"] == 0.0
    groups = [[fresh(0, stop_reason="length"), fresh(1)]]
    assert [len(s.trained) for s in built(groups).updates[0]] == [4, 4]
    result = built(groups, masks_truncated=True)
    assert [len(s.trained) for s in result.updates[0]] == [0, 4]
    assert result.batch.trajectories.is_member.all()


def test_every_source_has_its_own_numbers_and_the_rarest_of_many_are_one():
    found = describe_answers(
        [
            make_trajectory(data_source="a/b", reward=Reward(1.0, {"x": 2.0}, is_correct=True), metrics={"calls": 3.0}),
            make_trajectory(data_source="a/b", reward=Reward(0.0, {"x": 1.0, "y": 5.0}), num_turns=2),
            make_trajectory(data_source="a/b", reward=Reward(0.0, status="error"), stop_reason="tool_failure"),
            make_trajectory(data_source="c", reward=Reward(0.0, status="timeout")),
        ]
    )
    prefix = "learner/by_source/a/b/"
    expected = {"trajectories": 3, "failed_fraction": 1 / 3, "length_mean": 6, "turns_mean": 4 / 3, "reward_mean": 0.5}
    expected |= {"correct_fraction": 0.5, "stop_stop": 2 / 3, "stop_tool_failure": 1 / 3}
    expected |= {"part_x": 1.5, "part_y": 5, "agent_calls": 3}
    own = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    assert own == pytest.approx(expected)
    assert found["learner/by_source/c/failed_fraction"] == 1
    assert "learner/by_source/c/reward_mean" not in found
    assert {type(value) for value in found.values()} == {float}, "the store holds plain numbers"
    common = [make_trajectory(data_source=str(number % 32)) for number in range(64)]
    rare = [make_trajectory(data_source=f"rare-{number}") for number in range(5)]
    found = describe_answers([*common, *rare, msgspec.structs.replace(common[0], data_source="")])
    assert found["learner/by_source/others/trajectories"] == 6
    assert found["learner/by_source/31/trajectories"] == 2
