"""Stream: serves the files of versions in chunks over ZeroMQ, to generators that do not share the file system.

    generator -> server               server -> generator
    Find                              Found
    ReadChunk                         Chunk + bytes | Later | Gone

The generator requests only a few chunks ahead, which bounds memory. After a bad or lost chunk or a restart of the
server it reconnects and resumes after the last good byte.

The server belongs to the learner, or to a lender that may still be fetching the version. Clients wait for the learner
until their deadline, but abandon a lender without progress.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Protocol, TypeVar

import msgspec
import structlog
import xxhash
from msgspec import Meta

from slipstream.broker.errors import ChannelClosedError, NotYetError, WeightTransferError
from slipstream.broker.messages import Frames
from slipstream.broker.transport.channels import ClientChannel
from slipstream.broker.transport.endpoints import is_listening
from slipstream.broker.transport.zmq_channels import ZmqClientChannel, listen
from slipstream.broker.weights.snapshots import check_size
from slipstream.buffer.trajectory import Name
from slipstream.configs.base import Record
from slipstream.configs.cluster import LOCAL, ClusterConfig
from slipstream.runtime.clock import Deadline
from slipstream.runtime.credentials import Keys


class _Stream(Record, tag_field="type", tag=True):
    """Base of the stream's messages."""


class Find(_Stream):
    """Query for a version by checksum, and the newest."""

    checksum: Name
    """Combined checksum; empty: only the newest."""


class Found(_Stream):
    """The version with the requested checksum, in reply to Find."""

    checksum: Name
    version: int | None
    """None if the server has no such version."""
    newest: int | None
    """None: no version at all."""


class _OfFile(_Stream):
    version: int
    name: Name
    """File name, like bucket-0003.bin."""


class ReadChunk(_OfFile):
    """Request for a part of a file."""

    offset: Annotated[int, Meta(ge=0, lt=2**62)]
    num_bytes: Annotated[int, Meta(ge=0)]
    """0 requests only the file's size."""


class Chunk(_OfFile):
    """Answer to ReadChunk. The bytes are the second frame."""

    offset: int
    file_bytes: int
    """Size of the whole file."""
    checksum: int
    """xxh3-64 of the second frame."""


class Later(_OfFile):
    """Answer to ReadChunk from a lender that is still fetching the file."""

    offset: int
    num_bytes: int
    """Bytes the lender has received; waiting is worthwhile while this grows."""


class Gone(_OfFile):
    """Answer to ReadChunk for a missing file."""

    reason: str


Answer = Found | Chunk | Later | Gone


CHUNK_BYTES = 256 * 1024
CHUNKS_AHEAD = 8
_HEADER_BYTES = 4096
_MAX_READ_BYTES = 256 * 2**20
"""Maximum size of a file for `read`."""
_MAX_DAMAGED = 5
"""Consecutive damaged chunks that a transfer survives."""
_STEP_S = 0.1
"""Interval between checks for `close` and cancellation."""
_CLOSE_TIMEOUT_S = 5.0
"""Time limit of `close`; a slower thread ends with the process."""
_ASK_AGAIN_S = 0.02
"""Interval between requests for data that a lender lacks."""

log = structlog.get_logger(__name__)


T = TypeVar("T")


class ServedFiles(Protocol):
    """Files to serve, on the server's thread: a SnapshotStore, or a lender's HostWeights."""

    def find(self, checksum: str) -> int | None:
        """Return the version with this checksum; None if missing."""

    def newest(self) -> int | None: ...

    def size_bytes(self, version: int, name: str) -> int:
        """Return the size of a file of a version, bytes. Raises NotYetError, WeightTransferError."""

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from `offset`, fewer at the end. Raises NotYetError, WeightTransferError."""


class StreamServer:
    """Serves the files of versions on its own thread."""

    def __init__(
        self, files: ServedFiles, *, keys: Keys, address: str = "tcp://127.0.0.1:*", cluster: ClusterConfig = LOCAL
    ) -> None:
        """Listen at `address`, where `*` selects a free port, as `listen` does. Raises WeightTransferError."""
        self._files = files
        self.num_bytes = 0
        try:
            self._channel = listen(address, keys=keys, setting="weights.fetch_address", cluster=cluster)
        except ChannelClosedError as error:
            raise WeightTransferError(str(error)) from error
        self.address = self._channel.address
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weight-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, after the current answer. Idempotent."""
        self._is_closing.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            received = self._channel.receive(timeout_s=_STEP_S)
            if received and (reply := self._answer(received[1])):
                # If the answer is undeliverable, the generator requests it again.
                self._channel.send(received[0], reply)
        self._channel.close()

    def _answer(self, frames: Frames) -> Frames | None:
        try:
            request = msgspec.msgpack.decode(frames[0], type=Find | ReadChunk)
        except (ValueError, IndexError):
            return None  # any program may connect: ignore unknown messages
        try:
            if isinstance(request, ReadChunk):
                version, name, offset = request.version, request.name, request.offset
                file_bytes, num_bytes = self._files.size_bytes(version, name), min(request.num_bytes, CHUNK_BYTES)
                content = self._files.read_part(version, name, offset=offset, num_bytes=num_bytes)
                self.num_bytes += len(content)
                header = Chunk(version, name, offset, file_bytes, xxhash.xxh3_64_intdigest(content))
                return [msgspec.msgpack.encode(header), content]
            newest, found = self._files.newest(), self._files.find(request.checksum)
            return [msgspec.msgpack.encode(Found(request.checksum, found, newest))]
        except NotYetError as later:
            assert isinstance(request, ReadChunk), "only a file can be on its way"
            return [msgspec.msgpack.encode(Later(request.version, request.name, request.offset, later.num_bytes))]
        except (WeightTransferError, OSError) as error:
            if isinstance(request, Find):
                log.warning("snapshots_not_read", reason=str(error))
                return None
            return [msgspec.msgpack.encode(Gone(request.version, request.name, str(error)))]


