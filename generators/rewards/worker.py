"""python -m slipstream.generators.rewards.worker FD: a process that scores one sample after the other.

Consumes: a Job, then RewardInputs, from socket FD.
Produces: one Reward per sample, in order.
Waits for: its pool. It holds no state and may be killed at any moment.
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

# --- frames: four bytes of length, then MessagePack ------------------------------------------------------------------
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Job(msgspec.Struct):
    """A worker's first frame: its reward function. Example: Job("my_rewards:score", {"strictness": 2})."""

    function: str
    """Import path of the reward function, `module:function`."""
    arguments: dict


decode_job = msgspec.msgpack.Decoder(Job).decode
decode_sample = msgspec.msgpack.Decoder(RewardInput).decode
decode_reply = msgspec.msgpack.Decoder(Reward | None).decode
"""One reply per sample, in order; preceded by one None once the worker is ready."""


def frame(record: Job | RewardInput | Reward | None) -> bytes:
    """Encode a record as one frame."""
    body = _encode(record)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream, fed in chunks of any size, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that `data` completes."""
        self._pending += data
        start = 0
        while (body_start := start + _LENGTH.size) <= len(self._pending):
            end = body_start + _LENGTH.unpack_from(self._pending, start)[0]
            if end > len(self._pending):
                break
            yield bytes(self._pending[body_start:end])
            start = end
        del self._pending[:start]


# --- the process -----------------------------------------------------------------------------------------------------
_READ_BYTES = 1 << 16


def main(fd: int) -> None:
    """Serve until the pool closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker stuck in a reward function does not see the socket close: the kernel must end it.
    die_with_parent(signal.SIGKILL)
    with socket.socket(fileno=fd) as pool:
        bodies = _receive(pool)
        first = next(bodies, None)
        if first is None:
            # The pool closed before it had anything to score.
            return
        job = decode_job(first)
        function = load_reward(job.function, job.arguments)
        # Ready: the import above may have taken long, and the time limit of samples must not include it.
        pool.sendall(frame(None))
        for body in bodies:
            pool.sendall(frame(evaluate(function, decode_sample(body))))


def _receive(pool: socket.socket) -> Iterator[bytes]:
    decoder = FrameDecoder()
    while data := pool.recv(_READ_BYTES):
        yield from decoder.feed(data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
