"""Scores: expectations equal means over all subsets, intervals cover what they should, differences are paired."""

import itertools
import random
from collections import Counter
from statistics import mean

import numpy as np
import pytest

from slipstream.buffer.records import EvaluationAnswer, make_answer
from slipstream.buffer.trajectory import Reward
from slipstream.learner import evaluation
from slipstream.learner.evaluation import (
    Sums,
    best_at_k,
    by_source,
    differences,
    estimate,
    majority_at_k,
    metric_sums,
    pass_at_k,
    score,
)
from tests.builders import make_trajectory


def answer(row: int, reward: float, *, right: bool = False, name: str = "", **fields: object) -> EvaluationAnswer:
    plain = {"status": "ok", "data_source": "a", "stop_reason": "stop", "num_tokens": 5, "version": 0}
    return EvaluationAnswer(row=row, reward=reward, is_correct=right, answer=name, **(plain | fields))  # type: ignore[arg-type]


def subsets(num: int) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    return [(k, tuple(itertools.combinations(range(num), k))) for k in range(1, num + 1)]


@pytest.mark.parametrize("num", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num: int) -> None:
    for correct in range(num + 1):
        for k, chosen in subsets(num):
            shares = mean(any(index < correct for index in subset) for subset in chosen)
            assert pass_at_k(num, correct, k) == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_best_and_worst_are_the_means_over_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    rewards = [draw.choice([-1.0, 0.0, 0.25, 1.0]) for _ in range(draw.randint(1, 7))]
    for k, chosen in subsets(len(rewards)):
        assert best_at_k(rewards, k) == pytest.approx(mean(max(rewards[i] for i in each) for each in chosen))
        found = metric_sums([answer(0, reward) for reward in rewards])
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
        assert majority_at_k(names, right, k) == pytest.approx(mean(map(value, chosen)), abs=1e-6)


def test_a_majority_of_too_many_subsets_is_close_to_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["42"] * 6 + ["7"] * 5 + ["9"] * 3
    exact = majority_at_k(names, [name == "42" for name in names], 7)
    monkeypatch.setattr(evaluation, "_MOST_SUBSETS", 2000)
    evaluation._subsets.cache_clear()
    drawn = majority_at_k(names, [name == "42" for name in names], 7)
    evaluation._subsets.cache_clear()
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=0.03)


def test_metrics_are_at_powers_of_two_and_at_all_answers() -> None:
    found = metric_sums([answer(row, row % 2, right=row % 2 == 1) for row in range(2) for _ in range(6)])
    assert [name for name in found if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert [name for name in found if name.startswith("maj")] == ["maj@2", "maj@4", "maj@6"]
    assert {found[f"pass@{k}"].mean for k in (1, 2, 4, 6)} == {found["accuracy"].mean} == {0.5}
    assert set(metric_sums([answer(0, 1.0)])) == {"accuracy", "reward"}


def test_a_failed_answer_is_not_right_has_no_reward_and_no_vote() -> None:
    failed = answer(0, 0.0, status="timeout")
    found = metric_sums([answer(0, 1.0, right=True, name="42"), failed, failed, failed])
    assert found["accuracy"].mean == 0.25
    assert found["reward"].mean == 1.0
    assert found["maj@4"].mean == pytest.approx(0.25), "four answers of one vote each"
    assert "best@4" not in found
    assert score([failed]).metrics.keys() == {"accuracy"}


def test_intervals_of_the_mean_cover_it_as_often_as_they_should() -> None:
    draws = np.random.default_rng(0)
    found = [estimate(Sums((draws.random(80) < 0.3).astype(float), np.ones(80))) for _ in range(300)]
    covered = sum(each.low <= 0.3 <= each.high for each in found)
    assert 0.90 <= covered / 300 <= 0.98


def test_a_difference_is_paired() -> None:
    # Every prompt gains exactly 0.1: the models vary together, their difference not at all.
    base = np.random.default_rng(1).random(50)
    (found,) = differences({"reward": Sums(base + 0.1, np.ones(50))}, {"reward": Sums(base, np.ones(50))}).values()
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert estimate(Sums(base, np.ones(50))).high - estimate(Sums(base, np.ones(50))).low > 0.1
    assert differences({"reward": Sums(base, base)}, {"reward": Sums(base[1:], base[1:])}) == {}


def test_an_answer_is_what_the_reward_function_extracted_or_the_response() -> None:
    right = make_trajectory(reward=Reward(1.0, is_correct=True, detail="42"))
    assert make_answer(3, right, text="it is 42").answer == "42"
    assert make_answer(3, make_trajectory(reward=Reward(1.0)), text="it is 42").answer == "it is 42"
    error = Reward(0.0, status="error", detail="boom", is_correct=True)
    failed = make_answer(3, make_trajectory(reward=error), text="x")
    assert (failed.answer, failed.is_correct) == ("", False)


def test_sources_stand_apart_only_where_there_are_several() -> None:
    assert by_source([answer(0, 1.0), answer(1, 1.0)]) == {}
    assert set(by_source([answer(0, 1.0), answer(1, 1.0, data_source="b")])) == {"a", "b"}
