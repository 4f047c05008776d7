"""The audit, on snapshots with one defect each."""

import msgspec
import pytest

from slipstream.buffer.accounting import Snapshot, audit
from slipstream.buffer.records import StepEntry


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


@pytest.mark.parametrize(
    ("fields", "found", "problems"),
    [
        ({"accepted": 10}, {"lost": 1}, None),
        ({"members": SOUND.members | {"3": (2, 1)}}, {"lost": 1}, None),
        ({"next_ordinal": 7}, {"skipped_prompts": 1}, ["in no state: 6"]),
        ({"next_ordinal": 20}, {"skipped_prompts": 14}, ["in no state: 6, 7, 8, 9, 10 and 9 more"]),
        ({"groups": SOUND.groups | {"ready": ["3", "2"]}, "accepted": 11}, {"duplicated": 1}, [TWO_STATES]),
        ({"ledger": [entry(1, "0"), entry(2, "1", "0")]}, {"duplicated": 2}, [TOO_OFTEN]),
        ({"ledger": [entry(1, "0")]}, {}, ["used, but not in the ledger: 1"]),
        ({"ledger": [*SOUND.ledger, entry(3, "3")]}, {}, ["in the ledger, but neither used nor over: 3"]),
    ],
)
def test_lost_skipped_duplicated_and_contradicting_trajectories_are_found(fields, found, problems):
    audited = audit_with(**fields)
    assert {name: getattr(audited, name) for name in found} == found
    assert problems is None or audited.problems == problems
