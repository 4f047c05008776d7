import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.functions import exact_match, math_answer, position_match
from slipstream.generators.rewards.reward import RewardInput, evaluate, load_reward

SAMPLES = "tests.unit.generators.rewards.samples"


def make_sample(response: str = "", *, truth: str = "31284", stop_reason: str = "stop") -> RewardInput:
    return RewardInput(prompt="48213=", response=response, ground_truth=truth, stop_reason=stop_reason)


def run_sample(name: str, response: str = "") -> Reward:
    return evaluate(load_reward(f"{SAMPLES}:{name}", {}), make_sample(response))


def test_a_number_is_a_reward():
    assert run_sample("by_response") == Reward(total=0.5)


def test_a_number_of_one_counts_as_correct():
    function = load_reward(f"{SAMPLES}:with_arguments", {"bonus": 0.75})
    assert evaluate(function, make_sample()) == Reward(total=1.0, is_correct=True)


def test_a_dict_with_the_fields_of_a_reward_is_one():
    assert run_sample("as_dict") == Reward(total=0.75, parts={"a": 0.5, "b": 0.25}, is_correct=True)


@pytest.mark.parametrize(
    ("name", "response", "words"),
    [
        ("by_response", "nan", "finite"),
        ("as_bad_part", "", "finite number, got a=inf"),
        ("by_response", "text", "got str"),
        ("as_unknown_dict", "", "score"),
        ("by_response", "raise now", "ValueError: no good: now"),
    ],
)
def test_what_is_no_reward_is_an_error_with_one_line_and_never_a_zero(name: str, response: str, words: str):
    reward = run_sample(name, response)
    assert reward.status == "error"
    assert words in reward.detail
    assert "\n" not in reward.detail


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("position_match", "module:function"),
        ("no_such_module:f", "no module 'no_such_module'"),
        (f"{SAMPLES}:by_respons", "Did you mean 'by_response'?"),
        (f"{SAMPLES}:NOT_A_FUNCTION", "it is a int"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_in_one_sentence(path: str, words: str):
    with pytest.raises(ConfigError, match=r"generators\.reward\.function") as caught:
        load_reward(path, {})
    assert words in str(caught.value)


def test_arguments_must_fit_the_function():
    with pytest.raises(
        ConfigError, match=r"generators\.reward\.arguments must fit .* missing a required argument: 'bonus'"
    ):
        load_reward(f"{SAMPLES}:with_arguments", {})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        load_reward(f"{SAMPLES}:by_response", {"size": 3})


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
def test_position_match_counts_right_places(response: str, stop_reason: str, total: float, is_correct: bool):
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
        ("\\boxed{x + 1}", "\\boxed{x+1}"),
    ],
)
def test_math_answer_finds_equal_answers(response: str, truth: str):
    assert math_answer(make_sample(response, truth=truth)).is_correct


@pytest.mark.parametrize("response", ["#### 8", "no number at all", "7 of 9", "", "\\boxed{}", "#### 7/0"])
def test_math_answer_refuses_others(response: str):
    reward = math_answer(make_sample(response, truth="#### 7"))
    assert (reward.total, reward.is_correct, reward.status) == (0.0, False, "ok")


def test_math_answer_can_reward_the_format():
    assert math_answer(make_sample("#### 8", truth="7"), format_reward=0.1).total == pytest.approx(0.1)
    assert math_answer(make_sample("it is 7", truth="7"), format_reward=0.1).total == pytest.approx(1.0)
