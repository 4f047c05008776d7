"""Attacker: a raw socket that sends what it likes, and knows what a sound broker must make of it."""

import time
from collections import Counter
from collections.abc import Callable

import zmq

from slipstream.broker.messages import Ack, AnyMessage, Bye, Hello, Message, Nack, Put
from slipstream.broker.partial_decode import UNREADABLE
from slipstream.broker.transport.channels import Frames
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import SCHEMA_VERSION
from tests.builders import make_packed
from tests.hostile.target import MAX_MESSAGE_BYTES

_PATIENCE_S = 60.0
_FIRST_SENTINEL = 10**9
"""A group that is never admitted: what answers it is refused, and tells that all before it has been read."""


class Attacker:
    """Keeps count of the refusals its frames must lead to: exactly those."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._connect()
        self._is_known = False
        self._num_unanswered = 0
        self._next_sentinel = _FIRST_SENTINEL
        self._last_nacked = ""
        self.must_be_refused = 0
        """What the store's counters of refusals must have grown by."""
        self.kinds: Counter[str] = Counter()
        """Frames sent: those no broker may read, and the messages that others are."""
        self.reasons: Counter[str] = Counter()
        """Of the Nacks."""
        self.acknowledged: set[str] = set()
        """Ids of trajectories the broker said it has."""

    def send(self, frames: Frames) -> None:
        """Send, and note what must come of it."""
        self._foresee(frames)
        self._socket.send_multipart(frames)

    def send_much_too_large(self) -> None:
        """On a connection of its own, since this ends it."""
        cut_off = self._connect()
        cut_off.send(bytes(3 * MAX_MESSAGE_BYTES))
        cut_off.close(linger=500)

    def await_answers(self, meanwhile: Callable[[], None]) -> None:
        """Block until the broker has answered everything sent so far, calling `meanwhile` now and then."""
        # The answers of one step of the broker are sent together: those of a later one come after all of them.
        for _ in range(2):
            sentinel = self._send_sentinel()
            deadline = time.monotonic() + _PATIENCE_S
            while self._last_nacked != sentinel:
                assert time.monotonic() < deadline, "the broker must answer"
                meanwhile()
                self._read()
        assert self._num_unanswered == 0, f"every trajectory must be answered, got {self._num_unanswered} that are not"

    def close(self) -> None:
        """Let go."""
        self._socket.close(linger=0)
        self._context.term()

    def _connect(self) -> zmq.Socket:
        opened = self._context.socket(zmq.DEALER)
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.RCVHWM, 0)
        opened.connect(self._address)
        return opened

    def _send_sentinel(self) -> str:
        self._next_sentinel += 1
        header, payload = make_packed(str(self._next_sentinel))
        self.send([encode(Hello("generator", "hostile", "1", "nowhere", 1))])
        self.send([encode(Put([header])), payload])
        return header.id

    def _foresee(self, frames: Frames) -> None:
        try:
            message = _read_as_broker(frames)
        except RecordRefusedError as refusal:
            self.kinds[refusal.reason] += 1
            self.must_be_refused += 1
            return
        self.kinds[type(message).__name__] += 1
        match message:
            case Hello(schema_version=schema):
                self._is_known |= schema == SCHEMA_VERSION
            case Bye():
                self._is_known = False
            case Put(headers=headers) if self._is_known:
                self._num_unanswered += len(headers)
                # A wrong number of payloads is one refusal, however many trajectories it names.
                self.must_be_refused += len(headers) != len(frames) - 1

    def _read(self) -> None:
        while self._socket.poll(2):
            message: Message = decode(self._socket.recv_multipart()[0], AnyMessage)  # type: ignore[arg-type]
            match message:
                case Ack(ids=ids):
                    self.acknowledged |= set(ids)
                    self._num_unanswered -= len(ids)
                case Nack():
                    self._note(message)

    def _note(self, nack: Nack) -> None:
        assert nack.is_fatal, nack
        reason = nack.reason.partition(":")[0]
        self.reasons[reason] += 1
        if reason == UNREADABLE:
            # Of a message that was foreseen to be refused as a whole; whether ids can be read in it is luck.
            return
        self._num_unanswered -= 1
        self._last_nacked = nack.id
        self.must_be_refused += reason != "frame_count"


def _read_as_broker(frames: Frames) -> Message:
    """Raises RecordRefusedError where the whole message must be refused."""
    if len(frames[0]) > MAX_MESSAGE_BYTES:
        raise RecordRefusedError("oversized", "")
    message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    if len(frames) > 1 and not isinstance(message, Put):
        raise RecordRefusedError("frame_count", "")
    return message
