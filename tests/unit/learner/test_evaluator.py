"""Evaluations are opened by name; one without any reward is requested again under another name."""

import pytest

from slipstream.buffer.memory.store import MemoryStore
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward
from slipstream.configs.learner import EvaluationConfig
from slipstream.learner.evaluator import Evaluator
from tests.contract.stores import answer, lease, open_run


@pytest.fixture
def store() -> MemoryStore:
    opened = open_run(MemoryStore())
    opened.announce_version(0)
    return opened


@pytest.fixture
def evaluator(store: MemoryStore) -> Evaluator:
    return Evaluator(store, EvaluationConfig(monitor_prompts=1, final_prompts=2), num_rows=3)


def reply(store: MemoryStore, *, status: str) -> int:
    """Answer every open prompt with a reward of that status; returns how many there were."""
    leases: list[Lease] = lease(store, 4)
    reward = Reward(total=0.0, status=status)
    store.insert([answer(each, attempt=each.attempt, reward=reward) for each in leases])
    return len(leases)


def test_progress_and_result_are_of_both_purposes(store, evaluator):
    assert evaluator.open_final("before", version=0) == "before"
    assert (evaluator.num_answered("before"), evaluator.result("before")) == (0, None)
    assert reply(store, status="ok") == 4
    assert evaluator.num_answered("before") == 4
    assert set(evaluator.result("before")) == {"sampled", "greedy"}


@pytest.mark.parametrize(
    ("num_rows", "monitored", "final"),
    [
        (640, range(128), range(128, 640)),
        (9999, range(128), range(128, 640)),
        (639, range(127), range(127, 639)),
        (30, range(6), range(6, 30)),
        (3, range(1), range(1, 3)),
        (2, range(1), range(1, 2)),
        (1, range(1), range(1)),
    ],
)
def test_a_small_file_is_shared_between_monitored_and_final_rows(num_rows: int, monitored: range, final: range):
    assert EvaluationConfig().rows(num_rows) == (monitored, final)


def test_only_rows_that_exist_are_requested(store):
    evaluator = Evaluator(store, EvaluationConfig(monitor_prompts=4, final_prompts=4), num_rows=2)
    evaluator.open_monitor(step=1, fence=1, version=0)
    evaluator.open_final("before", version=0)
    assert [each.row for each in lease(store, 16) if each.purpose != "train"] == [0, 0, 1, 1]


def test_a_repeated_step_is_evaluated_again(store, evaluator):
    first = evaluator.open_monitor(step=10, fence=10, version=0)
    reply(store, status="ok")
    again = evaluator.open_monitor(step=10, fence=14, version=0)
    assert evaluator.result(first)
    assert evaluator.result(again) is None


def test_a_repeated_request_finds_the_same_evaluation(store, evaluator):
    evaluator.open_final("before", version=0)
    reply(store, status="ok")
    assert evaluator.open_final("before", version=0) == "before"


def test_an_evaluation_without_a_reward_is_requested_under_another_name(store, evaluator):
    evaluator.open_final("before", version=0)
    reply(store, status="error")
    assert evaluator.open_final("before", version=0) == "before-2"
    reply(store, status="timeout")
    assert evaluator.open_final("before", version=0) == "before-3"
    reply(store, status="ok")
    assert evaluator.open_final("before", version=0) == "before-3"
