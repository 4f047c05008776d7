"""Archiver: groups that are over, and the steps that trained on them, from the store into the archive.

Consumes: finished groups of the store, oldest first; its step ledger.
Produces: shards and a ledger in the archive's folder; room in the store; the gauges of the role `archiver`.
Waits for: enough of them for a shard, at most `flush_s`.
Woken by: its own clock, every second.
Invariant: the store forgets a group only after the archive has it, durably; the archive takes a group once.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import structlog

from slipstream.broker.status.role_status import WaitsFor
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.archive.ledger import LedgerWriter
from slipstream.buffer.archive.shard_writer import ShardWriter
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import FinishedGroup, RunState, StepEntry
from slipstream.buffer.trajectory import Record
from slipstream.configs.buffer import ArchiveConfig
from slipstream.runtime.clock import Clock

_SAMPLED_GROUPS = 8
"""Groups whose mean size estimates that of all."""
_MAX_SHARD_BYTES = 256 * 2**20
"""Encoded trajectories of one shard, which are in memory while it is written; a shard of long ones has fewer groups."""
_ROLE = "archiver"
"""Its name among the roles of the run."""
_TICK_S = 1.0
"""Between two looks at the store."""

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


class FinishedGroups(CommittedSteps, Protocol):
    """What an archiver needs of a store."""

    def counts(self) -> StoreCounts:
        """See `Store.counts`."""
        ...

    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """See `Store.finished`."""
        ...

    def forget(self, group_ids: list[str]) -> int:
        """See `Store.forget`."""
        ...

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """See `Store.report_role`."""
        ...

    def close(self) -> None:
        """See `Store.close`."""
        ...


OpenWriter = Callable[[Path], ShardWriter]
"""Archive's folder -> its writer."""


class Archiver:
    """Moves finished groups when a shard is full, or the oldest has waited long enough. Belongs to one thread.

    Life: step, again and again -> flush -> close.
    """

    def __init__(
        self,
        store: FinishedGroups,
        folder: Path,
        config: ArchiveConfig,
        *,
        max_shard_bytes: int = _MAX_SHARD_BYTES,
        clock: Clock = time.monotonic,
        open_writer: OpenWriter = ShardWriter,
    ) -> None:
        """`folder` is the archive's. Raises ArchiveError when somebody else writes there, OSError."""
        self._store = store
        self._config = config
        self._max_shard_bytes = max_shard_bytes
        self._clock = clock
        self._writer = open_writer(folder)
        self._waiting_since: float | None = None
        try:
            self._steps = StepArchiver(store, folder, self._writer)
        except BaseException:
            self.close()
            raise
        self.num_groups = 0
        """Archived by this archiver."""

    @property
    def last_step(self) -> int:
        """Newest step in the archive's ledger; 0 before the first."""
        return self._steps.last_step

    def step(self) -> int:
        """Archive one shard if it is due; returns the groups taken from the store. Raises StoreUnavailableError, OSError.

        After a failure nothing is lost: the next step begins where this one did.
        """
        self._steps.look()
        num_groups = self._move() if self._is_due() else 0
        self._steps.write()
        return num_groups

    def flush(self) -> int:
        """Archive all that is over now; returns the groups taken from the store. Raises as `step` does."""
        self._steps.look()
        num_groups = 0
        while moved := self._move():
            num_groups += moved
        self._steps.write()
        return num_groups

    def close(self) -> None:
        """Let others write to the archive. The store stays open."""
        self._writer.close()

    def _is_due(self) -> bool:
        num_waiting, now = self._store.counts().unarchived, self._clock()
        if not num_waiting:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        waited_s = now - self._waiting_since
        return num_waiting >= self._config.groups_per_shard or waited_s >= self._config.flush_s

    def _move(self) -> int:
        groups = self._peek()
        # Written before, by this archiver or one that died before the store forgot them.
        new = [group for group in groups if not self._writer.has(group.id)]
        if new and (shard := self._writer.write(new)):
            log.info("archived", file=shard.file, groups=shard.groups, trajectories=shard.rows, bytes=shard.bytes)
        if groups:
            self._steps.note_archived(group.id for group in groups)
            self._store.forget([group.id for group in groups])
        self._waiting_since = None
        self.num_groups += len(new)
        return len(groups)

    def _peek(self) -> list[FinishedGroup]:
        """As many as fill a shard, in groups or in bytes."""
        sample = self._store.finished(limit=_SAMPLED_GROUPS)
        num_bytes = sum(len(payload) for group in sample for payload in group.payloads)
        fitting = self._max_shard_bytes * len(sample) // max(1, num_bytes)
        limit = max(1, min(fitting, self._config.groups_per_shard))
        return sample[:limit] if limit <= len(sample) else self._store.finished(limit=limit)


