"""Stream: a shelf read over ZeroMQ in chunks, by generators that do not share its file system.

    generator -> server               server -> generator
    Find                              Found
    ReadChunk                         Chunk + bytes | Gone
The generator asks for a few chunks ahead and for no more, which bounds the memory of both ends. Whatever goes wrong on
the way (a chunk damaged, lost, out of order, a server that was restarted), it connects anew and asks on from the last
good byte. Everything is on loopback: nothing is encrypted.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import msgspec
import structlog
import xxhash
from msgspec import Meta

from slipstream.broker.errors import ChannelClosedError, WeightTransferError
from slipstream.broker.transport.channels import ClientChannel, Frames
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, ZmqServerChannel
from slipstream.broker.weights.snapshot_store import SnapshotStore, check_size
from slipstream.buffer.trajectory import Name, Record
from slipstream.runtime.clock import Deadline

CHUNK_BYTES = 256 * 1024
CHUNKS_AHEAD = 8
_MAX_REQUEST_BYTES = 4096
_HEADER_BYTES = 4096
_MAX_READ_BYTES = 256 * 2**20
"""Of a file that is read whole: a manifest, a payload."""
_MAX_DAMAGED = 5
_STEP_S = 0.1
_CLOSE_S = 5.0
"""For the answer under way, and for what is queued to leave; a thread that takes longer ends with the process."""

log = structlog.get_logger(__name__)


class _Stream(Record, tag_field="type", tag=True):
    """Base of what travels."""


class Find(_Stream):
    """Which versions are there?"""

    checksum: Name
    """Of the one wanted; empty: none in particular."""


class Found(_Stream):
    """Answer to Find."""

    checksum: Name
    """As asked."""
    version: int | None
    """The one wanted; None: not there."""
    newest: int | None
    """None: the shelf is empty."""


class ReadChunk(_Stream):
    """A part of a file."""

    version: int
    """Of this version."""
    name: Name
    """Like bucket-0003.bin."""
    offset: Annotated[int, Meta(ge=0, lt=2**62)]
    """First byte."""
    num_bytes: Annotated[int, Meta(ge=0)]
    """How many; 0: only the size is wanted."""


class Chunk(_Stream):
    """Answer to ReadChunk; the bytes are the second frame."""

    version: int
    """As asked."""
    name: Name
    """As asked."""
    offset: int
    """As asked."""
    file_bytes: int
    """Size of the whole file."""
    checksum: int
    """xxh3-64 of the bytes."""


class Gone(_Stream):
    """Answer to ReadChunk: there is no such file (any more)."""

    version: int
    """As asked."""
    name: Name
    """As asked."""
    reason: str
    """For people."""


Answer = Found | Chunk | Gone
"""From a server."""
T = TypeVar("T")


class StreamServer:
    """Lends out a shelf, from a thread of its own. Whoever has a shelf may have a server."""

    def __init__(self, shelf: SnapshotStore, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on `host` at `port`, 0 for any. Raises WeightTransferError."""
        self._shelf = shelf
        self._channel = _bind(host, port)
        self._host, self._port = host, int(self._channel.address.rpartition(":")[2])
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weight-stream", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; the same for the whole run."""
        return self._host, self._port

    def close(self) -> None:
        """Stop. May be called again. Blocks for the answer under way, which a disk that hangs may keep for ever."""
        self._stops.set()
        self._thread.join(timeout=_CLOSE_S)

    def _serve(self) -> None:
        while not self._stops.is_set():
            received = self._channel.receive(timeout_s=_STEP_S)
            if received and (reply := self._answer(received[1])):
                # What a generator cannot take now it will ask for again.
                self._channel.send(received[0], reply)
        self._channel.close()

    def _answer(self, frames: Frames) -> Frames | None:
        try:
            request = msgspec.msgpack.decode(frames[0], type=Find | ReadChunk)
        except (msgspec.DecodeError, IndexError):
            return None
        try:
            if isinstance(request, ReadChunk):
                return self._chunk(request)
            newest, version = self._shelf.newest(), self._shelf.find(request.checksum)
            return [msgspec.msgpack.encode(Found(request.checksum, version, newest))]
        except (WeightTransferError, OSError) as fault:
            if isinstance(request, Find):
                log.warning("shelf_not_read", reason=str(fault))
                return None
            return [msgspec.msgpack.encode(Gone(request.version, request.name, str(fault)))]

    def _chunk(self, asked: ReadChunk) -> Frames:
        file_bytes = self._shelf.size_bytes(asked.version, asked.name)
        num_bytes = min(asked.num_bytes, CHUNK_BYTES)
        content = self._shelf.read_part(asked.version, asked.name, offset=asked.offset, num_bytes=num_bytes)
        checksum = xxhash.xxh3_64_intdigest(content)
        header = Chunk(asked.version, asked.name, asked.offset, file_bytes, checksum)
        return [msgspec.msgpack.encode(header), content]


