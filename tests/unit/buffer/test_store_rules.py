"""Rules shared by both stores: leases, and the settings that make a stored run the same run."""

import json

import pytest

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import Lease
from slipstream.buffer.sampling import row_of
from slipstream.buffer.store_rules import (
    MAY_CHANGE,
    check_same_run,
    evaluation_group_id,
    lapsed_lease_message,
    make_lease,
)


# --- leases ----------------------------------------------------------------------------------------------------------
def test_a_training_lease_names_the_row_its_ordinal_stands_for():
    lease = make_lease("17", attempt=2, purpose="train", indices=[1, 3], num_rows=7, seed=3)
    row = row_of(17, num_rows=7, seed=3)
    assert lease == Lease(id="17-2", group_id="17", purpose="train", row=row, ordinal=17, attempt=2, indices=[1, 3])


def test_an_evaluation_lease_names_the_held_out_row_itself():
    group_id = evaluation_group_id("final:sampled-3", 40)
    lease = make_lease(group_id, attempt=0, purpose="sampled", indices=[0], num_rows=7, seed=3)
    assert (lease.row, lease.ordinal, lease.id) == (40, 40, "final:sampled-3:40-0")


def test_the_lapse_message_says_what_happens_to_the_prompt():
    line = lapsed_lease_message("4", attempt=1, owner="generator-0", is_quarantined=False)
    assert line == "lease 4-1 of generator-0 lapsed: its prompt will be leased again"


# --- the same run ----------------------------------------------------------------------------------------------------
def check(before: dict, now: dict) -> None:
    check_same_run("r", stored=(json.dumps(before), 5, 0), opened=(json.dumps(now), 5, 0))


def test_the_order_of_keys_does_not_matter():
    check({"a": 1, "b": {"c": 2, "d": []}}, {"b": {"d": [], "c": 2}, "a": 1})


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
