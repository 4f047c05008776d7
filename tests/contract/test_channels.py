"""Contract of every channel, over deques, unix sockets and loopback TCP; then properties of sockets only."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from slipstream.broker.errors import ChannelClosedError
from slipstream.broker.messages import Frames
from slipstream.broker.transport.channels import ClientChannel, MemoryBroker, ServerChannel
from slipstream.broker.transport.endpoints import CURVE_GREETING
from slipstream.broker.transport.zmq_channels import (
    HIGH_WATER_MARK,
    PIECE_BYTES,
    ZmqClientChannel,
    ZmqServerChannel,
    in_pieces,
)
from slipstream.runtime.credentials import Keys, derive_keys, guest_token
from tests.fakes import KEYS, TOKEN
from tests.threaded_broker import ThreadedBroker

TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class ZmqWire:
    """Channels at one address; the first server chooses a port, which its successors keep."""

    def __init__(self, address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.address = address
        self._max_message_bytes = max_message_bytes
        self._opened: list[ServerChannel | ClientChannel] = []

    def server(self) -> ZmqServerChannel:
        channel = ZmqServerChannel(self.address, keys=KEYS)
        self.address = channel.address
        self._opened.append(channel)
        return channel

    def client(self) -> ZmqClientChannel:
        channel = ZmqClientChannel(self.address, keys=KEYS, max_message_bytes=self._max_message_bytes)
        self._opened.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._opened:
            channel.close()


Wire = ThreadedBroker | ZmqWire


@pytest.fixture(params=["memory", "ipc", "tcp"])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    if request.param == "memory":
        yield ThreadedBroker()
        return
    opened = ZmqWire(f"ipc://{tmp_path}/broker.sock" if request.param == "ipc" else "tcp://127.0.0.1:0")
    yield opened
    opened.close()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[ZmqWire]:
    opened = ZmqWire(f"ipc://{tmp_path}/broker.sock", max_message_bytes=100_000)
    yield opened
    opened.close()


def next_at_server(server: ServerChannel, *clients: ClientChannel) -> tuple[bytes, Frames]:
    """The next message at the server; flushes the queues of `clients` while it waits."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for client in clients:
            assert client.receive(timeout_s=0) is None
        if (received := server.receive(timeout_s=0.02)) is not None:
            return received
    raise AssertionError("the server received nothing")


def next_at_client(client: ClientChannel) -> Frames:
    frames = client.receive(timeout_s=TIMEOUT_S)
    assert frames is not None, "the client received nothing"
    return frames


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    waiting = threading.Event()
    while not is_so():
        if time.monotonic() > deadline:
            return False
        waiting.wait(0.01)
    return True


def connect(wire: Wire) -> tuple[ServerChannel, ClientChannel, bytes]:
    """Open a server and a client that it knows; returns both and the client's identity."""
    server, client = wire.server(), wire.client()
    client.send([b"hello"])
    identity, frames = next_at_server(server, client)
    assert frames == [b"hello"]
    return server, client, identity


def test_messages_arrive_unchanged_and_in_order_both_ways_for_each_client(wire: Wire) -> None:
    server, client, identity = connect(wire)
    for i in range(500):
        client.send([b"%d" % i])
        assert server.send(identity, [b"%d" % -i])
    assert next_at_client(client) == [b"0"]
    assert [next_at_server(server)[1] for _ in range(500)] == [[b"%d" % i] for i in range(500)]
    assert [next_at_client(client) for _ in range(1, 500)] == [[b"%d" % -i] for i in range(1, 500)]
    payload = bytes(range(256)) * 4096
    client.send([b"put", payload])
    assert next_at_server(server, client) == (identity, [b"put", payload])
    assert server.send(identity, [b"back", payload])
    assert next_at_client(client) == [b"back", payload]
    second = wire.client()
    second.send([b"hello"])
    second_identity, _ = next_at_server(server, second)
    assert identity != second_identity
    assert server.send(second_identity, [b"for the second"])
    assert next_at_client(second) == [b"for the second"]
    assert client.receive(timeout_s=0) is None


def test_frames_sent_without_a_server_reach_its_successor(wire: Wire) -> None:
    server, client, _ = connect(wire)
    server.close()
    for i in range(3):
        client.send([b"%d" % i])
    assert client.receive(timeout_s=0.05) is None
    successor = wire.server()
    received = [next_at_server(successor, client) for _ in range(3)]
    assert [frames for _, frames in received] == [[b"0"], [b"1"], [b"2"]]
    assert successor.send(received[0][0], [b"welcome back"])
    assert next_at_client(client) == [b"welcome back"]