class WeightStream:
    """A generator's end. Fulfils WeightFiles; belongs to one thread."""

    def __init__(self, address: str, *, channel: ClientChannel | None = None, stall_s: float = 2.0) -> None:
        """Connect in the background to an address like tcp://127.0.0.1:5757; the server need not be there.

        Without a chunk for `stall_s` it connects anew; then for twice as long, because a link may be slower than that.
        """
        self._address = address
        self._channel = channel or ZmqClientChannel(address, max_message_bytes=CHUNK_BYTES + _HEADER_BYTES)
        self._stall_s = stall_s
        self.cancelled = threading.Event()
        """Another thread sets it: what is waited for ends soon, with WeightTransferError."""
        self.num_resumed = 0
        """Times it had to connect anew."""

    def find(self, checksum: str, *, timeout_s: float) -> int | None:
        """The version with this checksum; None when it is not there. Raises WeightTransferError."""
        return self._look(checksum, timeout_s=timeout_s).version

    def newest(self, *, timeout_s: float) -> int | None:
        """The newest version. Raises WeightTransferError."""
        return self._look("", timeout_s=timeout_s).newest

    def read(self, version: int, name: str, *, timeout_s: float) -> bytes:
        """A whole file. Raises WeightTransferError."""
        deadline = Deadline(timeout_s, what=name)
        size = self._size(version, name, timeout_s=timeout_s)
        if size > _MAX_READ_BYTES:
            check_size(version, name, wanted=_MAX_READ_BYTES, got=size)
        content = bytearray(size)
        self.read_into(version, name, memoryview(content), timeout_s=deadline.left_s)
        return bytes(content)

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float) -> None:
        """A whole file of this very size. Raises WeightTransferError."""
        transfer = _Transfer(version, name, into)
        deadline = Deadline(timeout_s, what=name)
        try:
            self._carry_on(transfer, deadline)
        except WeightTransferError:
            # What is still on its way must not be taken for an answer to what is asked next.
            self._channel.reconnect()
            raise

    def close(self) -> None:
        """Let go. May be called again."""
        self._channel.close()

    def _receive(self, *, stall_s: float, deadline: Deadline) -> Frames | None:
        """What comes next; None when nothing has for `stall_s`. Raises WeightTransferError when cancelled."""
        ends_at = time.monotonic() + min(stall_s, deadline.left_s)
        while True:
            if self.cancelled.is_set():
                raise WeightTransferError("the fetching of these weights was given up: others are wanted now")
            left_s = max(0.0, ends_at - time.monotonic())
            frames = self._channel.receive(timeout_s=min(_STEP_S, left_s))
            if frames is not None or left_s == 0.0:
                return frames

    def _carry_on(self, transfer: "_Transfer", deadline: Deadline) -> None:
        stall_s, num_damaged = self._stall_s, 0
        while not transfer.is_done:
            for asked in transfer.next_requests():
                self._channel.send([msgspec.msgpack.encode(asked)])
            frames = self._receive(stall_s=stall_s, deadline=deadline)
            if frames and transfer.take(frames):
                num_damaged = 0
                continue
            num_damaged += frames is not None
            if deadline.is_over or num_damaged > _MAX_DAMAGED:
                raise self._unfinished(transfer, num_damaged)
            stall_s *= 2 if frames is None else 1
            self._resume(transfer)

    def _look(self, checksum: str, *, timeout_s: float) -> Found:
        def read(answer: Answer) -> Found | None:
            return answer if isinstance(answer, Found) and answer.checksum == checksum else None

        return self._ask(Find(checksum), read, timeout_s=timeout_s)

    def _size(self, version: int, name: str, *, timeout_s: float) -> int:
        def read(answer: Answer) -> int | None:
            if isinstance(answer, Found) or (answer.version, answer.name) != (version, name):
                return None
            if isinstance(answer, Gone):
                raise WeightTransferError(answer.reason)
            return answer.file_bytes

        return self._ask(ReadChunk(version, name, offset=0, num_bytes=0), read, timeout_s=timeout_s)

    def _ask(self, request: Find | ReadChunk, read: Callable[[Answer], T | None], *, timeout_s: float) -> T:
        """Ask until `read` takes an answer for the one that was waited for."""
        deadline, stall_s = Deadline(timeout_s, what="an answer"), self._stall_s
        self._channel.send([msgspec.msgpack.encode(request)])
        while True:
            frames = self._receive(stall_s=stall_s, deadline=deadline)
            if frames and (answer := _decode(frames)) and (found := read(answer)) is not None:
                return found
            if deadline.is_over:
                raise WeightTransferError(
                    f"the weight server at {self._address} must answer within {timeout_s:g} s, got nothing: "
                    "is the learner alive, and is this its address?"
                )
            if frames is None:
                stall_s *= 2
                self._channel.reconnect()
                self._channel.send([msgspec.msgpack.encode(request)])

    def _resume(self, transfer: "_Transfer") -> None:
        """Begin again at the last good byte."""
        log.info("weight_stream_resumed", file=transfer.name, version=transfer.version, offset=transfer.num_good)
        self.num_resumed += 1
        self._channel.reconnect()
        transfer.rewind()

    def _unfinished(self, transfer: "_Transfer", num_damaged: int) -> WeightTransferError:
        reason = f"{num_damaged} damaged chunks in a row" if num_damaged else "nothing more in time"
        return WeightTransferError(
            f"{transfer.name} of version {transfer.version} must come from the weight server at {self._address}, got "
            f"{transfer.num_good} of {len(transfer.into)} bytes, then {reason}; nothing was loaded"
        )


