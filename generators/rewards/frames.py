"""Frames between a reward pool and its workers: a length of four bytes, then MessagePack."""

import struct
from collections.abc import Iterator

import msgspec

from buffer.trajectory import Reward
from generators.rewards.reward import RewardInput

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
