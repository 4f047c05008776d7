import itertools
import random
from collections import Counter
from statistics import mean

import numpy as np
import pytest

from slipstream.buffer.records import EvaluationAnswer, Lease, make_answer
from slipstream.buffer.trajectory import Reward
from slipstream.configs.data import DataConfig, EvalSet
from slipstream.configs.learner import EvaluationConfig
from slipstream.learner import evaluation
from slipstream.learner.evaluation import Evaluator, Sums, differences, estimate, metric_sums
from tests.builders import make_trajectory
from tests.cases import cases
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
    leases: list[Lease] = lease(store, 2)
    reward = Reward(total=0.0, status=status)
    store.insert([answer(each, attempt=each.attempt, reward=reward) for each in leases])
    return len(leases)


@cases(
    "num_rows, monitored, final",
    (640, range(128), range(128, 640)),
    (9999, range(128), range(128, 640)),
    (639, range(127), range(127, 639)),
    (30, range(6), range(6, 30)),
    (3, range(1), range(1, 3)),
    (2, range(1), range(1, 2)),
    (1, range(1), range(1)),
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
    progress = evaluation.EvaluationProgress(clock=clock)
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
    expected = {"version": 0, "pass@2_aime": (1 / 2 + 5 / 6) / 2, "pass@4_aime": 1.0}
    for place, share in (("", 3 / 8), ("by_source/a/", 1 / 4), ("by_source/b/", 1 / 2)):
        expected |= {f"{place}accuracy_aime": share, f"{place}reward_aime": share}
    found = evaluator.metrics(evaluator.take_finished())
    assert found == pytest.approx({f"eval/{name}": value for name, value in expected.items()})


def scored(row: int, reward: float, *, right: bool = False, name: str = "", **fields: object) -> EvaluationAnswer:
    plain = {"status": "ok", "data_source": "a", "stop_reason": "stop", "num_tokens": 5, "version": 0}
    return EvaluationAnswer(row=row, reward=reward, is_correct=right, answer=name, **(plain | fields))  # type: ignore[arg-type]


def subsets(num: int) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    return [(k, tuple(itertools.combinations(range(num), k))) for k in range(1, num + 1)]


@pytest.mark.parametrize("num", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num: int) -> None:
    for correct in range(num + 1):
        for k, chosen in subsets(num):
            shares = mean(any(index < correct for index in subset) for subset in chosen)
            assert evaluation.pass_at_k(num, correct, k) == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_best_and_worst_are_the_means_over_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    rewards = [draw.choice([-1.0, 0.0, 0.25, 1.0]) for _ in range(draw.randint(1, 7))]
    for k, chosen in subsets(len(rewards)):
        assert evaluation.best_at_k(rewards, k) == pytest.approx(mean(max(rewards[i] for i in each) for each in chosen))
        found = metric_sums([scored(0, reward) for reward in rewards])
        if f"worst@{k}" in found:
            assert found[f"worst@{k}"].mean == pytest.approx(mean(min(rewards[i] for i in each) for each in chosen))


@pytest.mark.parametrize("seed", range(20))
def test_a_majority_is_the_mean_over_all_subsets_with_ties_by_lot(seed: int) -> None:
    draw = random.Random(seed)
    names = [draw.choice(["42", "7", "-1", ""]) for _ in range(draw.randint(2, 8))]
    right = [name == "42" for name in names]

    def value(subset: tuple[int, ...]) -> float:
        votes = Counter(names[index] or f"alone-{index}" for index in subset)
        winners = [name for name, count in votes.items() if count == max(votes.values())]
        return winners.count("42") / len(winners)

    for k, chosen in subsets(len(names)):
        assert evaluation.majority_at_k(names, right, k) == pytest.approx(mean(map(value, chosen)), abs=1e-6)


def test_a_majority_of_too_many_subsets_is_close_to_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["42"] * 6 + ["7"] * 5 + ["9"] * 3
    exact = evaluation.majority_at_k(names, [name == "42" for name in names], 7)
    monkeypatch.setattr(evaluation, "_MOST_SUBSETS", 2000)
    evaluation._subsets.cache_clear()
    drawn = evaluation.majority_at_k(names, [name == "42" for name in names], 7)
    evaluation._subsets.cache_clear()
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=0.03)


def test_scores_of_powers_of_two_intervals_and_differences():
    found = metric_sums([scored(row, row % 2, right=row % 2 == 1) for row in range(2) for _ in range(6)])
    assert [name for name in found if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert [name for name in found if name.startswith("maj")] == ["maj@2", "maj@4", "maj@6"]
    assert {found[f"pass@{k}"].mean for k in (1, 2, 4, 6)} == {found["accuracy"].mean} == {0.5}
    assert set(metric_sums([scored(0, 1.0)])) == {"accuracy", "reward"}
    failed = scored(0, 0.0, status="timeout")
    found = metric_sums([scored(0, 1.0, right=True, name="42"), failed, failed, failed])
    assert found["accuracy"].mean == 0.25
    assert found["reward"].mean == 1.0
    assert found["maj@4"].mean == pytest.approx(0.25), "four answers of one vote each"
    assert "best@4" not in found
    assert evaluation.score([failed]).metrics.keys() == {"accuracy"}
    draws = np.random.default_rng(0)
    found = [estimate(Sums((draws.random(80) < 0.3).astype(float), np.ones(80))) for _ in range(300)]
    covered = sum(each.low <= 0.3 <= each.high for each in found)
    assert 0.90 <= covered / 300 <= 0.98
    # Every prompt gains exactly 0.1: the models vary together, their difference not at all.
    base = np.random.default_rng(1).random(50)
    (found,) = differences({"reward": Sums(base + 0.1, np.ones(50))}, {"reward": Sums(base, np.ones(50))}).values()
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert estimate(Sums(base, np.ones(50))).high - estimate(Sums(base, np.ones(50))).low > 0.1
    assert differences({"reward": Sums(base, base)}, {"reward": Sums(base[1:], base[1:])}) == {}


def test_an_answer_is_the_extracted_text_or_the_response_and_several_sources_stand_apart():
    right = make_trajectory(reward=Reward(1.0, is_correct=True, detail="42"))
    assert make_answer(3, right, text="it is 42").answer == "42"
    assert make_answer(3, make_trajectory(reward=Reward(1.0)), text="it is 42").answer == "it is 42"
    error = Reward(0.0, status="error", detail="boom", is_correct=True)
    failed = make_answer(3, make_trajectory(reward=error), text="x")
    assert (failed.answer, failed.is_correct) == ("", False)
    assert evaluation.by_source([scored(0, 1.0), scored(1, 1.0)]) == {}
    assert set(evaluation.by_source([scored(0, 1.0), scored(1, 1.0, data_source="b")])) == {"a", "b"}
