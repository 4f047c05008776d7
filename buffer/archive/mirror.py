"""ArchiveMirror: keeps an archive in the object store, as complete as the folder it is written in.

Shards and the ledger go before the manifest that names them, so that a reader of the object store finds everything that
the manifest promises. A run that continues elsewhere begins with what the object store has.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import structlog

from slipstream.buffer.archive.archive import IMAGES
from slipstream.buffer.archive.manifest import LEDGER, MANIFEST, ShardEntry, parse_manifest, read_manifest
from slipstream.buffer.archive.shard_writer import OVERFLOW
from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.object_folder import ObjectFolder

_WHOLE_FILES = (LEDGER, MANIFEST)
"""Files that grow, and are written whole, in this order; all others never change."""

log = structlog.get_logger(__name__)


class ArchiveMirror:
    """Life: fetch -> send*. Belongs to the archive's one writer."""

    def __init__(self, folder: Path, remote: ObjectFolder) -> None:
        self._folder = folder
        self._remote = remote
        self._sent = dict[str, int | bytes]()
        """Size of each file in the object store, or the content of one that grows."""

    def fetch(self) -> None:
        """Make the folder as complete as the object store has it. Raises StorageError, ArchiveError, OSError."""
        found = self._remote.objects()
        # The manifest first: the ledger may be longer than it says, and not shorter.
        grown = {name: self._remote.read(name) or b"" for name in reversed(_WHOLE_FILES)}
        self._sent = {name: info.size for name, info in found.items()} | grown
        remote, local = grown[MANIFEST], _whole_lines(self._folder / MANIFEST)
        if local.startswith(remote):
            return
        if not remote.startswith(local):
            raise ArchiveError(
                f"{self._folder} must have the first shards of {self._remote.uri}, got others: the run went on "
                "elsewhere since; move the folder away."
            )
        manifest = parse_manifest(remote, where=f"{self._remote.uri}/{MANIFEST}")
        shards = {shard.file: shard.checksum for shard in manifest.shards}
        others = [name for name in found if PurePosixPath(name).parts[:-1] in ((IMAGES,), (OVERFLOW,))]
        for name in (*shards, *others):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name not in found or not path.exists() or path.stat().st_size != found[name].size:
                self._remote.fetch(name, path, expected=shards.get(name, ""))
        # The manifest last: shards without a line are removed by a writer, lines without their shards are damage.
        for name in _WHOLE_FILES:
            write_durably(self._folder / name, grown[name])
        log.info("archive_fetched", uri=self._remote.uri, shards=len(shards))

    def send(self) -> None:
        """Send what the object store lacks. Raises StorageError, and can be called again then."""
        for path, shard in self._unchanging():
            name = str(path.relative_to(self._folder))
            if self._sent.get(name) != (size := path.stat().st_size):
                self._remote.send(path, name, expected=shard.checksum if shard else "")
                self._sent[name] = size
        for name in _WHOLE_FILES:
            content = _whole_lines(self._folder / name)
            if content and self._sent.get(name) != content:
                self._remote.write(name, content)
                self._sent[name] = content

    def _unchanging(self) -> Iterator[tuple[Path, ShardEntry | None]]:
        for shard in read_manifest(self._folder).shards:
            yield self._folder / shard.file, shard
        for kind in (IMAGES, OVERFLOW):
            for path in sorted((self._folder / kind).glob("*")):
                # A name with this end is being written.
                if path.suffix != ".tmp":
                    yield path, None


def _whole_lines(path: Path) -> bytes:
    """Content of a file of lines, without what a crash left of a last one; empty if there is none."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]
