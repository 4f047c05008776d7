"""Rules shared by both stores: the settings that make a stored run the same run, and entries of its ledger."""

import json
from typing import Any

import msgspec
import pytest

from slipstream.buffer.accounting import Snapshot, audit
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import Claim, StepEntry, make_entry
from slipstream.buffer.role_reports import describe_times, make_step_times, time_counters
from slipstream.buffer.store_rules import MAY_CHANGE, check_same_run
from slipstream.runtime.clock import Growth
from tests.builders import make_packed
from tests.cases import cases


def check(before: dict, now: dict) -> None:
    check_same_run("r", stored=(json.dumps(before), 5, 0), opened=(json.dumps(now), 5, 0))


def test_an_entry_lists_the_fetched_trajectories():
    payloads = [[make_packed("4", index)[1] for index in (0, 1)], [make_packed("2", 0)[1]]]
    claim = Claim(step=3, fence=9, group_ids=["4", "2"])
    entry = make_entry(claim, payloads, version=2, seed=7, config_hash="abc")
    assert entry == StepEntry(3, 2, 9, 7, "abc", ["4", "2"], [["4-0-0", "4-0-1"], ["2-0-0"]])


@cases(
    "before, now, message",
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b must stay 1 .* got 2"),
    ({"a": {"b": 1}}, {"a": {}}, "a must stay 'absent' .* got {}"),
    ({"a": 1}, {"a": 1, "b": 2}, "b must stay 'absent' .* got 2"),
    ({"a": [1, 2]}, {"a": [2, 1]}, r"a must stay \[1, 2\]"),
    ({"z": 1, "b": 1}, {"z": 2, "b": 2}, "b must stay 1"),
    ({"learner": {"max_steps_more": 1}}, {"learner": {"max_steps_more": 2}}, "learner.max_steps_more"),
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


def entry(step: int, *groups: str) -> StepEntry:
    names = [[f"{group}-0-0", f"{group}-0-1"] for group in groups]
    return StepEntry(step, step - 1, step, 0, "hash", list(groups), names)


SOUND = Snapshot(
    next_ordinal=6,
    max_uses=1,
    accepted=9,
    groups={"leased": ["5"], "returned": ["4"], "ready": ["3"], "claimed": ["2"], "used": ["1"]},
    members={"5": (1, 1), "4": (0, 0), "3": (2, 2), "2": (2, 2), "1": (2, 2)},
    done=[0],
    outcome_members={"retired": 2},
    ledger=[entry(1, "0"), entry(2, "1")],
)


TWO_STATES = "in more than one state: 2 (ready and claimed)"
TOO_OFTEN = "trained on more often than allowed: 0-0-0, 0-0-1"


def audit_with(**fields: object):
    return audit(msgspec.structs.replace(SOUND, **fields))


def test_a_sound_store_reconciles_and_a_group_is_trained_on_as_often_as_the_run_says():
    found = audit(SOUND)
    assert found.is_sound, found
    assert (found.buffered, found.claimed, found.used, found.retired) == (3, 2, 2, 2)
    assert found.accepted == 9
    twice = [entry(1, "0"), entry(2, "1", "0")]
    assert audit_with(ledger=twice, max_uses=2).is_sound
    assert audit_with(ledger=[entry(1, "0"), entry(2, "1", "1")], max_uses=2).duplicated == 2


@cases(
    "fields, found, problems",
    ({"accepted": 10}, {"lost": 1}, None),
    ({"members": SOUND.members | {"3": (2, 1)}}, {"lost": 1}, None),
    ({"next_ordinal": 7}, {"skipped_prompts": 1}, ["in no state: 6"]),
    ({"next_ordinal": 20}, {"skipped_prompts": 14}, ["in no state: 6, 7, 8, 9, 10 and 9 more"]),
    ({"groups": SOUND.groups | {"ready": ["3", "2"]}, "accepted": 11}, {"duplicated": 1}, [TWO_STATES]),
    ({"ledger": [entry(1, "0"), entry(2, "1", "0")]}, {"duplicated": 2}, [TOO_OFTEN]),
    ({"ledger": [entry(1, "0")]}, {}, ["used, but not in the ledger: 1"]),
    ({"ledger": [*SOUND.ledger, entry(3, "3")]}, {}, ["in the ledger, but neither used nor over: 3"]),
)
def test_lost_skipped_duplicated_and_contradicting_trajectories_are_found(fields, found, problems):
    audited = audit_with(**fields)
    assert {name: getattr(audited, name) for name in found} == found
    assert problems is None or audited.problems == problems


ROLES: dict[str, dict[str, Any]] = {
    "learner": {"role": "learner", "cpu_s": 1.0, "time/waiting": 6.0, "time/compute": 3.0, "time/rest": 1.0},
    "a": {"role": "generator", "cpu_s": 2.0, "time/starting": 50.0, "time/working": 8.0, "time/prompts": 2.0},
    "b": {"role": "generator", "cpu_s": 3.0, "time/working": 10.0, "time/prompts": "many"},
    "broker": {"role": "broker", "cpu_s": 0.5, "store_cpu_s": 0.25, "time/waiting": 9.5, "time/routing": 0.5},
    "launcher": {"role": "launcher", "cpu_s": 9.0},
}


def test_shares_are_those_of_a_role_and_time_before_the_training_or_a_restart_is_counted_rightly() -> None:
    times = make_step_times(time_counters(ROLES), steps=20)
    assert (times.steps, times.step_s) == (20, 0.5)
    found = {each.role: each for each in times.roles}
    assert list(found) == ["learner", "generator", "broker", "store"]
    assert found["learner"].shares["waiting"] == 0.6
    assert sum(found["learner"].shares.values()) == pytest.approx(1.0)
    # Excludes 50 s of loading.
    assert (found["generator"].count, found["generator"].shares["working"]) == (2, 0.9)
    assert [each.cpu_s for each in times.roles] == [0.05, 0.25, 0.025, 0.0125]
    assert found["store"].shares == {"busy": 0.025}
    growth = Growth(time_counters(ROLES))
    later = {"role": "generator", "time/working": 11.0, "time/prompts": 1.0}
    growth.update(time_counters({"b": later}))
    growth.update(time_counters({"b": later | {"time/working": 0.5}}))
    assert growth.each == {("generator", "b", "time/working"): 1.5, ("generator", "b", "time/prompts"): 1.0}


@cases("prompts, side", (2.0, "generating is the slower side"), (90.0, "training is the slower side"))
def test_the_table_says_which_side_waits_for_which(prompts: float, side: str) -> None:
    roles = ROLES | {"a": ROLES["a"] | {"time/prompts": prompts}}
    lines = describe_times(msgspec.to_builtins(make_step_times(time_counters(roles), steps=20)))
    assert lines[0] == "where the wall time went: 20 steps of 0.5 s"
    assert lines[2].split(maxsplit=3) == [
        "learner", "0.050", "s", "60% waiting for trajectories, 30% forward and backward, 10% rest",
    ]  # fmt: skip
    assert lines[3].startswith("2 generators")
    assert lines[-1].startswith("the learner waits 60% of its time for trajectories, the generators")
    assert lines[-1].endswith(side)
    assert len(lines) <= 15
    assert (describe_times(None), make_step_times({}, steps=0).roles) == ([], []), "without a step"