def test_a_client_may_open_before_the_server(wire: Wire) -> None:
    if isinstance(wire, ZmqWire):
        wire.server().close()
    client = wire.client()
    client.send([b"early"])
    assert client.receive(timeout_s=0) is None
    assert next_at_server(wire.server(), client)[1] == [b"early"]


def test_a_wake_ends_a_blocked_receive_or_the_next_one(wire: Wire) -> None:
    _, client, _ = connect(wire)
    received: list[Frames | None] = [[b"not yet"]]
    waiter = threading.Thread(target=lambda: received.append(client.receive(timeout_s=TIMEOUT_S)))
    started = time.monotonic()
    waiter.start()
    client.wake()
    waiter.join(TIMEOUT_S)
    assert received[-1] is None
    client.wake()
    assert client.receive(timeout_s=TIMEOUT_S) is None
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_many_threads_may_send(wire: Wire) -> None:
    server, client, identity = connect(wire)

    def send_200(k: int) -> None:
        for i in range(200):
            client.send([b"%d" % k, b"%d" % i])

    senders = [threading.Thread(target=send_200, args=(k,)) for k in range(8)]
    waiter = threading.Thread(target=client.receive, kwargs={"timeout_s": TIMEOUT_S})
    for thread in [waiter, *senders]:
        thread.start()
    received = [next_at_server(server)[1] for _ in range(8 * 200)]
    server.send(identity, [b"enough"])
    for thread in [waiter, *senders]:
        thread.join(TIMEOUT_S)
    for k in range(8):
        assert [frames[1] for frames in received if frames[0] == b"%d" % k] == [b"%d" % i for i in range(200)]


def test_reconnecting_takes_a_new_identity_and_drops_queued_frames(wire: Wire) -> None:
    server, client, identity = connect(wire)
    client.send([b"stale"])
    client.reconnect()
    client.send([b"fresh"])
    new_identity, frames = next_at_server(server, client)
    assert frames == [b"fresh"]
    assert new_identity != identity
    assert eventually(lambda: not server.send(identity, [b"x"]))


def test_queued_frames_leave_at_close_after_which_nothing_is_sent_and_a_closed_channel_raises(wire: Wire) -> None:
    server, client, identity = connect(wire)
    client.send([b"bye"])
    client.close()
    assert next_at_server(server) == (identity, [b"bye"])
    assert eventually(lambda: not server.send(identity, [b"x"]))
    assert server.send(b"nobody", [b"x"]) is False
    client.close()
    server.close()
    server.close()
    for call in (
        lambda: client.send([b"x"]),
        lambda: client.receive(timeout_s=0),
        lambda: server.receive(timeout_s=0),
        lambda: server.send(identity, [b"x"]),
    ):
        with pytest.raises(ChannelClosedError, match="after close"):
            call()
    client.wake()


def test_a_second_server_is_refused_and_the_address_in_use_is_named(wire: Wire) -> None:
    server, client, _ = connect(wire)
    named = isinstance(wire, ZmqWire) and f"must be free to bind, got {re.escape(wire.address)}: .*; stop the broker"
    with pytest.raises(ChannelClosedError, match=named or None):
        wire.server()
    client.send([b"still here"])
    assert next_at_server(server, client)[1] == [b"still here"]


def test_a_frame_that_was_not_split_ends_only_the_connection_of_its_sender(sockets: ZmqWire) -> None:
    server, modest, identity = connect(sockets)
    with zmq.Context() as context, own_socket(context, sockets.address) as greedy:
        greedy.send_multipart([b"put", bytes(2 * PIECE_BYTES)])
        modest.send([b"put", bytes(50_000)])
        assert next_at_server(server, modest) == (identity, [b"put", bytes(50_000)])
        assert server.receive(timeout_s=0.2) is None


def test_frames_above_a_piece_travel_in_pieces_and_those_that_do_not_add_up_have_an_empty_header(sockets):
    server, client, identity = connect(sockets)
    sizes = [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES]
    frames = [b"head", *(os.urandom(size) for size in sizes)]
    assert max(map(len, in_pieces(frames))) == PIECE_BYTES
    client.send(frames)
    assert next_at_server(server, client) == (identity, frames)
    for pieces in ([], [b""], [b"\x91\x02", b"x"], [b"\x91\x00"], [b"\x91\xff", b"x"], [b"\xc1", b"x"]):
        client.send([b"", *pieces])
        assert next_at_server(server, client)[1] == [b"", *pieces]


def own_socket(context: zmq.Context, address: str, keys: Keys | None = KEYS) -> zmq.Socket:
    """A raw socket, unencrypted without keys."""
    opened = context.socket(zmq.DEALER)
    opened.linger = 0
    if keys:
        opened.curve_serverkey, opened.curve_publickey = keys.server_public, keys.client_public
        opened.curve_secretkey = keys.client_secret
    opened.connect(address)
    return opened


