"""Metrics of answers by data source."""

import msgspec
import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.learner.batching.build_batch import describe_answers
from tests.builders import make_trajectory


def test_every_source_has_its_own_numbers():
    found = describe_answers(
        [
            make_trajectory(data_source="a/b", reward=Reward(1.0, {"x": 2.0}, is_correct=True), metrics={"calls": 3.0}),
            make_trajectory(data_source="a/b", reward=Reward(0.0, {"x": 1.0, "y": 5.0}), num_turns=2),
            make_trajectory(data_source="a/b", reward=Reward(0.0, status="error"), stop_reason="tool_failure"),
            make_trajectory(data_source="c", reward=Reward(0.0, status="timeout")),
        ]
    )
    prefix = "learner/by_source/a/b/"
    assert {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)} == {
        "trajectories": 3,
        "failed_fraction": pytest.approx(1 / 3),
        "length_mean": 6,
        "turns_mean": pytest.approx(4 / 3),
        "reward_mean": 0.5,
        "correct_fraction": 0.5,
        "stop_stop": pytest.approx(2 / 3),
        "stop_tool_failure": pytest.approx(1 / 3),
        "part_x": 1.5,
        "part_y": 5,
        "agent_calls": 3,
    }
    assert found["learner/by_source/c/failed_fraction"] == 1
    assert "learner/by_source/c/reward_mean" not in found
    # Plain floats: the store accepts nothing else.
    assert {type(value) for value in found.values()} == {float}


def test_the_rarest_of_many_sources_are_one():
    common = [make_trajectory(data_source=str(number % 32)) for number in range(64)]
    rare = [make_trajectory(data_source=f"rare-{number}") for number in range(5)]
    found = describe_answers([*common, *rare, msgspec.structs.replace(common[0], data_source="")])
    assert found["learner/by_source/others/trajectories"] == 6
    assert found["learner/by_source/31/trajectories"] == 2