class ArchiverStatus(Record):
    """What an archiver says of itself. Example: ArchiverStatus(state="archiving", groups=2048, last_step=64)."""

    state: Literal["starting", "archiving", "stuck", "gone"] = "starting"
    """stuck: it cannot archive, and tries again; see the reason."""
    groups: int = 0
    """Archived since it started."""
    last_step: int = 0
    """Newest step in the archive's ledger."""
    reason: str = ""
    """What keeps it from archiving; empty while nothing does."""
    waits_for: WaitsFor = ""
    """What it needs to go on."""


class ArchiverThread:
    """An Archiver on a thread and a store connection of its own; tries again, and says why, when either side fails."""

    def __init__(
        self,
        connect: Callable[[], FinishedGroups],
        folder: Path,
        config: ArchiveConfig,
        *,
        tick_s: float = _TICK_S,
        open_writer: OpenWriter = ShardWriter,
    ) -> None:
        """`connect` opens the store; it is called on the thread, and again after a failure."""
        self._connect = connect
        self._folder = folder
        self._config = config
        self._tick_s = tick_s
        self._open_writer = open_writer
        self._stopping = threading.Event()
        self._status = ArchiverStatus()
        self._thread = threading.Thread(target=self._run, name="archiver", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def status(self) -> ArchiverStatus:
        """How it goes; from any thread. The store has it too, as the gauges of the role `archiver`."""
        return self._status

    def stop(self, *, timeout_s: float) -> bool:
        """Archive what is over, then end; blocks at most `timeout_s`. Returns whether it has ended.

        What it did not get to stays in the store, for the next archiver.
        """
        self._stopping.set()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._attempt():
            if self._stopping.wait(self._tick_s):
                return

    def _attempt(self) -> bool:
        """Archive until told to stop: True; False after a failure."""
        try:
            with closing(self._connect()) as store:
                return self._archive_to_the_end(store)
        except (ReplayBufferError, OSError) as fault:
            self._say(fault)
            return False

    def _archive_to_the_end(self, store: FinishedGroups) -> bool:
        try:
            with closing(self._open(store)) as archiver:
                self._archive(archiver, store)
            return True
        except (ReplayBufferError, OSError) as fault:
            self._say(fault)
            # The store may well be alive: it is the disk that is full, or another archiver that writes.
            self._report(store)
            return False

    def _open(self, store: FinishedGroups) -> Archiver:
        return Archiver(store, self._folder, self._config, open_writer=self._open_writer)

    def _archive(self, archiver: Archiver, store: FinishedGroups) -> None:
        while not self._stopping.is_set():
            moved = archiver.step()
            self._note(archiver, state="archiving")
            self._report(store)
            if not moved:
                self._stopping.wait(self._tick_s)
        archiver.flush()
        self._note(archiver, state="gone")
        self._report(store)

    def _note(self, archiver: Archiver, *, state: Literal["archiving", "gone"]) -> None:
        if self._status.reason:
            log.info("archiving_again")
        self._status = ArchiverStatus(
            state=state,
            groups=self._status.groups + archiver.num_groups,
            last_step=archiver.last_step,
        )
        archiver.num_groups = 0

    def _say(self, fault: Exception) -> None:
        reason = str(fault)
        if reason != self._status.reason:
            log.warning("not_archiving", reason=reason, folder=str(self._folder))
        waits_for: WaitsFor = "disk" if isinstance(fault, OSError) else "store"
        self._status = msgspec.structs.replace(self._status, state="stuck", reason=reason, waits_for=waits_for)

    def _report(self, store: FinishedGroups) -> None:
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        store.report_role(_ROLE, {"role": _ROLE, **where} | msgspec.structs.asdict(self._status))
