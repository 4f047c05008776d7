"""Attacker: sends arbitrary frames over a raw socket and predicts how a correct broker answers them."""

import time
from collections import Counter
from collections.abc import Callable

import zmq

from slipstream.broker.messages import UNREADABLE, Ack, AnyMessage, Bye, Frames, Hello, Message, Nack, Put
from slipstream.broker.transport.zmq_channels import in_pieces
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import SCHEMA_VERSION
from tests.builders import make_packed
from tests.fakes import KEYS
from tests.hostile.good_peer import MAX_MESSAGE_BYTES

_TIMEOUT_S = 60.0
_FIRST_SENTINEL = 10**9
"""Id of a group that is never admitted: its Nack shows that the broker has handled all earlier frames."""


class Attacker:
    """Counts exactly the refusals that its frames must cause."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._connect()
        self._is_known = False
        self._num_unanswered = 0
        self._next_sentinel = _FIRST_SENTINEL
        self._last_nacked = ""
        self.expected_refusals = 0
        """Sum of the store's refusal counters that the sent frames must produce."""
        self.kinds: Counter[str] = Counter()
        """Sent frames by refusal reason if they are undecodable, else by message type."""
        self.reasons: Counter[str] = Counter()
        """Received Nacks by reason."""
        self.acknowledged: set[str] = set()
        """Ids of acknowledged trajectories."""

    def send(self, frames: Frames) -> None:
        """Send frames and record the expected answers."""
        self._predict(frames)
        self._socket.send_multipart(in_pieces(frames))

    def send_far_oversized(self) -> None:
        """Send a frame that makes libzmq close the connection, on a separate one."""
        connection = self._connect()
        connection.send(bytes(3 * MAX_MESSAGE_BYTES))
        connection.close(linger=500)

    def await_answers(self, meanwhile: Callable[[], None]) -> None:
        """Block until the broker has answered everything sent so far, calling `meanwhile` repeatedly."""
        # A step sends Nacks before Acks: only an answer from a later step follows all of them.
        for _ in range(2):
            sentinel = self._send_sentinel()
            deadline = time.monotonic() + _TIMEOUT_S
            while self._last_nacked != sentinel:
                assert time.monotonic() < deadline, "the broker must answer"
                meanwhile()
                self._read()
        assert self._num_unanswered == 0, f"every trajectory must be answered, got {self._num_unanswered} that are not"

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _connect(self) -> zmq.Socket:
        opened = self._context.socket(zmq.DEALER)
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.RCVHWM, 0)
        opened.curve_serverkey, opened.curve_publickey = KEYS.server_public, KEYS.client_public
        opened.curve_secretkey = KEYS.client_secret
        opened.connect(self._address)
        return opened

    def _send_sentinel(self) -> str:
        self._next_sentinel += 1
        header, payload = make_packed(str(self._next_sentinel))
        self.send([encode(Hello("generator", "hostile", "1", "nowhere", 1))])
        self.send([encode(Put([header])), payload])
        return header.id

    def _predict(self, frames: Frames) -> None:
        try:
            message = _read_as_broker(frames)
        except RecordRefusedError as refusal:
            self.kinds[refusal.reason] += 1
            self.expected_refusals += 1
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
                self.expected_refusals += len(headers) != len(frames) - 1

    def _read(self) -> None:
        while self._socket.poll(2):
            message: Message = decode(self._socket.recv_multipart()[0], AnyMessage)  # type: ignore[arg-type]
            match message:
                case Ack(ids=ids):
                    self.acknowledged |= set(ids)
                    self._num_unanswered -= len(ids)
                case Nack():
                    self._record(message)

    def _record(self, nack: Nack) -> None:
        assert nack.is_fatal, nack
        reason = nack.reason.partition(":")[0]
        self.reasons[reason] += 1
        if reason == UNREADABLE:
            # The message counts as one predicted refusal; its readable ids are not predictable.
            return
        self._num_unanswered -= 1
        self._last_nacked = nack.id
        self.expected_refusals += reason != "frame_count"


def _read_as_broker(frames: Frames) -> Message:
    """Decode a message like the broker. Raises RecordRefusedError if the broker must refuse the whole message."""
    if len(frames[0]) > MAX_MESSAGE_BYTES:
        raise RecordRefusedError("oversized", "")
    message: Message = decode(frames[0], AnyMessage)  # type: ignore[arg-type]
    if len(frames) > 1 and not isinstance(message, Put):
        raise RecordRefusedError("frame_count", "")
    return message
