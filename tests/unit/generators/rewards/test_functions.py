import time

import pytest

from slipstream.generators.rewards.functions import exact_match, position_match
from slipstream.generators.rewards.mathematics import math_answer
from slipstream.generators.rewards.reward import RewardInput


def make_sample(response: str = "", *, truth: str = "31284", stop_reason: str = "stop") -> RewardInput:
    return RewardInput(prompt="48213=", response=response, ground_truth=truth, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("response", "stop_reason", "total", "is_correct"),
    [
        ("31284", "stop", 1.0, True),
        ("31284", "length", 5 / 6, False),
        ("31280", "stop", 5 / 6, False),
        ("3128", "stop", 4 / 6, False),
        ("312844", "length", 5 / 7, False),
        ("", "stop", 0.0, False),
        ("13284", "stop", 4 / 6, False),
    ],
)
def test_position_match_rewards_matching_positions(response: str, stop_reason: str, total: float, is_correct: bool):
    reward = position_match(make_sample(response, stop_reason=stop_reason))
    assert reward.total == pytest.approx(total)
    assert reward.is_correct is is_correct


def test_exact_match_is_all_or_nothing():
    assert exact_match(make_sample(" 31284\n")).total == 1.0
    assert exact_match(make_sample(" 31284\n"), strip=False).total == 0.0
    assert exact_match(make_sample("Yes", truth="yes"), ignore_case=True).is_correct
    assert exact_match(make_sample("31284", stop_reason="length")).total == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("3 + 4 = 7, so\n#### 7", "They have 7.\n#### 7"),
        ("#### 1,200", "#### 1200"),
        ("It costs \\boxed{\\$1200.00}.", "#### 1,200"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("First #### 3, no: #### 4", "#### 4"),
        ("The answer is -5.", "-5"),
        ("12 apples and 3 more make 15", "15"),
        ("The answer is 5%", "5"),
        ("**7**", "\\boxed{7}"),
        ("#### Conclusion\n\\boxed{7}", "7"),
        ("7 (seven)", "7"),
        ("\\boxed{7\\text{ km}}", "7"),
        ("\\boxed{1{,}200}", "1200"),
        ("\\boxed{-\\dfrac{3}{4}}", "-0.75"),
    ],
)
def test_math_answer_finds_equal_answers(response: str, truth: str):
    assert math_answer(make_sample(response, truth=truth)).is_correct


@pytest.mark.parametrize("response", ["#### 8", "no number at all", "7 of 9", "", "\\boxed{}", "#### 7/0"])
def test_math_answer_rejects_other_answers(response: str):
    reward = math_answer(make_sample(response, truth="#### 7"))
    assert (reward.total, reward.is_correct, reward.status) == (0.0, False, "ok")


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("\\boxed{3\\sqrt{2}}", "2"),
        ("#### 3\\sqrt{2}", "3"),
        ("it is 3\\sqrt{2}", "2"),
        ("it is 2^{10}", "10"),
        ("the answer is 2^10", "2"),
        ("\\boxed{1e5}", "100000"),
        ("#### 1e5", "1"),
        ("#### 2x", "2"),
        ("\\boxed{1,2}", "12"),
        ("\\boxed{3\\frac{1}{2}}", "15.5"),
        ("#### 7 1/2", "7"),
        ("the answer is 3 + 4", "3"),
    ],
)
def test_a_part_of_a_formula_is_no_answer(response: str, truth: str):
    assert not math_answer(make_sample(response, truth=truth)).is_correct


@pytest.mark.parametrize(
    "truth", ["3\\sqrt{2}", "2^{10}", "\\boxed{x+1}", "12 apples", "7 or 8", "1e5", "1,2", "", "9" * 101, "1/0"]
)
def test_a_truth_of_math_answer_is_one_number(truth: str):
    with pytest.raises(ValueError, match="must be a number of at most 100 characters, got"):
        math_answer(make_sample("#### 2", truth=truth))


@pytest.mark.parametrize(
    "response", ["\\boxed{1e20000000}", "#### " + "9" * 10**6, "answer" + " " * 10**6, "\\boxed{" * 10**5]
)
def test_math_answer_is_fast_for_any_response(response: str):
    started_at = time.process_time()
    assert not math_answer(make_sample(response, truth="7")).is_correct
    assert time.process_time() - started_at < 2


def test_math_answer_can_reward_the_format():
    assert math_answer(make_sample("#### 8", truth="7"), format_reward=0.1).total == pytest.approx(0.1)
    assert math_answer(make_sample("it is 7", truth="7"), format_reward=0.1).total == pytest.approx(1.0)


@pytest.mark.parametrize("response", ["#### 7 or 8", "the answer is 7 or 8", "\\boxed{7 or 8}"])
def test_two_numbers_are_no_answer(response: str):
    assert not math_answer(make_sample(response, truth="7")).is_correct
