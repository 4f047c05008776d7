"""A shelf read over ZeroMQ: whatever happens on the way, what arrives is right, or there is one clear error in time."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.transport.channels import Frames
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshot_store import SnapshotStore
from slipstream.broker.weights.stream import CHUNK_BYTES, CHUNKS_AHEAD, StreamServer, WeightStream
from tests.unit.broker.weight_versions import make_slots, make_version

PATIENCE_S = 20.0
STALL_S = 0.3
COLUMNS = 2**19
"""Of four rows of two bytes each: three buckets of 4 MiB, 16 chunks each."""
BUCKET_BYTES = 8 * COLUMNS

Meddle = Callable[[int, Frames], Frames | None]
"""Given the number of an arrival and its frames, what arrives in their place; None: nothing does."""


class Meddler:
    """A client channel on a bad line. Fulfils ClientChannel; also knows what was asked and what came."""

    def __init__(self, address: str, meddle: Meddle) -> None:
        self._channel = ZmqClientChannel(address, max_message_bytes=2 * CHUNK_BYTES)
        self._meddle = meddle
        self.num_sent = 0
        self.num_arrived = 0
        self.most_ahead = 0
        self._num_since = 0

    def send(self, frames: Frames) -> None:
        self.num_sent += 1
        self._num_since += 1
        self.most_ahead = max(self.most_ahead, self._num_since)
        self._channel.send(frames)

    def receive(self, *, timeout_s: float) -> Frames | None:
        frames = self._channel.receive(timeout_s=timeout_s)
        if frames is None:
            return None
        self.num_arrived += 1
        self._num_since -= 1
        return self._meddle(self.num_arrived, frames)

    def wake(self) -> None:
        self._channel.wake()

    def reconnect(self) -> None:
        self._num_since = 0
        self._channel.reconnect()

    def close(self) -> None:
        self._channel.close()


def untouched(_number: int, frames: Frames) -> Frames:
    return frames


@pytest.fixture
def shelf(tmp_path: Path) -> SnapshotStore:
    filled = SnapshotStore(tmp_path / "weights")
    filled.put(*make_version(12, num_columns=COLUMNS))
    return filled


@pytest.fixture
def server(shelf: SnapshotStore) -> Iterator[StreamServer]:
    lending = StreamServer(shelf)
    yield lending
    lending.close()


def address_of(server: StreamServer) -> str:
    host, port = server.address
    return f"tcp://{host}:{port}"


def fetch_over(server: StreamServer, meddle: Meddle) -> tuple[WeightStream, Meddler]:
    """The whole version over a line like this; what arrived is right."""
    channel = Meddler(address_of(server), meddle)
    stream = WeightStream(address_of(server), channel=channel, stall_s=STALL_S)
    update, packed = make_version(12, num_columns=COLUMNS)
    holding = HostWeights()
    try:
        holding.update_to(stream, 12, slots=update.slots, with_deltas=False, timeout_s=PATIENCE_S)
    finally:
        stream.close()
    assert all(torch.equal(got, wanted) for got, wanted in zip(holding.tensors, packed, strict=True))
    return stream, channel


def test_a_version_arrives_with_few_chunks_ahead(server: StreamServer) -> None:
    stream, channel = fetch_over(server, untouched)
    assert stream.num_resumed == 0
    assert channel.num_sent == 3 * BUCKET_BYTES // CHUNK_BYTES + 2
    assert channel.most_ahead <= CHUNKS_AHEAD


def test_a_damaged_chunk_is_asked_for_again(server: StreamServer) -> None:
    def damage(number: int, frames: Frames) -> Frames:
        return [frames[0], b"\xff" + frames[1][1:]] if number in (7, 21) else frames

    stream, _ = fetch_over(server, damage)
    assert stream.num_resumed == 2


@pytest.mark.parametrize("nonsense", [[], [b""], [b"nonsense"], [b"\x80", b""]])
def test_nonsense_is_not_taken(server: StreamServer, nonsense: Frames) -> None:
    stream, _ = fetch_over(server, lambda number, frames: nonsense if number == 7 else frames)
    assert stream.num_resumed == 1


def test_what_was_lost_is_asked_for_again_from_the_last_good_byte(server: StreamServer) -> None:
    stream, channel = fetch_over(server, lambda number, frames: None if number == 10 else frames)
    assert stream.num_resumed == 1
    # What was good is not sent twice: only what was asked for ahead.
    assert channel.num_sent <= 3 * BUCKET_BYTES // CHUNK_BYTES + 2 + CHUNKS_AHEAD


def test_a_server_that_is_replaced_on_the_way_goes_unnoticed_but_for_the_wait(shelf: SnapshotStore) -> None:
    servers = [StreamServer(shelf)]
    port = servers[0].address[1]

    def replace(number: int, frames: Frames) -> Frames:
        if number == 20:
            servers[0].close()
            servers.append(StreamServer(shelf, port=port))
        return frames

    try:
        stream, _ = fetch_over(servers[0], replace)
    finally:
        servers[-1].close()
    assert len(servers) == 2
    assert stream.num_resumed <= 4


def test_a_line_that_damages_everything_is_given_up(server: StreamServer) -> None:
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"bucket-0000\.bin .* got 0 of 4194304 bytes, then 6 damaged chunks"):
        fetch_over(server, lambda number, frames: frames if number <= 2 else [frames[0], bytes(10)])
    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_server_that_falls_silent_is_given_up_in_time(server: StreamServer) -> None:
    stream = WeightStream(
        address_of(server),
        channel=Meddler(address_of(server), lambda number, frames: frames if number <= 9 else None),
        stall_s=STALL_S,
    )
    into = memoryview(bytearray(BUCKET_BYTES))
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"got 2359296 of 4194304 bytes, then nothing more in time"):
        stream.read_into(12, "bucket-0000.bin", into, timeout_s=1.0)
    assert time.monotonic() - started < 5.0
    stream.close()


def test_nobody_there_is_one_clear_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stream = WeightStream(f"tcp://127.0.0.1:{port}")
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=f"127.0.0.1:{port} must answer within 0.5 s, got nothing"):
        stream.find("ab", timeout_s=0.5)
    assert time.monotonic() - started < 5.0
    stream.close()


def test_after_a_fault_the_stream_goes_on(server: StreamServer) -> None:
    stream = WeightStream(address_of(server), stall_s=STALL_S)
    with pytest.raises(WeightTransferError, match=r"must have 10 bytes, got 4194304"):
        stream.read_into(12, "bucket-0000.bin", memoryview(bytearray(10)), timeout_s=PATIENCE_S)
    with pytest.raises(WeightTransferError, match=r"must be on the shelf"):
        stream.read(11, "manifest.json", timeout_s=PATIENCE_S)
    with pytest.raises(WeightTransferError, match="must be asked for"):
        stream.read(12, "../../secret", timeout_s=PATIENCE_S)
    assert b'"version":12' in stream.read(12, "manifest.json", timeout_s=PATIENCE_S)
    stream.close()


def test_a_server_outlives_nonsense(server: StreamServer) -> None:
    channel = ZmqClientChannel(address_of(server), max_message_bytes=2 * CHUNK_BYTES)
    beyond = {"type": "ReadChunk", "version": 12, "name": "bucket-0000.bin", "offset": 2**63, "num_bytes": 1}
    far = msgspec.msgpack.encode(beyond)
    for frames in ([b""], [b"nonsense"], [b"\xc1" * 1000], [b"", b"", b""], [far]):
        channel.send(frames)
    assert channel.receive(timeout_s=0.2) is None
    channel.close()
    fetch_over(server, untouched)


def test_a_port_in_use_is_named(server: StreamServer, shelf: SnapshotStore) -> None:
    port = server.address[1]
    with pytest.raises(WeightTransferError, match=f"must be a loopback address .* got 127.0.0.1:{port}"):
        StreamServer(shelf, port=port)


def test_other_machines_are_not_listened_to(shelf: SnapshotStore) -> None:
    with pytest.raises(WeightTransferError, match=r"must be a loopback address .* got 0\.0\.0\.0"):
        StreamServer(shelf, host="0.0.0.0")


def test_a_peer_that_has_the_version_may_lend_it_out(server: StreamServer, tmp_path: Path) -> None:
    update, _ = make_version(12, num_columns=COLUMNS)
    holding, own = HostWeights(), SnapshotStore(tmp_path / "peer")
    stream = WeightStream(address_of(server))
    holding.update_to(stream, 12, slots=make_slots(num_columns=COLUMNS)[0], with_deltas=False, timeout_s=PATIENCE_S)
    stream.close()
    own.put(update, holding.tensors)
    peer = StreamServer(own)
    try:
        fetch_over(peer, untouched)
    finally:
        peer.close()
