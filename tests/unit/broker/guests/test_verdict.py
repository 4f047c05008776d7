"""The checks convict a dishonest guest and no honest one."""

import pytest

from slipstream.broker.guests import convict
from slipstream.buffer.trajectory import AnswerCheck

HONEST = AnswerCheck("0-0-0", num_tokens=100, logprob_diff=1.0, own_logprob_diff=0.01, surplus=2.0, variance=20.0)


def verdict(*checks: AnswerCheck) -> str:
    return convict(checks, max_logprob_diff=0.05)


def changed(**fields: object) -> AnswerCheck:
    return AnswerCheck(**{name: getattr(HONEST, name) for name in HONEST.__struct_fields__} | fields)  # type: ignore[arg-type]


def test_an_honest_guest_stays():
    assert verdict() == verdict(HONEST) == verdict(*[HONEST] * 64) == ""


def test_one_lie_may_be_a_fault_and_two_convict():
    lie = changed(lie="7-0-1 has a reward of 1, and 0 by one's own reward function")
    assert verdict(lie, *[HONEST] * 9) == ""
    assert verdict(lie, *[HONEST] * 9, lie) == (
        "2 of 11 checked answers are false, the last one: 7-0-1 has a reward of 1, and 0 by one's own reward function"
    )


def test_log_probabilities_beyond_the_bound_convict_once_four_answers_were_scored():
    invented = changed(logprob_diff=30.0)
    unscored = AnswerCheck("0-0-1")
    assert verdict(*[invented] * 3, *[unscored] * 9) == ""
    assert "within 0.05 nats on average, got 0.3 over 400 tokens of 4 answers" in verdict(*[invented] * 4)


def test_the_policys_change_since_is_allowed_for_by_what_it_does_to_answers_of_ones_own():
    assert "nats" in verdict(*[changed(logprob_diff=10.0, own_logprob_diff=0.0)] * 4)
    assert verdict(*[changed(logprob_diff=10.0, own_logprob_diff=0.04)] * 4) == ""


@pytest.mark.parametrize(("surplus", "word"), [(30.0, "more"), (-30.0, "less")])
def test_answers_that_the_policy_would_not_sample_convict(surplus: float, word: str):
    assert f"the likeliest token 30% {word} often" in verdict(*[changed(surplus=surplus)] * 4)


def test_chance_is_allowed_for_where_few_tokens_were_scored():
    few = changed(num_tokens=4, logprob_diff=0.0, surplus=-1.0, variance=1.0)
    assert verdict(*[few] * 4) == ""
    assert verdict(*[few] * 64) != ""


@pytest.mark.parametrize("field", ["logprob_diff", "surplus"])
def test_what_is_not_a_number_convicts(field: str):
    assert verdict(*[changed(**{field: float("nan")})] * 4) != ""
