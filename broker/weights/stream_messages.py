"""Messages between the two ends of broker/weights/stream.py."""

from typing import Annotated

from msgspec import Meta

from slipstream.buffer.trajectory import Name, Record


class _Stream(Record, tag_field="type", tag=True):
    """Base of all messages of the stream."""


class Find(_Stream):
    """Query for a version by its checksum, and for the newest one."""

    checksum: Name
    """Combined checksum of the requested version; empty: only the newest is of interest."""


class Found(_Stream):
    """Answer to Find, with its checksum."""

    checksum: Name
    version: int | None
    """Version with that checksum; None: missing."""
    newest: int | None
    """Newest version; None: there is none."""


class ReadChunk(_Stream):
    """Request for a part of a file."""

    version: int
    name: Name
    """Name of a snapshot's file, like bucket-0003.bin."""
    offset: Annotated[int, Meta(ge=0, lt=2**62)]
    num_bytes: Annotated[int, Meta(ge=0)]
    """Number of bytes; 0: only the size of the file is requested."""


class Chunk(_Stream):
    """Answer to ReadChunk, with its version, name and offset; the bytes are the second frame."""

    version: int
    name: Name
    offset: int
    file_bytes: int
    """Size of the whole file."""
    checksum: int
    """xxh3-64 of the bytes in the second frame."""


class Later(_Stream):
    """Answer to ReadChunk of a lender that is still fetching the file itself."""

    version: int
    name: Name
    offset: int
    num_bytes: int
    """Bytes it has received so far: as long as they grow, waiting is worthwhile."""


class Gone(_Stream):
    """Answer to ReadChunk for a file that does not exist, or no longer."""

    version: int
    name: Name
    reason: str


Answer = Found | Chunk | Later | Gone
