"""Rules shared by both stores: the settings that make a stored run the same run, and entries of its ledger."""

import json

import pytest

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import Claim, StepEntry, make_entry
from slipstream.buffer.store_rules import MAY_CHANGE, check_same_run
from tests.builders import make_packed


def check(before: dict, now: dict) -> None:
    check_same_run("r", stored=(json.dumps(before), 5, 0), opened=(json.dumps(now), 5, 0))


def test_an_entry_lists_the_fetched_trajectories():
    payloads = [[make_packed("4", index)[1] for index in (0, 1)], [make_packed("2", 0)[1]]]
    claim = Claim(step=3, fence=9, group_ids=["4", "2"])
    entry = make_entry(claim, payloads, version=2, seed=7, config_hash="abc")
    assert entry == StepEntry(3, 2, 9, 7, "abc", ["4", "2"], [["4-0-0", "4-0-1"], ["2-0-0"]])


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b must stay 1 .* got 2"),
        ({"a": {"b": 1}}, {"a": {}}, "a must stay 'absent' .* got {}"),
        ({"a": 1}, {"a": 1, "b": 2}, "b must stay 'absent' .* got 2"),
        ({"a": [1, 2]}, {"a": [2, 1]}, r"a must stay \[1, 2\]"),
        ({"z": 1, "b": 1}, {"z": 2, "b": 2}, "b must stay 1"),
        ({"learner": {"max_steps_more": 1}}, {"learner": {"max_steps_more": 2}}, "learner.max_steps_more"),
    ],
)
def test_the_first_key_that_differs_is_named(before, now, message):
    with pytest.raises(RunConflictError, match=message):
        check(before, now)


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_settings_that_a_resumed_run_may_change_are_not_compared(key):
    def nested(value: object) -> dict:
        for name in reversed(key.split(".")):
            value = {name: value}
        return value  # type: ignore[return-value]

    check(nested(None), nested({"deep": 1}))
    check({"a": 1, "b": {"c": 2, "d": []}}, {"b": {"d": [], "c": 2}, "a": 1})
