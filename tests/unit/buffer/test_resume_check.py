"""Whether a run opened again is the same run."""

import json

import pytest

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.transitions import MAY_CHANGE, check_same_run


def check(before: dict, now: dict) -> None:
    check_same_run("r", stored=(json.dumps(before), 5, 0), opened=(json.dumps(now), 5, 0))


def test_the_order_of_keys_does_not_matter():
    check({"a": 1, "b": {"c": 2, "d": []}}, {"b": {"d": [], "c": 2}, "a": 1})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b must stay 1 .* got 2"),
        ({"a": {"b": 1}}, {"a": {}}, "a must stay 'absent' .* got {}"),
        ({"a": 1}, {"a": 1, "b": 2}, "b must stay 'absent' .* got 2"),
        ({"a": [1, 2]}, {"a": [2, 1]}, r"a must stay \[1, 2\]"),
        ({"z": 1, "b": 1}, {"z": 2, "b": 2}, "b must stay 1"),
        ({"learner": {"max_steps_more": 1}}, {"learner": {"max_steps_more": 2}}, "learner.max_steps_more"),
    ],
)
def test_the_first_key_that_differs_is_named(before, now, said):
    with pytest.raises(RunConflictError, match=said):
        check(before, now)


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_what_a_resumed_run_may_change_is_not_compared(key):
    def nested(value: object) -> dict:
        for name in reversed(key.split(".")):
            value = {name: value}
        return value  # type: ignore[return-value]

    check(nested(None), nested({"deep": 1}))
