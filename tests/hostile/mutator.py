"""Mutator: turns valid frames into frames that a careless, broken or hostile peer might send."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from slipstream.broker.messages import (
    Bye,
    EpochOpened,
    Frames,
    Hello,
    LeaseRequest,
    LenderError,
    Member,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    ReturnLeases,
    TensorSlot,
    Update,
    UpdateApplied,
)
from slipstream.buffer.codec import Packed, checksum, encode, pack
from slipstream.buffer.trajectory import VersionSpan
from tests.builders import make_packed, make_trajectory
from tests.hostile.good_peer import GROUP_SIZE, MAX_MESSAGE_BYTES

_ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308, float("nan"),
    float("-inf"), "", "x", "x" * 5000, "\0", "0-0", b"", b"\xff" * 48, [], [[]], {}, {"a": {"b": [1]}},
    ["int32", [], b"\0\0\0\0"], ["float32", [12], b"\0\0\xc0\x7f" * 12], ["float64", [12], b"\0" * 96],
    ["int32", [2**31 - 1] * 3, b""], ["int32", [1] * 100, b"\0\0\0\0"], ["bool", [12], b"\2" * 12],
    ["object", [1], b"\0" * 8], msgspec.msgpack.Ext(5, b"x"), msgspec.msgpack.Ext(-1, b"\0\0\0\1"),
]  # fmt: skip
_NAN, _INF, _ONE = b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\0\0\x80\x3f"
_WELL_TYPED: list[tuple[str, Any]] = [
    ("generator_logprobs", ["float32", [12], _NAN * 12]),
    ("generator_logprobs", ["float32", [12], _INF + bytes(44)]),
    ("generator_logprobs", ["float32", [12], _ONE * 12]),
    ("generator_logprobs", ["float32", [11], bytes(44)]),
    ("generator_logprobs", ["float64", [12], bytes(96)]),
    ("generator_logprobs", ["float32", [12], bytes(47)]),
    ("model_mask", ["bool", [12], bytes(12)]),
    ("model_mask", ["bool", [], b"\1"]),
    ("model_mask", ["uint8", [12], b"\1" * 12]),
    ("token_ids", ["int32", [], bytes(4)]),
    ("token_ids", ["int32", [0], b""]),
    ("token_ids", ["int32", [2, 6], bytes(48)]),
    ("token_ids", ["int32", [12], b"\xff" * 48]),
    ("version_spans", []),
    ("version_spans", [[12, 0]]),
    ("version_spans", [[6, -1]]),
    ("version_spans", [[6, 2**64 - 1]]),
    ("version_spans", [[2**64 - 1, 0]]),
    ("reward", {"total": float("nan")}),
    ("reward", {"total": 1e300}),
    ("reward", {"total": 0.5, "parts": {"a": float("inf")}}),
    ("sampling", {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 6, "seed": 2**64 - 1}),
    ("num_turns", 2**63),
    ("started_at", float("inf")),
    ("extras", {"a": {1: 2}}),
    ("extras", {"a": msgspec.msgpack.Ext(-1, b"\0\0\0\1")}),
    ("data_source", "\0" * 1000),
    ("id", "0-0-1"),
    ("attempt", -1),
]
"""Values of the right type that violate other rules for a field of a trajectory."""
_BOMBS = [
    b"\x91" * 40_000,
    b"\x81\xa1a" * 15_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x82\xa4type\xa4Pong\xa6gauges\x81\xa1a\xdd\xff\xff\xff\xff",
    b"\x82\xa4type\xa4Pong\xa6gauges\x81\xa1a" + b"\x91" * 40_000,
    b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
]
_PLACEHOLDER = b"\xac<nested-bomb"


class Mutator:
    """Deterministic: the same seed and valid frames give the same mutations."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness

    def mutate(self, frames: Frames) -> Frames:
        """Change bytes of a frame, remove or add frames, or change the type or value of a field."""
        kind = self._random.choice(
            [self._change_bytes, self._change_frames, self._change_message, self._change_payload]
        )
        return kind(list(frames))

    def _change_bytes(self, frames: Frames) -> Frames:
        index = self._random.randrange(len(frames))
        changes: list[Callable[[bytes], bytes]] = [
            self._truncate,
            self._flip_bits,
            self._insert_noise,
            self._repeat_slice,
            self._make_too_large,
            lambda frame: self._random.choice(_BOMBS),
            lambda frame: self._random.randbytes(self._random.randint(0, 200)),
        ]
        weights = [4, 8, 4, 4, 1, 2, 2]
        frames[index] = self._random.choices(changes, weights)[0](frames[index])
        return frames

    def _truncate(self, frame: bytes) -> bytes:
        return frame[: self._random.randint(0, len(frame))]

    def _flip_bits(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self._random.randint(1, 8)):
            if changed:
                changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _insert_noise(self, frame: bytes) -> bytes:
        index = self._random.randint(0, len(frame))
        return frame[:index] + self._random.randbytes(self._random.randint(1, 16)) + frame[index:]

    def _repeat_slice(self, frame: bytes) -> bytes:
        start, end = sorted(self._random.randint(0, len(frame)) for _ in range(2))
        return frame[:end] + frame[start:]

    def _make_too_large(self, frame: bytes) -> bytes:
        return frame + bytes(MAX_MESSAGE_BYTES + 1 - len(frame))

    def _change_frames(self, frames: Frames) -> Frames:
        index = self._random.randrange(len(frames))
        changes: list[Callable[[], Frames]] = [
            lambda: frames[:index] + frames[index + 1 :] or [b""],
            lambda: [*frames, self._random.choice(frames)],
            lambda: frames[::-1],
            lambda: frames + [b""] * self._random.randint(1, 50),
        ]
        return self._random.choice(changes)()

    def _change_message(self, frames: Frames) -> Frames:
        frames[0] = self._change_value(frames[0])
        return frames

    def _change_payload(self, frames: Frames) -> Frames:
        """Change a payload and make its header match, so that the broker checks the payload itself."""
        if len(frames) == 1:
            return self._change_message(frames)
        index = self._random.randrange(len(frames) - 1)
        change = self._random.choice([self._change_value, self._spoil])
        payload = change(frames[index + 1])
        put = msgspec.msgpack.decode(frames[0])
        put["headers"][index] |= {"checksum": checksum(payload), "payload_bytes": len(payload)}
        return [msgspec.msgpack.encode(put), *frames[1 : index + 1], payload, *frames[index + 2 :]]

    def _spoil(self, payload: bytes) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | dict([self._random.choice(_WELL_TYPED)]))

    def _change_value(self, frame: bytes) -> bytes:
        decoded = msgspec.msgpack.decode(frame)
        container: Any = decoded
        while True:
            key = self._random.choice(_keys(container))
            inner = container[key]
            if not (isinstance(inner, dict | list) and inner) or self._random.random() < 0.3:
                break
            container = inner
        self._replace(container, key)
        bomb = self._random.choice([b"\x91" * 40_000 + b"\xc0", b"\x81\xa1a" * 15_000 + b"\xc0"])
        return msgspec.msgpack.encode(decoded).replace(_PLACEHOLDER, bomb)

    def _replace(self, container: Any, key: Any) -> None:
        chance = self._random.random()
        if chance < 0.1:
            del container[key]
        elif chance < 0.2 and isinstance(container, dict):
            container["surprise"] = self._random.choice(_ODD_VALUES)
        elif chance < 0.25:
            container[key] = _PLACEHOLDER[1:].decode()
        else:
            container[key] = self._random.choice(_ODD_VALUES)


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