STRANGERS = {
    "no keys": None,
    "another token": derive_keys("another, but as long"),
    "the server's key alone": msgspec.structs.replace(
        derive_keys("another, but as long"), server_public=KEYS.server_public
    ),
}


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_not_heard_and_is_counted(kind: str, name: str, tmp_path: Path) -> None:
    wire = ZmqWire(f"ipc://{tmp_path}/broker.sock" if kind == "ipc" else "tcp://127.0.0.1:0")
    server, client, identity = connect(wire)
    assert server.take_refused() == 0
    with zmq.Context() as context, own_socket(context, wire.address, STRANGERS[name]) as stranger:
        stranger.send_multipart([b"hello"])
        # An unencrypted stranger may hang up before the server counts it, like any probe of the port.
        assert name == "no keys" or eventually(lambda: server.take_refused() > 0)
        assert server.receive(timeout_s=0.2) is None
    client.send([b"still here"])
    assert next_at_server(server, client) == (identity, [b"still here"])
    wire.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_client_says_nothing_to_a_server_without_its_keys(name: str, tmp_path: Path) -> None:
    keys = STRANGERS[name]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        if keys:
            impostor.curve_server, impostor.curve_secretkey = True, keys.server_secret
        impostor.bind(f"ipc://{tmp_path}/broker.sock")
        client = ZmqClientChannel(f"ipc://{tmp_path}/broker.sock", keys=KEYS, max_message_bytes=MAX_MESSAGE_BYTES)
        client.send([b"secret"])
        assert client.receive(timeout_s=0.3) is None
        assert not impostor.poll(0)
        client.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_server_tells_by_the_key_which_guest_sent_a_message(kind: str, tmp_path: Path) -> None:
    keys = derive_keys(TOKEN, guests=["alice", "bob"])
    address = f"ipc://{tmp_path}/broker.sock" if kind == "ipc" else "tcp://127.0.0.1:0"
    server = ZmqServerChannel(address, keys=keys)
    tokens = {name: guest_token(keys, name) for name in ("alice", "bob")}
    stranger = guest_token(keys, "carol")
    clients = {
        name: ZmqClientChannel(server.address, keys=derive_keys(token), max_message_bytes=MAX_MESSAGE_BYTES)
        for name, token in {"alice": tokens["alice"], "": TOKEN, "bob": tokens["bob"], "carol": stranger}.items()
    }
    for name in ("alice", "", "bob"):
        # Also in pieces: the name belongs to the connection, not to a frame.
        for frames in ([b"hello"], [b"hello", bytes(3 * PIECE_BYTES)]):
            clients[name].send(frames)
            identity, received = next_at_server(server, clients[name])
            assert (received, server.guest) == (frames, name)
            assert server.send(identity, [b"welcome"])
            assert next_at_client(clients[name]) == [b"welcome"]
    clients["carol"].send([b"hello"])
    assert clients["carol"].receive(timeout_s=0.2) is None
    assert server.receive(timeout_s=0.1) is None
    assert eventually(lambda: server.take_refused() > 0)
    for channel in (*clients.values(), server):
        channel.close()


def test_bytes_before_the_handshake_do_not_grow_the_memory_of_the_server(sockets: ZmqWire) -> None:
    """Strangers that greet as a CURVE client and then send frames as large as the wire format can announce."""
    sockets.server()
    path = sockets.address.removeprefix("ipc://")
    process = psutil.Process()
    before, sent = process.memory_info().rss, 0
    block = bytes(2**20)
    # A frame that announces a terabyte, one that would fit, and an endless message of many frames.
    for flags, size in ((b"\x02", 2**40), (b"\x02", 2**28), (b"\x03", 60_000)):
        for _ in range(8):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.settimeout(1.0)
                stranger.sendall(CURVE_GREETING)
                try:
                    stranger.sendall(flags + size.to_bytes(8, "big"))
                    for _ in range(16):
                        stranger.sendall(block)
                        sent += len(block)
                except OSError:
                    continue  # the server has closed the connection
    assert process.memory_info().rss - before < 8 * 2**20, f"{sent} bytes were taken"


ECHO = f"""
import resource
from slipstream.broker.transport import zmq_channels
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
zmq_channels._SERVER_OPTIONS[zmq_channels.zmq.HANDSHAKE_IVL] = 1000
from slipstream.runtime.credentials import derive_keys
server = zmq_channels.ZmqServerChannel("tcp://127.0.0.1:0", keys=derive_keys({TOKEN!r}))
print(server.address, flush=True)
while True:
    received = server.receive(timeout_s=20)
    if received is None:
        break
    server.send(*received)
"""


