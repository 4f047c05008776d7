"""Books: what a run under chaos must come to, from the store's audit and from the lineage of the surviving weights."""

from collections import Counter
from pathlib import Path

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import Archive, ArchiveCheck
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Record
from tests.chaos import lineage
from tests.chaos.lineage import Sample, Trained

_NAMED_AT_MOST = 5
"""Samples named for one kind of fault."""


class Books(Record):
    """All that is looked at once the run is over. Example: see `tests/unit/chaos/test_books.py`."""

    audit: Audit
    """The store's own."""
    counts: StoreCounts
    """Where everything is."""
    ledger: list[StepEntry]
    """Of the committed steps."""
    lineage: list[Trained]
    """Of the weights in the newest checkpoint."""
    archived: list[Sample]
    """Every trajectory of a retired group in the archive."""
    archive: ArchiveCheck
    """The archive's own."""


def read_archive(folder: Path) -> tuple[list[Sample], ArchiveCheck]:
    """The retired samples of an archive, and its own check. Raises ArchiveError."""
    archive = Archive(folder)
    retired = (stored.trajectory for stored in archive.read(TrajectoryFilter(outcome="retired")))
    return lineage.samples_of([list(retired)]), archive.check()


def find_faults(books: Books, *, steps: int, wanted: Counter[Sample]) -> list[str]:
    """A sentence for each thing that is not as in an uninterrupted run of `steps` steps on the samples `wanted`."""
    return [
        *_audit_faults(books.audit),
        *_step_faults("the ledger", [entry.step for entry in books.ledger], steps=steps),
        *_step_faults("the lineage", [trained.step for trained in books.lineage], steps=steps),
        *_sample_faults("trained on", lineage.count(books.lineage), wanted),
        *_sample_faults("archived", Counter(books.archived), wanted),
        *books.archive.problems,
        *_order_faults(books),
        *_place_faults(books),
    ]


def _audit_faults(audit: Audit) -> list[str]:
    sums = (audit.buffered, audit.claimed, audit.used, audit.retired, audit.rejected, audit.expired, audit.quarantined)
    wrong = [] if audit.accepted == sum(sums) else [f"accepted={audit.accepted}, but the places hold {sum(sums)}"]
    return [*wrong, *audit.problems] + ([] if audit.is_sound else [str(audit)])


def _step_faults(where: str, steps_found: list[int], *, steps: int) -> list[str]:
    if steps_found == list(range(1, steps + 1)):
        return []
    return [f"{where} must hold the steps 1 to {steps} once each, got {len(steps_found)}: {steps_found}"]


def _sample_faults(deed: str, found: Counter[Sample], wanted: Counter[Sample]) -> list[str]:
    """Against an uninterrupted run's."""
    missing, extra = wanted - found, found - wanted
    return [f"never {deed}: {sample}" for sample in sorted(missing)[:_NAMED_AT_MOST]] + [
        f"{deed} {found[sample]} times, in an uninterrupted run {wanted[sample]}: {sample}"
        for sample in sorted(extra)[:_NAMED_AT_MOST]
    ]


def _order_faults(books: Books) -> list[str]:
    """Store and weights must agree on every single step."""
    groups = {trained.step: list(dict.fromkeys(sample[0] for sample in trained.samples)) for trained in books.lineage}
    return [
        f"step {entry.step} was committed with {entry.group_ids}, and trained with {groups.get(entry.step)}"
        for entry in books.ledger
        if groups.get(entry.step) != entry.group_ids
    ]


def _place_faults(books: Books) -> list[str]:
    counts = books.counts
    left = counts.leased + counts.returned + counts.open + counts.ready + counts.claimed + counts.used
    return [f"nothing may be left over, got {counts}"] * bool(left) + [
        f"nothing may be refused, got {number} x {reason}" for reason, number in counts.refused.items()
    ]
