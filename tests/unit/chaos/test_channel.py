"""A misbehaving channel offers copies with distinguishable answers."""

import random
from collections import Counter
from pathlib import Path

import pytest

from slipstream.broker.messages import Ack, Put
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.buffer.codec import encode
from tests.builders import make_packed
from tests.chaos.watched import channel as watched
from tests.chaos.watched.channel import UNKNOWN_GROUP, WatchedChannel
from tests.chaos.watched.journal import Journal, read_journals


@pytest.fixture
def channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedChannel:
    # A channel without a socket drops its messages.
    monkeypatch.setattr(ZmqClientChannel, "__init__", lambda channel: None)
    monkeypatch.setattr(ZmqClientChannel, "send", lambda channel, frames: None)
    monkeypatch.setattr(WatchedChannel, "journal", Journal(tmp_path, "generator-1"), raising=False)
    monkeypatch.setattr(watched, "_OFFERED", 0.5)
    made = WatchedChannel()
    made._random = random.Random(0)
    return made


def test_no_name_of_a_known_group_is_offered_twice(
    channel: WatchedChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for group in range(60):
        packed = [make_packed(str(group), attempt=attempt) for attempt in range(3)]
        for header, payload in packed:
            channel.send([encode(Put([header])), payload])
        monkeypatch.setattr(channel, "misbehaves", True)
        # In either order.
        for header, _ in packed[:: 1 if group % 2 else -1]:
            channel._hear(Ack([header.id]))
        monkeypatch.setattr(channel, "misbehaves", False)
    (life,) = read_journals(tmp_path)
    offers = life.of("offered")
    assert {offer["what"] for offer in offers} == {"same", "conflict", "again", "unknown"}
    names = Counter(offer["id"] for offer in offers if offer["group"] != UNKNOWN_GROUP)
    assert max(names.values()) == 1
