"""BackgroundSaver: writes a checkpoint while training continues.

Produces: durable files with checksums on each machine; with `storage.uri`, all of them in the object store.
Waits for: disk space, the object store, and, on the first rank of a folder, the files of its other ranks.
Invariant: at most one save is in flight. Its threads run no collectives, which would interleave with training's.
Instead, each rank's files appear atomically in a draft. The first rank of each folder posts to the rendezvous, and then
rank 0 names the checkpoint and calls `finish`.

<folder>/draft-step-00000050/rank-0/  sealed files of one rank, in flight or left by a crash
"""

import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from slipstream.buffer.durable_files import (
    CHECKSUMS,
    checksums_of,
    merge,
    read_checksums,
    seal,
    sync_path,
    write_durably,
)
from slipstream.buffer.object_folder import ObjectFolder
from slipstream.learner.errors import CheckpointError
from slipstream.learner.ranks import Ranks
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.process import run_in_thread

Write = Callable[[Path], object]
"""Writes one file, or the folder of a model."""

_POLL_S = 0.02
_LAST_SAVE_S = 60.0
_BLOCK_BYTES = 32 * 2**20

log = structlog.get_logger(__name__)


class RankFolders:
    """Ranks grouped by checkpoint folder, which machines with a shared file system share.

    Construction and `complete` are collective.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self.sharers = _find_sharers(folder, ranks)
        """Ranks of this rank's folder, sorted."""
        self.leaders = sorted({int(first) for first in ranks.gather_bytes(str(self.sharers[0]).encode())})
        """First rank of every folder, sorted."""

    @property
    def is_leader(self) -> bool:
        return self.sharers[0] == self._ranks.rank

    def complete(self, folder: Path) -> None:
        """Copy missing files of a checkpoint between machines. Raises CheckpointError."""
        held = read_checksums(folder) if self.is_leader and (folder / CHECKSUMS).is_file() else {}
        gathered = self._ranks.gather_bytes(msgspec.json.encode(held))
        offers = [msgspec.json.decode(offer, type=dict[str, str]) for offer in gathered]
        owners, union = dict[str, int](), dict[str, str]()
        for rank, offer in enumerate(offers):
            for name, digest in offer.items():
                if union.setdefault(name, digest) != digest:
                    raise CheckpointError(
                        f"{folder / name} must be the same on every machine, got different content on the machine of "
                        f"rank {rank}: delete the folder on the machine that has it from another run."
                    )
                owners.setdefault(name, rank)
        for name in sorted(union):
            if any(name not in offers[leader] for leader in self.leaders):
                self._copy(folder / name, owner=owners[name], is_missing=self.is_leader and name not in held)
        if self.is_leader and held != union:
            found = checksums_of(folder)
            if damaged := [name for name in sorted(union) if found.get(name) != union[name]]:
                raise CheckpointError(f"{folder / damaged[0]} must arrive unchanged, but its checksum differs.")
            write_durably(folder / CHECKSUMS, msgspec.json.encode(union))
        self._ranks.barrier()

    def _copy(self, path: Path, *, owner: int, is_missing: bool) -> None:
        """Broadcast a file in blocks to ranks without it. Collective."""
        source = path.open("rb", buffering=0) if self._ranks.rank == owner else None
        if is_missing:
            path.parent.mkdir(parents=True, exist_ok=True)
        sink = path.open("wb") if is_missing else None
        try:
            while True:
                (block,) = self._ranks.broadcast_bytes([source.read(_BLOCK_BYTES)] if source else None, source=owner)
                if not block:
                    return
                if sink:
                    sink.write(block)
        finally:
            for file in filter(None, (source, sink)):
                file.close()


def _find_sharers(folder: Path, ranks: Ranks) -> list[int]:
    """Ranks with the same folder: each creates a file, then lists them."""
    if ranks.size == 1:
        return [0]
    (name,) = ranks.broadcast_bytes([uuid.uuid4().hex.encode()] if ranks.is_first else None)
    meeting = folder / f"ranks-{name.decode()}"
    meeting.mkdir(parents=True, exist_ok=True)
    (meeting / str(ranks.rank)).touch()
    ranks.barrier()
    found = sorted(int(path.name) for path in meeting.iterdir())
    ranks.barrier()
    if found[0] == ranks.rank:
        shutil.rmtree(meeting, ignore_errors=True)
    return found