_MEMBER = Member("hostile", "1")


def some_valid(randomness: random.Random, stored: list[Packed]) -> Frames:
    """Build a message that the wire format allows and that must not change the store.

    What it says about the trajectories in `stored` is known already, contradicts the store, or concerns another peer.
    """
    return randomness.choice([_puts, _puts, _puts, _others])(randomness, stored)


def _puts(randomness: random.Random, stored: list[Packed]) -> Frames:
    packed = [randomness.choice(_TRAJECTORIES)(randomness, stored) for _ in range(randomness.randint(1, 4))]
    return [encode(Put([header for header, _ in packed])), *(payload for _, payload in packed)]


def _repeat(randomness: random.Random, stored: list[Packed]) -> Packed:
    return randomness.choice(stored)


def _other_content(randomness: random.Random, stored: list[Packed]) -> Packed:
    header, _ = randomness.choice(stored)
    return _packed(header.group_id, header.index, generator_logprobs=np.full(12, -randomness.random(), np.float32))


def _unknown_group(randomness: random.Random, stored: list[Packed]) -> Packed:
    group_id = randomness.choice(["1000000", "-1", "x", "", "0:0", "9" * 40, "{target}:run", "1e3", "00"])
    return _packed(group_id, 0)


def _unknown_lease(randomness: random.Random, stored: list[Packed]) -> Packed:
    return _packed("63", randomness.randrange(GROUP_SIZE), attempt=randomness.choice([1, 2**40]))


def _from_the_future(randomness: random.Random, stored: list[Packed]) -> Packed:
    return _packed("63", 0, version_spans=[VersionSpan(6, randomness.choice([1, 2**31, 2**53]))])


def _evaluation(randomness: random.Random, stored: list[Packed]) -> Packed:
    trajectory = make_trajectory(randomness.choice(["0", "0:0", "e:1"]), 0)
    purpose = randomness.choice(["sampled", "greedy"])
    return pack(trajectory, lease_id=f"{trajectory.group_id}-0", purpose=purpose, group_size=1)


_TRAJECTORIES = [_repeat, _other_content, _unknown_group, _unknown_lease, _from_the_future, _evaluation]


def _packed(group_id: str, index: int, **overrides: Any) -> Packed:
    return make_packed(group_id, index, group_size=GROUP_SIZE, **overrides)


def _others(randomness: random.Random, stored: list[Packed]) -> Frames:
    leases = [header.lease_id for header, _ in randomness.sample(stored, min(3, len(stored)))]
    slot = TensorSlot("w", [2, 2], "float32", 0, 0)
    messages: list[msgspec.Struct] = [
        Hello("generator", "hostile", "1", "nowhere", 1),
        LeaseRequest(randomness.randint(1, 2**20)),
        ReturnLeases([*leases, "1000000-0", "63-0"], "test"),
        Pong(0.0, "ready", 0, gauges={"a": 1, "b": "c"}, lease_ids=leases, lends_at="tcp://127.0.0.1:9"),
        Ping(0.0),
        OpenEpoch(1, [Member("good", "good-1")], "127.0.0.1", 1, 1.0),
        Update(1, [Member("good", "good-1")], 7, [slot], [16], [1], [[1, 2]], [[-1.0]], 0.1, 1.0),
        EpochOpened(1, _MEMBER),
        UpdateApplied(1, 7, _MEMBER, lender_errors=[LenderError("tcp://127.0.0.1:9", "it lies", is_altered=True)]),
        Bye(),
    ]
    return [encode(randomness.choice(messages))]