class WeightStream:
    """A generator's end. Implements WeightFiles; belongs to one thread."""

    def __init__(
        self,
        address: str,
        *,
        keys: Keys,
        channel: ClientChannel | None = None,
        stall_s: float = 2.0,
        give_up_s: float | None = None,
    ) -> None:
        """Connect in the background; the server may start later.

        Reconnects after `stall_s` without a chunk, doubled each time, since the link may be slow. `give_up_s`: time
        without progress after which a lender fails; None for the learner.
        """
        self._give_up_s = give_up_s
        self._address = address
        self._channel = channel or ZmqClientChannel(address, keys=keys, max_message_bytes=CHUNK_BYTES + _HEADER_BYTES)
        self._stall_s = stall_s
        self.cancelled = threading.Event()
        """Set by another thread to end an operation with WeightTransferError."""
        self.num_resumed = 0
        self.num_arrived = 0
        """Bytes received so far, also by a lender that is still receiving the file."""

    def find(self, checksum: str, *, timeout_s: float) -> int | None:
        return self._find(checksum, timeout_s=timeout_s).version

    def newest(self, *, timeout_s: float) -> int | None:
        return self._find("", timeout_s=timeout_s).newest

    def read(self, version: int, name: str, *, timeout_s: float) -> bytes:
        deadline = Deadline(timeout_s, what=name)

        def read_size(answer: Answer) -> int | None:
            if isinstance(answer, Found) or (answer.version, answer.name) != (version, name):
                return None
            if isinstance(answer, Gone):
                raise WeightTransferError(answer.reason)
            if isinstance(answer, Later):
                raise NotYetError(answer.num_bytes)
            return answer.file_bytes

        size = self._ask(ReadChunk(version, name, offset=0, num_bytes=0), read_size, timeout_s=timeout_s)
        if size > _MAX_READ_BYTES:
            must = f"have at most {_MAX_READ_BYTES} bytes to be read whole"
            raise WeightTransferError(f"{name} of version {version} must {must}, got {size}")
        content = bytearray(size)
        self.read_into(version, name, memoryview(content), timeout_s=deadline.left_s)
        return bytes(content)

    def read_into(self, version: int, name: str, into: memoryview, *, timeout_s: float) -> None:
        transfer = _Transfer(version, name, into)
        deadline = Deadline(timeout_s, what=name)
        try:
            self._run(transfer, deadline)
        except WeightTransferError:
            # Chunks in transit must not answer a later request.
            self._channel.reconnect()
            raise

    def close(self) -> None:
        self._channel.close()

    def _receive(self, *, stall_s: float, deadline: Deadline) -> Frames | None:
        """Return the next frames; None after `stall_s`. Raises WeightTransferError when cancelled."""
        ends_at = time.monotonic() + min(stall_s, deadline.left_s)
        while True:
            if self.cancelled.is_set():
                raise WeightTransferError("the fetch was cancelled: a newer version was announced, or this role stops")
            left_s = max(0.0, ends_at - time.monotonic())
            frames = self._channel.receive(timeout_s=min(_STEP_S, left_s))
            if frames is not None or left_s == 0.0:
                return frames

    def _run(self, transfer: "_Transfer", deadline: Deadline) -> None:
        stall_s, num_damaged = self._stall_s, 0
        progress = _Progress(self._give_up_s)
        while not transfer.is_done:
            for request in transfer.next_requests():
                self._channel.send([msgspec.msgpack.encode(request)])
            frames = self._receive(stall_s=min(stall_s, progress.left_s), deadline=deadline)
            is_accepted = frames is not None and transfer.accept(frames)
            num_damaged = 0 if is_accepted else num_damaged + (frames is not None)
            self.num_arrived += progress.record(transfer.num_good + transfer.num_arriving)
            has_come = is_accepted and not transfer.is_waiting
            if progress.has_ended or num_damaged > _MAX_DAMAGED or (deadline.is_over and not has_come):
                reason = f"{num_damaged} damaged chunks in a row" if num_damaged else "nothing more in time"
                raise WeightTransferError(
                    f"{transfer.name} of version {transfer.version} must arrive from the weight server at "
                    f"{self._address}, got {transfer.num_good} of {len(transfer.into)} bytes, then {reason}; nothing "
                    "was loaded"
                )
            if transfer.is_waiting:
                self.cancelled.wait(_ASK_AGAIN_S)
            if is_accepted:
                continue
            # A slow link looks like a stall: with a constant limit it would reconnect forever.
            stall_s *= 2 if frames is None else 1
            log.info("weight_stream_resumed", file=transfer.name, version=transfer.version, offset=transfer.num_good)
            self.num_resumed += 1
            self._reconnect()
            transfer.rewind()

    def _find(self, checksum: str, *, timeout_s: float) -> Found:
        def read(answer: Answer) -> Found | None:
            return answer if isinstance(answer, Found) and answer.checksum == checksum else None

        return self._ask(Find(checksum), read, timeout_s=timeout_s)

    def _ask(self, request: Find | ReadChunk, read: Callable[[Answer], T | None], *, timeout_s: float) -> T:
        deadline, stall_s = Deadline(timeout_s, what="an answer"), self._stall_s
        progress = _Progress(self._give_up_s)
        self._channel.send([msgspec.msgpack.encode(request)])
        while True:
            frames = self._receive(stall_s=min(stall_s, progress.left_s), deadline=deadline)
            try:
                if frames and (answer := _decode(frames)) and (found := read(answer)) is not None:
                    return found
            except NotYetError as later:
                self.num_arrived += progress.record(later.num_bytes)
                self.cancelled.wait(_ASK_AGAIN_S)
                self._channel.send([msgspec.msgpack.encode(request)])
            if deadline.is_over or progress.has_ended:
                raise WeightTransferError(
                    f"the weight server at {self._address} must answer within "
                    f"{min(timeout_s, self._give_up_s or timeout_s):g} s, got nothing: is it alive, and is this its "
                    "address?"
                )
            if frames is None:
                stall_s *= 2
                self._reconnect()
                self._channel.send([msgspec.msgpack.encode(request)])

    def _reconnect(self) -> None:
        # A learner may restart at its address; a dead lender will not.
        if self._give_up_s is not None and not is_listening(self._address):
            raise WeightTransferError(f"the lender at {self._address} must be alive, but no process listens there now")
        self._channel.reconnect()