class _Transfer:
    """A file that is under way: what has come of it, and what has been asked for."""

    def __init__(self, version: int, name: str, into: memoryview) -> None:
        self.version = version
        self.name = name
        self.into = into
        self.num_good = 0
        """All bytes up to here have come and were verified."""
        self._num_asked = 0

    @property
    def is_done(self) -> bool:
        return self.num_good == len(self.into)

    def next_requests(self) -> Iterator[ReadChunk]:
        """What may be asked for now."""
        while self._num_asked < min(len(self.into), self.num_good + CHUNKS_AHEAD * CHUNK_BYTES):
            yield ReadChunk(self.version, self.name, self._num_asked, CHUNK_BYTES)
            self._num_asked += CHUNK_BYTES

    def rewind(self) -> None:
        """What has not come will be asked for again."""
        self._num_asked = self.num_good

    def take(self, frames: Frames) -> bool:
        """Keep the next chunk; False for anything else. Raises WeightTransferError when there will be no more."""
        answer = _decode(frames)
        if isinstance(answer, Gone) and (answer.version, answer.name) == (self.version, self.name):
            raise WeightTransferError(answer.reason)
        if not isinstance(answer, Chunk) or len(frames) != 2:
            return False
        check_size(self.version, self.name, wanted=len(self.into), got=answer.file_bytes)
        is_next = (answer.version, answer.name, answer.offset) == (self.version, self.name, self.num_good)
        end = self.num_good + len(frames[1])
        if (
            not is_next
            or not frames[1]
            or xxhash.xxh3_64_intdigest(frames[1]) != answer.checksum
            or end > len(self.into)
        ):
            return False
        self.into[self.num_good : end] = frames[1]
        self.num_good = end
        return True


def _decode(frames: Frames) -> Answer | None:
    try:
        return msgspec.msgpack.decode(frames[0], type=Answer)
    except (msgspec.DecodeError, IndexError):
        return None


def _bind(host: str, port: int) -> ZmqServerChannel:
    try:
        return ZmqServerChannel(f"tcp://{host}:{port or '*'}", max_message_bytes=_MAX_REQUEST_BYTES)
    except ChannelClosedError as error:
        raise WeightTransferError(
            f"weights.host and weights.fetch_port must be a loopback address of this machine and a free port (0: any), "
            f"got {host}:{port}: {error}"
        ) from error