def test_strangers_that_only_connect_cost_their_file_descriptors_for_the_handshake_alone() -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True))
        stack.callback(broker.kill)
        assert broker.stdout
        address = broker.stdout.readline().strip()

        def join() -> ZmqClientChannel:
            client = ZmqClientChannel(address, keys=KEYS, max_message_bytes=MAX_MESSAGE_BYTES)
            stack.callback(client.close)
            return client

        def is_answered(client: ZmqClientChannel) -> bool:
            client.send([b"are you there"])
            return eventually(lambda: client.receive(timeout_s=0.1) is not None)

        known = join()
        assert is_answered(known)
        for _ in range(100):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
        assert eventually(lambda: len(list(Path(f"/proc/{broker.pid}/fd").iterdir())) == 60)
        assert is_answered(known)
        assert is_answered(join())


def test_a_full_pipe_loses_nothing(sockets: ZmqWire) -> None:
    sockets.server().close()
    client = sockets.client()
    num_messages = 2 * HIGH_WATER_MARK
    for i in range(num_messages):
        client.send([b"%d" % i])
    assert client.receive(timeout_s=0) is None
    server = sockets.server()
    assert [next_at_server(server, client)[1] for _ in range(num_messages)] == [
        [b"%d" % i] for i in range(num_messages)
    ]


def test_a_server_does_not_block_on_a_peer_that_reads_nothing(sockets: ZmqWire) -> None:
    server, _, identity = connect(sockets)
    num_sent = 0
    while server.send(identity, [bytes(1000)]):
        num_sent += 1
        assert num_sent < 100_000, "libzmq must stop taking messages at its high-water marks"


def test_a_path_too_long_for_the_kernel_is_refused_with_its_length(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/{'a' * (108 - len(str(tmp_path)) - 1)}"
    with pytest.raises(ChannelClosedError, match=r"broker\.address must be a path of at most 107 bytes, got 108: ipc:"):
        ZmqWire(address).server()
    ZmqWire(address[:-1]).server().close()


def test_a_path_left_behind_by_a_dead_broker_is_free_and_a_closed_server_leaves_none(sockets: ZmqWire) -> None:
    path = Path(sockets.address.removeprefix("ipc://"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    server, _, _ = connect(sockets)
    assert path.is_socket()
    server.close()
    assert not path.exists()


def test_only_local_addresses_can_be_bound_and_a_malformed_one_is_refused() -> None:
    for address in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://10.1.2.3:5757", "tcp://example:1"):
        with pytest.raises(ChannelClosedError, match="must be a loopback or ipc endpoint"):
            ZmqServerChannel(address, keys=KEYS)
    with pytest.raises(ChannelClosedError, match="must be a ZeroMQ endpoint, got nonsense"):
        ZmqClientChannel("nonsense", keys=KEYS, max_message_bytes=MAX_MESSAGE_BYTES)


def test_closing_is_bounded_without_a_server(sockets: ZmqWire) -> None:
    client = sockets.client()
    for _ in range(2 * HIGH_WATER_MARK):
        client.send([b"x"])
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_channels_leave_no_threads_and_no_files_behind(sockets: ZmqWire) -> None:
    process = psutil.Process()

    def once() -> None:
        server, client, _ = connect(sockets)
        client.reconnect()
        client.close()
        server.close()

    once()
    files, threads = process.num_fds(), process.num_threads()
    for _ in range(10):
        once()
    # The kernel still counts a thread for a moment after its join, in both counts.
    assert eventually(lambda: process.num_fds() <= files and process.num_threads() <= threads)


def test_a_single_thread_never_blocks() -> None:
    hub = MemoryBroker()
    server, client = hub.server(), hub.client()
    started = time.monotonic()
    assert server.receive(timeout_s=TIMEOUT_S) is None
    assert client.receive(timeout_s=TIMEOUT_S) is None
    assert time.monotonic() - started < TIMEOUT_S / 2


class LateEvent(threading.Event):
    """Set by another thread right after it was first found unset."""

    def is_set(self) -> bool:
        found = super().is_set()
        self.set()
        return found


def test_a_wake_while_a_receive_looks_for_one_is_not_lost(tmp_path: Path):
    channel = ZmqClientChannel(f"ipc://{tmp_path}/broker", keys=KEYS, max_message_bytes=MAX_MESSAGE_BYTES)
    woken = channel._is_woken = LateEvent()
    channel.receive(timeout_s=0)
    assert threading.Event.is_set(woken)
    channel.close()