class BackgroundSaver:
    """One per rank. Life: (start -> flush)*."""

    def __init__(
        self, folder: Path, *, ranks: Ranks, folders: RankFolders, in_background: bool, storage: ObjectFolder | None
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._folders = folders
        self._storage = storage
        self._in_background = in_background
        self._disk = DiskWait()
        self._waits_for_ranks = ""
        self._draft = folder / "draft"
        self._in_flight: Future[Any] = Future()
        self._in_flight.set_result(None)

    @property
    def reason(self) -> str:
        """Reason that the save waits, for disk space or other ranks; else empty. Thread-safe."""
        return self._disk.reason or self._waits_for_ranks

    @property
    def storage_reason(self) -> str:
        """Like `reason`, for the object store."""
        return self._storage.wait.reason if self._storage else ""

    def start(self, writes: Mapping[str, Write], *, name: str, finish: Callable[[], object]) -> None:
        """Write this rank's files. Once those of all ranks form the folder `name`, rank 0 calls `finish`.

        No save may be in flight.
        """
        self._draft = self._folder / f"draft-{name}"
        self.run(lambda: self._write(writes, name=name, finish=finish))

    def run(self, work: Callable[[], object]) -> None:
        """Run work for which `flush` waits, raising its error."""
        if self._in_background:
            self._in_flight = run_in_thread(work, name="checkpoint")
        else:
            work()

    def flush(self) -> None:
        """Block until no rank has a save in flight. Raises the error of this rank's save. Collective.

        No deadline, because only a user can free a full disk. `reason` reports it.
        """
        is_busy = True
        while is_busy:
            self.raise_error()
            is_busy = bool(self._ranks.max(torch.tensor([float(not self._in_flight.done())])).item())
            time.sleep(_POLL_S * is_busy)
        self.raise_error()

    def join(self) -> None:
        """Wait at most a minute for all ranks to write the save in flight."""
        ends_at = time.monotonic() + _LAST_SAVE_S
        while (not self._in_flight.done() or self._draft.exists()) and time.monotonic() < ends_at:
            time.sleep(_POLL_S)

    def raise_error(self) -> None:
        if self._in_flight.done():
            self._in_flight.result()

    def _write(self, writes: Mapping[str, Write], *, name: str, finish: Callable[[], object]) -> None:
        began_at, draft = time.monotonic(), self._draft
        own = draft / f"rank-{self._ranks.rank}"
        self._disk.retry(lambda: _write_sealed(own, writes), what="a checkpoint", path=self._folder)
        if not self._folders.is_leader:
            return
        parts = [draft / f"rank-{rank}" for rank in self._folders.sharers if rank != self._ranks.rank]
        self._await_ranks(lambda: [part.name for part in parts if not part.is_dir()])
        self._disk.retry(lambda: merge(parts, into=own), what="a checkpoint", path=self._folder)
        if not self._ranks.is_first:
            self._name(own, name)
        self._await_folders("written")
        # Rank 0 is last, so its checkpoints are durable on every machine.
        if self._ranks.is_first:
            self._name(own, name)
        if self._storage:
            remote, folder = self._storage.child(name), self._folder / name
            remote.upload(folder, read_checksums(folder), sender=self._ranks.rank)
            self._await_folders("uploaded")
            if self._ranks.is_first:
                remote.seal(senders=self._folders.leaders)
        if self._ranks.is_first:
            finish()
        shutil.rmtree(draft, ignore_errors=True)
        log.info("checkpoint_durable", name=name, after_s=round(time.monotonic() - began_at, 3))

    def _name(self, own: Path, name: str) -> None:
        own.rename(self._folder / name)
        sync_path(self._folder)

    def _await_folders(self, state: str) -> None:
        """Post `state`. Rank 0 waits for every folder."""
        subject, draft = f"checkpoint-{state}", self._draft.name
        if not self._ranks.is_first:
            self._ranks.post(subject, draft)
            return
        waiting = self._folders.leaders[1:]

        def find_missing() -> list[str]:
            # Don't poll ranks that have posted: there may be hundreds.
            waiting[:] = [rank for rank in waiting if self._ranks.posted(subject, rank=rank) != draft]
            return [f"rank-{rank}" for rank in waiting]

        self._await_ranks(find_missing)

    def _await_ranks(self, find_missing: Callable[[], list[str]]) -> None:
        """Wait for other ranks' files. If one dies or cannot write, this process fails in its next collective."""
        began_at = time.monotonic()
        while missing := find_missing():
            waited_s = time.monotonic() - began_at
            self._waits_for_ranks = f"waiting {waited_s:.0f} s for the checkpoint files of {', '.join(missing)}"
            time.sleep(_POLL_S)
        self._waits_for_ranks = ""


def _write_sealed(folder: Path, writes: Mapping[str, Write]) -> None:
    """Write one rank's files. `folder` appears once they are durable; a failed write leaves nothing.

    Raises CheckpointError if a file is gone: a learner deletes its predecessor's draft.
    """
    temporary = folder.with_suffix(".tmp")
    try:
        temporary.mkdir(parents=True)
        for name, write in writes.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            write(temporary / name)
        seal(temporary)
        sealed = read_checksums(temporary)
        for name in writes:
            if not {name, f"{name}/config.json"} & sealed.keys():
                raise CheckpointError(
                    f"{temporary / name} must exist when its checkpoint is sealed, but another process deleted it: "
                    "restart with resume=true unless another learner has taken over this run."
                )
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    temporary.rename(folder)


def delete_folder(folder: Path) -> None:
    """Rename a checkpoint or draft, so no partial one is found, then delete it."""
    doomed = folder.with_name(f"deleted-{uuid.uuid4().hex}")
    # Two learners may delete the same folder.
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
