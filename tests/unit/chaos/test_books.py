from collections import Counter
from typing import Any

import msgspec
import pytest

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.records import StepEntry
from tests.chaos import lineage
from tests.chaos.books import Books, find_faults
from tests.chaos.lineage import Sample, Trained

STEPS, GROUPS_PER_STEP, SIZE = 3, 2, 2
WANTED = lineage.uninterrupted(num_groups=STEPS * GROUPS_PER_STEP, group_size=SIZE, num_rows=4, seed=0)


def groups_of(step: int) -> list[str]:
    return [str(group) for group in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)]


def samples_of(step: int) -> list[Sample]:
    return [sample for group in groups_of(step) for sample in WANTED if sample[0] == group]


def make_audit(**overrides: Any) -> Audit:
    names = [field for field in Audit.__struct_fields__ if field != "problems"]
    return Audit(**(dict.fromkeys(names, 0) | {"accepted": 12, "retired": 12} | overrides))


def make_counts(**overrides: Any) -> StoreCounts:
    """Everything is over, nothing left."""
    empty = {field.name: 0 if field.type is int else {} for field in msgspec.structs.fields(StoreCounts)}
    return StoreCounts(**(empty | {"admitted": 6, "accepted": 12} | overrides))


def make_entry(step: int, group_ids: list[str]) -> StepEntry:
    trajectory_ids = [[f"{group}-0-{index}" for index in range(SIZE)] for group in group_ids]
    return StepEntry(step, 0, fence=step, seed=0, config_hash="", group_ids=group_ids, trajectory_ids=trajectory_ids)


def make_books(**overrides: Any) -> Books:
    """Of a run of three steps to which nothing happened."""
    sound = {
        "audit": make_audit(),
        "counts": make_counts(),
        "ledger": [make_entry(step, groups_of(step)) for step in range(1, STEPS + 1)],
        "lineage": [Trained(step, samples_of(step)) for step in range(1, STEPS + 1)],
        "archived": list(WANTED),
        "archive": ArchiveCheck(shards=1, groups=6, trajectories=12),
    }
    return Books(**(sound | overrides))


def faults_of(**overrides: Any) -> list[str]:
    return find_faults(make_books(**overrides), steps=STEPS, wanted=WANTED)


def test_the_books_of_an_uninterrupted_run_are_without_fault() -> None:
    assert Counter(WANTED.values()) == {1: 12}
    assert faults_of() == []


@pytest.mark.parametrize(
    "audit",
    [
        make_audit(retired=11),
        make_audit(retired=11, lost=1),
        make_audit(duplicated=1),
        make_audit(skipped_prompts=1),
        make_audit(problems=["group 3 is used and ready"]),
    ],
)
def test_whatever_the_audit_complains_of_is_a_fault(audit: Audit) -> None:
    assert faults_of(audit=audit)


@pytest.mark.parametrize("place", ["leased", "returned", "open", "ready", "claimed", "used"])
def test_nothing_may_be_left_over(place: str) -> None:
    (fault,) = faults_of(counts=make_counts(**{place: 1}))
    assert f"{place}=1" in fault


def test_nothing_may_be_refused() -> None:
    assert faults_of(counts=make_counts(refused={"unknown_group": 2})) == [
        "nothing may be refused, got 2 x unknown_group"
    ]


def test_a_step_that_the_ledger_lacks_is_found() -> None:
    books = make_books()
    assert "the ledger" in faults_of(ledger=books.ledger[:-1])[0]


def test_weights_that_lack_a_step_are_found() -> None:
    faults = faults_of(lineage=make_books().lineage[:-1])
    assert any(fault.startswith("the lineage") for fault in faults)
    assert sum(fault.startswith("never trained on") for fault in faults) == GROUPS_PER_STEP * SIZE


def test_weights_that_saw_a_sample_twice_are_found() -> None:
    trained = make_books().lineage
    again = trained[0].samples[0]
    trained[1] = Trained(2, [again, *trained[1].samples[1:]])
    faults = faults_of(lineage=trained)
    assert any(fault.startswith("trained on 2 times, in an uninterrupted run 1") for fault in faults)


def test_a_step_trained_in_another_order_than_committed_is_found() -> None:
    trained = make_books().lineage
    trained[0] = Trained(1, list(reversed(trained[0].samples)))
    (fault,) = faults_of(lineage=trained)
    assert fault.startswith("step 1 was committed with")


def test_what_the_archive_lacks_or_has_twice_is_found() -> None:
    samples = list(WANTED)
    assert faults_of(archived=samples[1:]) == [f"never archived: {samples[0]}"]
    assert faults_of(archived=[*samples, samples[0]])[0].startswith("archived 2 times")
    assert faults_of(archive=ArchiveCheck(1, groups=6, trajectories=12, problems=["shard 1 is cut"]))
