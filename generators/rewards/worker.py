"""python -m slipstream.generators.rewards.worker FD: the process that calls the reward function, one sample after the other.

Consumes: a Job, then RewardInputs, from the socket that FD is. Produces: a Reward for each, in order.
Waits for: its pool. It may be killed at any moment: it holds nothing.
"""

import signal
import socket
import struct
import sys
from collections.abc import Iterator

import msgspec

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, evaluate, load_reward
from slipstream.runtime.process import die_with_parent

# @@ Frames between a reward pool and its workers: a length of four bytes, then MessagePack.
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Job(msgspec.Struct):
    """A worker's first frame: which function it serves. Example: Job("my_rewards:score", {"strictness": 2})."""

    function: str
    """Dotted path."""
    arguments: dict
    """Keyword arguments bound to it."""


decode_job = msgspec.msgpack.Decoder(Job).decode
decode_sample = msgspec.msgpack.Decoder(RewardInput).decode
decode_reply = msgspec.msgpack.Decoder(Reward | None).decode
"""One reply per sample, in order; before them None, once, which means that the worker is ready."""


def frame(record: Job | RewardInput | Reward | None) -> bytes:
    """A record as one frame."""
    body = _encode(record)
    return _LENGTH.pack(len(body)) + body


class FrameCutter:
    """Cuts a byte stream, fed in pieces of any size, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that `data` completes."""
        self._pending += data
        start = 0
        while (body_start := start + _LENGTH.size) <= len(self._pending):
            end = body_start + _LENGTH.unpack_from(self._pending, start)[0]
            if end > len(self._pending):
                break
            yield bytes(self._pending[body_start:end])
            start = end
        del self._pending[:start]


_READ_BYTES = 1 << 16


def main(fd: int) -> None:
    """Serve until the pool closes the socket."""
    _die_with_parent()
    with socket.socket(fileno=fd) as pool:
        bodies = _receive(pool)
        first = next(bodies, None)
        if first is None:  # the pool closed before it had anything to score
            return
        job = decode_job(first)
        function = load_reward(job.function, job.arguments)
        pool.sendall(frame(None))
        for body in bodies:
            pool.sendall(frame(evaluate(function, decode_sample(body))))


def _receive(pool: socket.socket) -> Iterator[bytes]:
    cutter = FrameCutter()
    while data := pool.recv(_READ_BYTES):
        yield from cutter.feed(data)


def _die_with_parent() -> None:
    # A worker stuck in a reward function does not see the socket close: the kernel has to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
