"""Evaluations are opened by name. One without any reward is requested again under another name."""

import pytest

from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Reward
from slipstream.configs.data import DataConfig, EvalSet
from slipstream.configs.learner import EvaluationConfig
from slipstream.learner.evaluation import EvaluationProgress, Evaluator
from tests.contract.stores import answer, lease, open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

SETS = DataConfig(train="a", eval="b").eval_sets


@pytest.fixture
def store() -> MemoryStore:
    opened = open_run(MemoryStore())
    opened.announce_version(0)
    return opened


def make_evaluator(store: MemoryStore, *, monitor: int = 1, final: int = 2, sets=SETS, num_rows: int = 3) -> Evaluator:
    config = EvaluationConfig(num_prompts=monitor, num_final_prompts=final)
    return Evaluator(store, config, sets=sets, num_rows=dict.fromkeys((each.name for each in sets), num_rows))


@pytest.fixture
def evaluator(store: MemoryStore) -> Evaluator:
    return make_evaluator(store)


def reply(store: MemoryStore, *, status: str) -> int:
    """Answer every open prompt with a reward of this status. Returns the number of prompts."""
    leases: list[Lease] = lease(store, 2)
    reward = Reward(total=0.0, status=status)
    store.insert([answer(each, attempt=each.attempt, reward=reward) for each in leases])
    return len(leases)


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
    assert EvaluationConfig(num_final_prompts=512).rows(num_rows) == (monitored, final)


def test_only_rows_that_exist_are_requested(store):
    evaluator = make_evaluator(store, monitor=4, final=4, num_rows=2)
    evaluator.open_monitor(step=1, fence=1, version=0)
    evaluator.open_final("before", version=0)
    assert [each.row for each in lease(store, 16) if each.purpose != "train"] == [0, 0, 1, 1]


def test_a_repeated_step_is_evaluated_again(store, evaluator):
    first = evaluator.open_monitor(step=10, fence=10, version=0)
    reply(store, status="ok")
    again = evaluator.open_monitor(step=10, fence=14, version=0)
    assert evaluator.result(first)
    assert evaluator.result(again) is None


def test_an_evaluation_without_a_reward_is_requested_under_another_name(store, evaluator):
    evaluator.open_final("before", version=0)
    reply(store, status="error")
    assert evaluator.open_final("before", version=0) == "before-2"
    reply(store, status="timeout")
    assert evaluator.open_final("before", version=0) == "before-3"
    assert (evaluator.num_answered("before-3"), evaluator.num_asked("before-3")) == (0, 4)
    assert evaluator.result("before-3") is None
    assert reply(store, status="ok") == evaluator.num_answered("before-3") == 4
    assert set(evaluator.result("before-3")) == {"sampled", "greedy"}
    assert evaluator.open_final("before", version=0) == "before-3"


def test_the_remaining_time_of_an_evaluation_follows_from_the_rate_since_its_first_answer():
    clock = FakeClock(0.0)
    progress = EvaluationProgress(clock=clock)
    said = []
    for now, answered in ((60.0, 0), (70.0, 5), (80.0, 25), (95.0, 55)):
        clock.now = now
        said.append(progress.describe(answered, 105).removesuffix(" left"))
    rest = (" answers are in", " answers are in", " answers are in, about 40 s", " answers are in, about 25 s")
    assert said == [f"{count} of 105{end}" for count, end in zip((0, 5, 25, 55), rest, strict=True)]


def test_each_set_has_its_rows_and_samples(store):
    sets = [EvalSet("aime", "a", samples=3), EvalSet("gsm8k", "b", temperature=0.5)]
    config = EvaluationConfig(num_prompts=1, num_final_prompts=2)
    evaluator = Evaluator(store, config, sets=sets, num_rows={"aime": 2, "gsm8k": 30})
    evaluator.open_final("before", version=0)
    leases = lease(store, 5)[:5]
    expected = [*[("aime", 1, [0])] * 3, ("gsm8k", 1, [0]), ("gsm8k", 2, [0])]
    assert [(each.purpose, each.row, each.indices) for each in leases] == expected
    assert len({each.group_id for each in leases}) == 5
    rewards = [Reward(total=1.0, is_correct=True)] * 2 + [Reward(total=0.0)] * 3
    store.insert([answer(each, reward=reward) for each, reward in zip(leases, rewards, strict=True)])
    accuracies = {name: result.accuracy for name, result in evaluator.result("before").items()}
    assert accuracies == {"aime": pytest.approx(2 / 3), "gsm8k": 0.0}


def test_metrics_are_of_every_set_and_of_each_data_source(store):
    evaluator = make_evaluator(store, monitor=2, sets=[EvalSet("aime", "a", samples=4)], num_rows=9)
    evaluator.open_monitor(step=1, fence=1, version=0)
    right = [True, False, False, False, True, True, False, False]
    rewards = [Reward(total=float(each), is_correct=each) for each in right]
    for each, reward in zip(lease(store, 4), rewards, strict=True):
        store.insert([answer(each, reward=reward, data_source="a" if each.row == 0 else "b")])
    assert evaluator.metrics(evaluator.take_finished()) == pytest.approx(
        {
            "eval/version": 0,
            "eval/accuracy_aime": 3 / 8,
            "eval/reward_aime": 3 / 8,
            "eval/pass@2_aime": (1 / 2 + 5 / 6) / 2,
            "eval/pass@4_aime": 1.0,
            "eval/by_source/a/accuracy_aime": 1 / 4,
            "eval/by_source/a/reward_aime": 1 / 4,
            "eval/by_source/b/accuracy_aime": 1 / 2,
            "eval/by_source/b/reward_aime": 1 / 2,
        }
    )
