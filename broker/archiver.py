"""Archiver: moves finished groups, and the steps that trained on them, from the store into the archive.

Consumes: the store's finished groups, oldest first; its step ledger.
Produces: shards and a ledger in the archive folder; free space in the store; the gauges of the role `archiver`.
Waits for: enough groups for a shard, at most `_FLUSH_S`.
Invariant: the store forgets a group or step only after the archive, and the object store if configured, hold it. The
archive takes each group once. Its ledger has a step only if a checkpoint covers it and its groups are archived.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from itertools import chain, takewhile
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from slipstream.buffer.archive.archive import ArchiveMirror, missing_images, write_images
from slipstream.buffer.archive.index import LedgerWriter
from slipstream.buffer.archive.shards import ShardWriter
from slipstream.buffer.errors import ReplayBufferError, StaleFenceError, StorageError, StoreUnavailableError
from slipstream.buffer.object_folder import ObjectFolder
from slipstream.buffer.records import StepEntry, image_names
from slipstream.buffer.role_reports import WaitsFor
from slipstream.buffer.store import Store
from slipstream.buffer.store_rules import NO_FENCE
from slipstream.configs.base import Record
from slipstream.configs.buffer import ArchiveConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.disk import describe_disk, is_disk_full

_GROUPS_PER_SHARD = 1024
"""Waiting groups that trigger a shard: Parquet compresses that many well, in hundreds of files per run."""
_FLUSH_S = 30.0
"""Longest wait of a group for its shard to fill."""
_SAMPLED_GROUPS = 8
"""Groups in the sample that estimates the mean group size."""
_MAX_SHARD_BYTES = 256 * 2**20
"""Encoded trajectories, held in memory while the shard is written."""
_ROLE = "archiver"
_TICK_S = 1.0

log = structlog.get_logger(__name__)


class StepArchiver:
    """Moves the step ledger, each step after its groups. Belongs to one thread.

    A step may wait long for a reusable group, which stays in the store.

    Life: (poll -> mark_archived* -> write -> forget)*.
    """

    def __init__(self, store: Store, folder: Path, shards: ShardWriter) -> None:
        """Raises ArchiveError if the ledger is damaged, OSError."""
        self._store = store
        self._shards = shards
        self.ledger = LedgerWriter(folder, shards.manifest)
        self._covered: int | None = None
        self._pending: list[StepEntry] = []
        self._awaited: set[str] = set()
        self._archived: StepEntry | None = None
        """Newest step in the archive that the store still has."""

    def poll(self) -> None:
        """Find newly covered steps. Raises StoreUnavailableError."""
        pointer = self._store.run_state().checkpoint
        step = pointer.step if pointer else 0
        if self._covered is None or step < self._covered:
            # First call, or the store lost its last seconds: compare the complete ledger.
            self._pending, self._awaited = [], set()
            entries = self._entries(first_step=1, last_step=step)
            lacking = self.ledger.lacks(entries)
            self._archived = next(reversed(entries[: len(entries) - len(lacking)]), None)
            self._add(lacking)
        elif step > self._covered:
            self._add(self._entries(first_step=self._covered + 1, last_step=step))
        self._covered = step

    def mark_archived(self, group_ids: Iterable[str]) -> None:
        self._awaited.difference_update(group_ids)

    def write(self) -> None:
        """Append the steps with all groups archived, in order. After OSError, a later call retries."""
        complete = list(takewhile(lambda entry: self._awaited.isdisjoint(entry.group_ids), self._pending))
        if complete:
            self.ledger.append(complete)
            self._archived = complete[-1]
            del self._pending[: len(complete)]
            log.info("archived_steps", first=complete[0].step, last=complete[-1].step)

    def forget(self, *, fence: int) -> None:
        """Delete the archived steps from the store. Raises StoreUnavailableError, StaleFenceError."""
        if self._archived:
            self._store.forget_steps(self._archived, fence=fence)
            self._archived = None

    def _entries(self, *, first_step: int, last_step: int) -> list[StepEntry]:
        return [entry for entry in self._store.ledger(first_step=first_step) if entry.step <= last_step]

    def _add(self, entries: list[StepEntry]) -> None:
        if entries:
            groups = {group for entry in entries for group in entry.group_ids}
            self._awaited |= groups - self._shards.groups_since(entries[0].step)
            self._pending += entries


class Archiver:
    """Writes a shard when it is full or its oldest group has waited `_FLUSH_S`. Belongs to one thread.

    Life: step* -> flush -> close.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        config: ArchiveConfig,
        *,
        clock: Clock = time.monotonic,
        mirror: ArchiveMirror | None = None,
        fence: int = NO_FENCE,
    ) -> None:
        """`mirror`: the folder's copy in the object store; `fence`: the chief's fence.

        Raises ArchiveError if another process writes to the folder, StorageError, OSError.
        """
        self._store = store
        self._folder = folder
        self._config = config
        self._clock = clock
        self._mirror = mirror
        self._fence = fence
        if mirror:
            mirror.fetch()
        self._writer = ShardWriter(folder)
        self._waiting_since: float | None = None
        try:
            self._steps = StepArchiver(store, folder, self._writer)
        except BaseException:
            self.close()
            raise
        self.num_groups = 0
        self.num_left_out = 0
        """Groups dropped because the archive is full."""

    @property
    def last_step(self) -> int:
        """Newest step in the ledger; 0 before the first."""
        return self._steps.ledger.last_step

    def step(self) -> int:
        """Archive one shard if due; returns the number of groups taken from the store.

        Raises StoreUnavailableError, StaleFenceError, StorageError, OSError; the next call retries.
        """
        self._steps.poll()
        num_waiting, now, num_groups = self._store.counts().unarchived, self._clock(), 0
        if not num_waiting:
            self._waiting_since = None
        else:
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if num_waiting >= _GROUPS_PER_SHARD or now - self._waiting_since >= _FLUSH_S:
                num_groups = self._move()
        self._write_steps()
        return num_groups

    def flush(self) -> int:
        """Archive all finished groups. Returns and raises like `step`."""
        self._steps.poll()
        num_groups = sum(iter(self._move, 0))
        self._write_steps()
        return num_groups

    def close(self) -> None:
        """Release the archive to other writers. The store stays open."""
        self._writer.close()

    def _write_steps(self) -> None:
        self._steps.write()
        self._send()
        # After a crash before this, entries are in both places, and the store's count.
        self._steps.forget(fence=self._fence)

    def _send(self) -> None:
        if self._mirror:
            # Checks the fence: if this broker hung, another chief may have written elsewhere.
            self._store.forget([], fence=self._fence)
            self._mirror.send()

    def _move(self) -> int:
        # Estimate how many fit, because all groups could exhaust the memory.
        groups = self._store.finished(limit=_SAMPLED_GROUPS)
        num_bytes = sum(len(payload) for group in groups for payload in group.payloads)
        limit = max(1, min(_MAX_SHARD_BYTES * len(groups) // max(1, num_bytes), _GROUPS_PER_SHARD))
        groups = groups[:limit] if limit <= len(groups) else self._store.finished(limit=limit)
        # The archive has those that a crash or a failure left in the store.
        new = [group for group in groups if not self._writer.has(group.id)]
        if new and sum(shard.bytes for shard in self._writer.shards) >= self._config.max_gib * 2**30:
            # A full store would stop the run. Steps of dropped groups never become complete, so the ledger ends here.
            if not self.num_left_out:
                log.warning("archive_full", max_gib=self._config.max_gib)
            self.num_left_out += len(new)
            new = []
        else:
            # Images first, so that a shard in the manifest never lacks one.
            names = missing_images(self._folder, image_names(chain(*(group.payloads for group in new))))
            if names:
                write_images(self._folder, self._store.images(names))
            if new and (shard := self._writer.write(new)):
                log.info("archived", file=shard.file, groups=shard.groups, trajectories=shard.rows, bytes=shard.bytes)
            # Includes the shards of calls that failed to send them.
            self._send()
            self._steps.mark_archived(group.id for group in groups)
        # Last: after a crash, the store offers the groups again and `has` recognizes them.
        if groups:
            self._store.forget([group.id for group in groups], fence=self._fence)
        self._waiting_since = None
        self.num_groups += len(new)
        return len(groups)


class ArchiverStatus(Record):
    """Gauges of the archiver. Example: ArchiverStatus(state="archiving", groups=2048, last_step=64)."""

    state: Literal["starting", "archiving", "stuck", "full", "gone"] = "starting"
    """stuck: archiving fails and is retried; full: at its size limit, it drops groups; see `reason`."""
    groups: int = 0
    """Groups archived since the start."""
    last_step: int = 0
    reason: str = ""
    """Reason for not archiving; empty otherwise."""
    waits_for: WaitsFor = ""


class ArchiverThread:
    """Runs an Archiver on a thread with its own store connection while this broker is the chief.

    Retries after errors and reports them as its status.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        folder: Path,
        config: ArchiveConfig,
        *,
        storage: ObjectFolder | None = None,
        lead: Callable[[], int | None] = lambda: NO_FENCE,
    ) -> None:
        """`connect` opens the store, again after errors. `storage` mirrors the archive. `lead` returns the chief's
        fence; None while another broker is the chief."""
        self._connect = connect
        self._folder = folder
        self._config = config
        self._storage = storage
        self._lead = lead
        self._stopping = threading.Event()
        self._status = ArchiverStatus()
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="archiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def status(self) -> ArchiverStatus:
        return self._status

    def stop(self, *, timeout_s: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Archive the finished groups, calling `meanwhile` every second; returns whether it ended in time."""
        self._stopping.set()
        ends_at = time.monotonic() + timeout_s
        while self._thread.is_alive() and (left_s := ends_at - time.monotonic()) > 0:
            self._thread.join(timeout=min(left_s, _TICK_S))
            meanwhile()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._attempt():
            if self._stopping.wait(_TICK_S):
                return

    def _attempt(self) -> bool:
        """Archive until stopped; returns False after an error or under another chief."""
        if (fence := self._lead()) is None:
            return False
        try:
            with closing(self._connect()) as store:
                try:
                    mirror = ArchiveMirror(self._folder, self._storage) if self._storage else None
                    with (
                        suppress(StaleFenceError),
                        closing(Archiver(store, self._folder, self._config, mirror=mirror, fence=fence)) as archiver,
                    ):
                        return self._archive(archiver, store, fence)
                except (ReplayBufferError, OSError) as error:
                    self._record_error(error)
                    # The store may still work, for example if the disk is full.
                    self._report(store)
        except (ReplayBufferError, OSError) as error:
            self._record_error(error)
        return False

    def _archive(self, archiver: Archiver, store: Store, fence: int) -> bool:
        while not self._stopping.is_set():
            if self._lead() != fence:
                return False
            moved = archiver.step()
            self._record_progress(archiver, state="archiving")
            self._report(store)
            if not moved:
                self._stopping.wait(_TICK_S)
        archiver.flush()
        self._record_progress(archiver, state="gone")
        self._report(store)
        return True

    def _record_progress(self, archiver: Archiver, *, state: Literal["archiving", "gone"]) -> None:
        if self._last_error:
            self._last_error = ""
            log.info("archiving_resumed")
        full = f"the archive has reached buffer.archive.max_gib ({self._config.max_gib:g})"
        reason = f"{full}: {archiver.num_left_out} groups were dropped" if archiver.num_left_out else ""
        self._status = ArchiverStatus(
            state="full" if reason and state == "archiving" else state,
            reason=reason,
            groups=self._status.groups + archiver.num_groups,
            last_step=archiver.last_step,
        )
        archiver.num_groups = 0

    def _record_error(self, error: Exception) -> None:
        no_room = f"no room on the disk {describe_disk(self._folder)}: " if is_disk_full(error) else ""
        reason = f"{no_room}{error}"
        if str(error) != self._last_error:
            self._last_error = str(error)
            log.warning("not_archiving", reason=reason, folder=str(self._folder))
        # StoreUnavailableError is also an OSError.
        waits_for: WaitsFor = "store" if isinstance(error, StoreUnavailableError) else "disk"
        waits_for = "storage" if isinstance(error, StorageError) else waits_for
        self._status = msgspec.structs.replace(self._status, state="stuck", reason=reason, waits_for=waits_for)

    def _report(self, store: Store) -> None:
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        store.report_role(_ROLE, {"role": _ROLE, **where} | msgspec.structs.asdict(self._status))
