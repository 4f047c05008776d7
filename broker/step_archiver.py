"""StepArchiver: the step ledger, from the store into the archive, each step after the groups it trained on.

Consumes: the store's ledger up to its checkpoint; the ids of the groups that get archived.
Produces: lines in the archive's ledger.
Waits for: the last group of a step to be archived (one that is trained on again stays in the store for longer).
Invariant: a step is in the archive's ledger only when a checkpoint covers it and the archive has all of its groups.
"""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import structlog

from slipstream.buffer.archive.ledger import LedgerWriter
from slipstream.buffer.archive.shard_writer import ShardWriter
from slipstream.buffer.records import RunState, StepEntry

log = structlog.get_logger(__name__)


class CommittedSteps(Protocol):
    """What it needs of a store."""

    def run_state(self) -> RunState:
        """See `Store.run_state`."""
        ...

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """See `Store.ledger`."""
        ...


class StepArchiver:
    """Life: (look -> note_archived* -> write)*. Belongs to one thread."""

    def __init__(self, store: CommittedSteps, folder: Path, shards: ShardWriter) -> None:
        """`shards` writes to the same archive. Raises ArchiveError when its ledger is damaged, OSError."""
        self._store = store
        self._shards = shards
        self._ledger = LedgerWriter(folder)
        self._covered: int | None = None
        self._pending: list[StepEntry] = []
        self._awaited: set[str] = set()

    @property
    def last_step(self) -> int:
        """Newest step in the archive's ledger; 0 before the first."""
        return self._ledger.last_step

    def look(self) -> None:
        """See which steps a checkpoint covers by now. Raises StoreUnavailableError."""
        pointer = self._store.run_state().checkpoint
        step = pointer.step if pointer else 0
        if self._covered is None or step < self._covered:
            # At the start; or the store came back from its disk without its last seconds: compare all there is.
            self._pending, self._awaited = [], set()
            self._take(self._ledger.lacks(self._entries(first_step=1, last_step=step)))
        elif step > self._covered:
            self._take(self._entries(first_step=self._covered + 1, last_step=step))
        self._covered = step

    def note_archived(self, group_ids: Iterable[str]) -> None:
        """The archive has these."""
        self._awaited.difference_update(group_ids)

    def write(self) -> None:
        """Enter the steps, in order, whose groups are all archived. Raises OSError, and can be called again then."""
        whole = list(takewhile(lambda entry: self._awaited.isdisjoint(entry.group_ids), self._pending))
        if whole:
            self._ledger.append(whole)
            del self._pending[: len(whole)]
            log.info("archived_steps", first=whole[0].step, last=whole[-1].step)

    def _entries(self, *, first_step: int, last_step: int) -> list[StepEntry]:
        return [entry for entry in self._store.ledger(first_step=first_step) if entry.step <= last_step]

    def _take(self, entries: list[StepEntry]) -> None:
        if entries:
            groups = {group for entry in entries for group in entry.group_ids}
            self._awaited |= groups - self._shards.groups_since(entries[0].step)
            self._pending += entries
