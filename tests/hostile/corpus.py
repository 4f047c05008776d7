"""Corpus of valid messages that mutations start from."""

import random
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
from slipstream.buffer.codec import Packed, encode, pack
from slipstream.buffer.trajectory import VersionSpan
from tests.builders import make_packed, make_trajectory
from tests.hostile.target import GROUP_SIZE

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
