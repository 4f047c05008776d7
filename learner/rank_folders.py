"""RankFolders: which learner ranks write checkpoints into one folder, and which files each folder lacks of one.

Ranks of one machine share a folder; ranks of several machines do where the run folder lies on a file system of all.
"""

import shutil
import uuid
from pathlib import Path

import msgspec

from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.sealed_folder import CHECKSUMS, checksums_of, read_checksums
from slipstream.learner.errors import CheckpointError
from slipstream.learner.ranks import Ranks

_BLOCK_BYTES = 32 * 2**20


class RankFolders:
    """The folders of the ranks. One per rank; its methods and its construction are collective."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Find out by a file of each rank's which ones see each other's."""
        self._ranks = ranks
        self.sharers = _find_sharers(folder, ranks)
        """Ranks that write into this rank's folder, in order."""
        firsts = ranks.gather_bytes(str(self.sharers[0]).encode())
        self.leaders = sorted({int(first) for first in firsts})
        """The first rank of every folder, in order."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first one of its folder."""
        return self.sharers[0] == self._ranks.rank

    def complete(self, folder: Path) -> None:
        """Give a checkpoint's folder on every machine the files that only others have. Raises CheckpointError."""
        held = read_checksums(folder) if self.is_leader and (folder / CHECKSUMS).is_file() else {}
        offers = [
            msgspec.json.decode(offer, type=dict[str, str])
            for offer in self._ranks.gather_bytes(msgspec.json.encode(held))
        ]
        owners, union = dict[str, int](), dict[str, str]()
        for rank, offer in enumerate(offers):
            for name, digest in offer.items():
                if union.setdefault(name, digest) != digest:
                    raise CheckpointError(
                        f"{folder / name} must be the same on every machine, got other content on that of rank {rank}: "
                        "delete the folder on the machine where it is from another run."
                    )
                owners.setdefault(name, rank)
        for name in sorted(union):
            if any(name not in offers[leader] for leader in self.leaders):
                self._copy(folder / name, owner=owners[name], is_missing=self.is_leader and name not in held)
        if self.is_leader and held != union:
            found = checksums_of(folder)
            if damaged := [name for name in sorted(union) if found.get(name) != union[name]]:
                raise CheckpointError(f"{folder / damaged[0]} must arrive as it was sent, but has another checksum.")
            write_durably(folder / CHECKSUMS, msgspec.json.encode(union))
        self._ranks.barrier()

    def _copy(self, path: Path, *, owner: int, is_missing: bool) -> None:
        """Send a file from rank `owner` to all; those that lack it write it. Every rank goes through every block."""
        is_owner = self._ranks.rank == owner
        source = path.open("rb", buffering=0) if is_owner else None
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
    if ranks.size == 1:
        return [0]
    (name,) = ranks.broadcast_bytes([uuid.uuid4().hex.encode()] if ranks.is_first else None)
    meeting = folder / f"draft-ranks-{name.decode()}"
    meeting.mkdir(parents=True, exist_ok=True)
    (meeting / str(ranks.rank)).touch()
    ranks.barrier()
    found = sorted(int(path.name) for path in meeting.iterdir())
    ranks.barrier()
    if found[0] == ranks.rank:
        shutil.rmtree(meeting, ignore_errors=True)
    return found
