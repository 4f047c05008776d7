import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Frames
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
from slipstream.broker.weights.stream import CHUNK_BYTES, CHUNKS_AHEAD, StreamServer, WeightStream
from tests.fakes import KEYS
from tests.unit.broker.weight_versions import make_version

TIMEOUT_S = 20.0
STALL_S = 0.3
COLUMNS = 2**19
"""Columns of four rows of two bytes: three buckets of 4 MiB, 16 chunks each."""
BUCKET_BYTES = 8 * COLUMNS

Disturb = Callable[[int, Frames], Frames | None]
"""(number of the message, its frames) -> frames that arrive instead; None drops the message."""


class DisturbedChannel:
    """A client channel with faults in transit, which counts messages. Implements ClientChannel."""

    def __init__(self, address: str, disturb: Disturb) -> None:
        self._channel = ZmqClientChannel(address, keys=KEYS, max_message_bytes=2 * CHUNK_BYTES)
        self._disturb = disturb
        self.num_sent = 0
        self.num_received = 0
        self.max_ahead = 0
        self._num_pending = 0

    def send(self, frames: Frames) -> None:
        self.num_sent += 1
        self._num_pending += 1
        self.max_ahead = max(self.max_ahead, self._num_pending)
        self._channel.send(frames)

    def receive(self, *, timeout_s: float) -> Frames | None:
        frames = self._channel.receive(timeout_s=timeout_s)
        if frames is None:
            return None
        self.num_received += 1
        self._num_pending -= 1
        return self._disturb(self.num_received, frames)

    def wake(self) -> None:
        self._channel.wake()

    def reconnect(self) -> None:
        self._num_pending = 0
        self._channel.reconnect()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def snapshot_store(tmp_path: Path) -> SnapshotStore:
    filled = SnapshotStore(tmp_path / "weights")
    filled.put(*make_version(12, num_columns=COLUMNS))
    return filled


@pytest.fixture
def server(snapshot_store: SnapshotStore, tmp_path: Path) -> Iterator[StreamServer]:
    started = StreamServer(snapshot_store, keys=KEYS, address=f"ipc://{tmp_path}/weights.sock")
    yield started
    started.close()


def fetch_over(server: StreamServer, disturb: Disturb) -> tuple[WeightStream, DisturbedChannel]:
    channel = DisturbedChannel(server.address, disturb)
    stream = WeightStream(server.address, keys=KEYS, channel=channel, stall_s=STALL_S)
    update, packed = make_version(12, num_columns=COLUMNS)
    weights = HostWeights()
    try:
        weights.update_to(stream, Manifest.of(update), with_deltas=False, timeout_s=TIMEOUT_S)
    finally:
        stream.close()
    assert all(torch.equal(got, expected) for got, expected in zip(weights.tensors, packed, strict=True))
    return stream, channel


def damaged(frames: Frames) -> Frames:
    return [frames[0], b"\xff" + frames[1][1:]]


@pytest.mark.parametrize(
    "disturb",
    [damaged, lambda _: None, *(lambda _, bad=bad: bad for bad in ([], [b""], [b"nonsense"], [b"\x80", b""]))],
)
def test_a_damaged_lost_or_malformed_chunk_resumes_after_the_last_good_byte(server, disturb):
    stream, channel = fetch_over(server, lambda number, frames: disturb(frames) if number in (7, 30) else frames)
    assert stream.num_resumed == 2
    # Verified bytes are not sent twice: only the chunks requested ahead.
    assert channel.num_sent <= 3 * BUCKET_BYTES // CHUNK_BYTES + 2 * CHUNKS_AHEAD


def test_a_restarted_server_only_delays_the_transfer(snapshot_store: SnapshotStore) -> None:
    servers = [StreamServer(snapshot_store, keys=KEYS)]
    address = servers[0].address

    def replace(number: int, frames: Frames) -> Frames:
        if number == 20:
            servers[0].close()
            servers.append(StreamServer(snapshot_store, keys=KEYS, address=address))
        return frames

    try:
        stream, _ = fetch_over(servers[0], replace)
    finally:
        servers[-1].close()
    assert len(servers) == 2
    assert stream.num_resumed <= 4


def test_a_channel_that_damages_everything_fails(server: StreamServer) -> None:
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"bucket-0000\.bin .* got 0 of 4194304 bytes, then 6 damaged chunks"):
        fetch_over(server, lambda number, frames: [frames[0], bytes(10)])
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_a_silent_server_fails_in_time(server: StreamServer) -> None:
    channel = DisturbedChannel(server.address, lambda number, frames: frames if number <= 9 else None)
    stream = WeightStream(server.address, keys=KEYS, channel=channel, stall_s=STALL_S)
    into = memoryview(bytearray(BUCKET_BYTES))
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"got 2359296 of 4194304 bytes, then nothing more in time"):
        stream.read_into(12, "bucket-0000.bin", into, timeout_s=1.0)
    assert time.monotonic() - started < 5.0
    stream.close()


def test_a_missing_server_fails_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stream = WeightStream(f"tcp://127.0.0.1:{port}", keys=KEYS)
    started = time.monotonic()
    with pytest.raises(WeightTransferError, match=f"127.0.0.1:{port} must answer within 0.5 s, got nothing"):
        stream.find("ab", timeout_s=0.5)
    assert time.monotonic() - started < 5.0
    stream.close()


def test_after_an_error_the_stream_continues(server: StreamServer) -> None:
    stream = WeightStream(server.address, keys=KEYS, stall_s=STALL_S)
    with pytest.raises(WeightTransferError, match=r"must have 10 bytes, got 4194304"):
        stream.read_into(12, "bucket-0000.bin", memoryview(bytearray(10)), timeout_s=TIMEOUT_S)
    with pytest.raises(WeightTransferError, match=r"must be in the snapshot store"):
        stream.read(11, "manifest.json", timeout_s=TIMEOUT_S)
    with pytest.raises(WeightTransferError, match="must match"):
        stream.read(12, "../../secret", timeout_s=TIMEOUT_S)
    assert b'"version":12' in stream.read(12, "manifest.json", timeout_s=TIMEOUT_S)
    stream.close()


def test_a_server_survives_malformed_requests_and_a_version_arrives_with_few_chunks_ahead(server: StreamServer) -> None:
    channel = ZmqClientChannel(server.address, keys=KEYS, max_message_bytes=2 * CHUNK_BYTES)
    beyond = {"type": "ReadChunk", "version": 12, "name": "bucket-0000.bin", "offset": 2**63, "num_bytes": 1}
    far = msgspec.msgpack.encode(beyond)
    for frames in ([b""], [b"nonsense"], [b"\xc1" * 1000], [b"", b"", b""], [far]):
        channel.send(frames)
    assert channel.receive(timeout_s=0.2) is None
    channel.close()
    stream, disturbed = fetch_over(server, lambda _, frames: frames)
    assert stream.num_resumed == 0
    assert disturbed.num_sent == 3 * BUCKET_BYTES // CHUNK_BYTES
    assert disturbed.max_ahead <= CHUNKS_AHEAD


def test_only_free_loopback_addresses_are_served(server: StreamServer, snapshot_store: SnapshotStore) -> None:
    with pytest.raises(
        WeightTransferError, match=f"weights.fetch_address must be free to bind, got {server.address}: .* the learner"
    ):
        StreamServer(snapshot_store, keys=KEYS, address=server.address)
    with pytest.raises(WeightTransferError, match=r"weights\.fetch_address must be a loopback .* got tcp://0\.0\.0\.0"):
        StreamServer(snapshot_store, keys=KEYS, address="tcp://0.0.0.0:*")