class _Transfer:
    def __init__(self, version: int, name: str, into: memoryview) -> None:
        self.version = version
        self.name = name
        self.into = into
        self.num_good = 0
        """Received and verified bytes."""
        self.num_arriving = 0
        """Bytes that a lender has received while it is fetching the file."""
        self.is_waiting = False
        """Whether the lender lacks the next bytes."""
        self._num_requested = 0

    @property
    def is_done(self) -> bool:
        return self.num_good == len(self.into)

    def next_requests(self) -> Iterator[ReadChunk]:
        chunks_ahead = 1 if self.is_waiting else CHUNKS_AHEAD
        while self._num_requested < min(len(self.into), self.num_good + chunks_ahead * CHUNK_BYTES):
            yield ReadChunk(self.version, self.name, self._num_requested, CHUNK_BYTES)
            self._num_requested += CHUNK_BYTES

    def rewind(self) -> None:
        self._num_requested = self.num_good

    def accept(self, frames: Frames) -> bool:
        """Store the next chunk, or record that the lender lacks it; False for other messages.

        Raises WeightTransferError for a missing file.
        """
        answer = _decode(frames)
        is_own = isinstance(answer, _OfFile) and (answer.version, answer.name) == (self.version, self.name)
        if is_own and isinstance(answer, Later):
            if answer.offset == self.num_good:
                self.is_waiting, self.num_arriving = True, answer.num_bytes
                self.rewind()
            return True
        if is_own and isinstance(answer, Gone):
            raise WeightTransferError(answer.reason)
        if not isinstance(answer, Chunk) or len(frames) != 2:
            return False
        check_size(self.version, self.name, expected=len(self.into), got=answer.file_bytes)
        end = self.num_good + len(frames[1])
        if self.is_waiting and answer.offset > self.num_good:
            return True  # requested ahead, before the lender asked to wait
        # Other chunks answer requests from before a reconnect.
        if (
            not (is_own and answer.offset == self.num_good)
            or not frames[1]
            or xxhash.xxh3_64_intdigest(frames[1]) != answer.checksum
            or end > len(self.into)
        ):
            return False
        self.into[self.num_good : end] = frames[1]
        self.num_good, self.is_waiting = end, False
        return True


class _Progress:
    """Time since a server last sent or received new bytes."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._num_bytes = 0
        self._ends_at = time.monotonic() + self._limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def has_ended(self) -> bool:
        return self.left_s == 0.0

    def record(self, num_bytes: int) -> int:
        """Return the growth over the previous maximum."""
        growth = max(0, num_bytes - self._num_bytes)
        if growth:
            self._num_bytes, self._ends_at = num_bytes, time.monotonic() + self._limit_s
        return growth


def _decode(frames: Frames) -> Answer | None:
    try:
        return msgspec.msgpack.decode(frames[0], type=Answer)
    except (ValueError, IndexError):
        return None
