"""Scripted generators on one broker or several: time to a lease, CPU time and memory of brokers and store.

python -m benchmarks.peers_at_scale --peers 250 1000 4000 --brokers 1 2 4 --tokens-per-s 1000000

Every generator says Hello, answers pings, asks for one group at a time, and puts its trajectories one by one at an even
rate. A scripted learner announces versions. Each generator uses the broker chosen by its hash, the learner all of them.
First all generators ask at once. Then each asks when its group is done, for at least the time of one and a half groups.
`again` counts generators that a broker dropped after 8 s of silence and that rejoined. `us/put` is the brokers' CPU
time, including pings and leases, per trajectory received. It does not depend on other load on the machine.
"""

import argparse
import heapq
import multiprocessing
import os
import select
import socket
import tempfile
import time
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from rich.console import Console

from benchmarks.harness import make_parser, make_table, write_result
from benchmarks.ingest.paths import ANY_LEASE, make_trajectory
from benchmarks.ingest.served_run import GROUP_SIZE, SOCKETS, TOKEN, ServedRun
from slipstream.broker.messages import (
    NO_EPOCH,
    Ack,
    AnyMessage,
    Bye,
    Hello,
    LeaseRequest,
    Member,
    Members,
    Message,
    Nack,
    Ping,
    Pong,
    Prompts,
    Put,
    TensorSlot,
    Update,
    UpdateApplied,
    Welcome,
)
from slipstream.broker.transport import zmq_channels
from slipstream.broker.transport.client import preferred
from slipstream.buffer.codec import decode, encode, pack
from slipstream.buffer.trajectory import make_trajectory_id
from slipstream.runtime.credentials import derive_keys

_LEARNER = "learner"
_JOIN_S, _BURST_S = 60.0, 60.0
_HELLO_EVERY_S = 5.0
_UPDATE_EVERY_S = 5.0
_NUM_TENSORS = 300
_GAUGES: dict[str, Any] = {f"gauge_{number}": float(number) for number in range(24)}
"""As many as a generator reports."""
_COLUMNS = {
    "peers": "{peers:,}",
    "brokers": "{brokers} {sockets}",
    "burst": "{burst_ms[p50]:,.0f} {burst_ms[max]:,.0f}",
    "p50": "{lease_ms[p50]:,.1f}",
    "p99": "{lease_ms[p99]:,.1f}",
    "brokers'": "{cores[brokers]:.2f}",
    "store": "{cores[store]:.2f}",
    "idle": "{idle_cores[brokers]:.2f}",
    "peers'": "{cores[peers]:.2f}",
    "us/put": "{broker_us:.0f}",
    "MiB": "{memory_mib[brokers]:,.0f} + {memory_mib[store]:,.0f}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "load": "{load:.1f}",
    "again": "{rejoined}",
}

console = Console(width=120) if not Console().is_terminal else Console()


@dataclass
class Peer:
    """One scripted generator, or the learner."""

    socket: zmq.Socket
    member: Member
    lease_ids: list[str] = field(default_factory=list)
    asked_at: float = 0.0
    num_left: int = 0
    """Trajectories of its group that are not sent yet."""
    version: int = 0
    is_joined: bool = False


class Crowd:
    """The scripted generators of one process, on one epoll. Life: join -> burst -> steady."""

    def __init__(
        self,
        numbers: range,
        addresses: dict[str, str],
        *,
        is_plain: bool,
        tokens: int,
        put_every_s: float,
        has_learner: bool,
    ) -> None:
        """`addresses`: broker name -> address; `put_every_s`: seconds between two trajectories of one generator."""
        options = zmq_channels._CLIENT_OPTIONS if is_plain else zmq_channels._client_options(derive_keys(TOKEN))
        self._options, self._addresses, self._put_every_s = options, addresses, put_every_s
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16_384)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Peer] = {}
        self._touched: dict[int, Peer] = {}
        self._due: list[tuple[float, int, Peer]] = []
        self._template = make_trajectory(ANY_LEASE, 0, num_tokens=tokens, rng=np.random.default_rng(0))
        self._live: dict[int, list[Member]] = {}
        self.waits_s: list[float] = []
        self.num_acked = self.num_updates = self.num_rejected = self.num_rejoined = 0
        names = [f"generator-{number}" for number in numbers]
        self._peers = [self._connect(name, addresses[preferred(name, addresses)[0]]) for name in names]
        self._learners = [self._connect(_LEARNER, each) for each in addresses.values() if has_learner]

    def join(self) -> None:
        """Block until every peer has received Welcome."""
        everyone = [*self._peers, *self._learners]
        deadline = time.perf_counter() + _JOIN_S
        while (missing := [each for each in everyone if not each.is_joined]) and time.perf_counter() < deadline:
            for peer in missing:
                self._say_hello(peer)
            self._run_until(_HELLO_EVERY_S, lambda: all(peer.is_joined for peer in missing))
        if missing:
            raise RuntimeError(f"all peers must receive Welcome within {_JOIN_S:g} s, {len(missing)} did not")

    def burst(self) -> None:
        """Have all generators ask at once, and wait for all answers."""
        for peer in self._peers:
            self._ask(peer)
        self._run_until(_BURST_S, lambda: len(self.waits_s) >= len(self._peers))

    def steady(self, seconds: float) -> None:
        self._run_until(seconds, lambda: False)

    def wait(self, pipe: Connection) -> None:
        """Keep serving until the other end of the pipe sends a message."""
        self._run_until(_JOIN_S, pipe.poll)
        pipe.recv()

    def _connect(self, peer_id: str, address: str) -> Peer:
        member = Member(peer_id, f"{peer_id}-0123456789abcdef0123456789")
        options = self._options | {zmq.IDENTITY: member.incarnation.encode()}
        peer = Peer(zmq_channels._open(self._context, zmq.DEALER, options), member)
        peer.socket.connect(address)
        descriptor = int(peer.socket.getsockopt(zmq.FD))
        self._by_fd[descriptor] = peer
        self._epoll.register(descriptor, select.EPOLLIN)
        return peer

    def _say_hello(self, peer: Peer) -> None:
        peer_id = peer.member.peer_id
        role: Any = _LEARNER if peer_id == _LEARNER else "generator"
        self._send(peer, Hello(role, peer_id, peer.member.incarnation, socket.gethostname(), 1))

    def _run_until(self, seconds: float, is_done: Any) -> None:
        deadline = time.perf_counter() + seconds
        next_update_at = time.perf_counter() + _UPDATE_EVERY_S
        while (now := time.perf_counter()) < deadline and not is_done():
            if self._learners and now >= next_update_at:
                next_update_at = now + _UPDATE_EVERY_S
                self._announce()
            while self._due and self._due[0][0] <= now:
                at, _, peer = heapq.heappop(self._due)
                self._put_one(peer, at)
            self._drain_all()
            left_s = (self._due[0][0] if self._due else deadline) - time.perf_counter()
            for descriptor, _ in self._epoll.poll(min(0.05, max(0.0, left_s))):
                self._touched[descriptor] = self._by_fd[descriptor]
            self._drain_all()

    def _send(self, peer: Peer, message: Message, *payloads: bytes) -> None:
        peer.socket.send_multipart([encode(message), *payloads])
        self._touched[id(peer)] = peer

    def _drain_all(self) -> None:
        # A socket's descriptor is edge-triggered, and a send consumes the edge too. Drain every touched socket before
        # the next wait.
        while self._touched:
            _, peer = self._touched.popitem()
            while int(peer.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._handle(peer, decode(peer.socket.recv_multipart()[0], AnyMessage))  # type: ignore[arg-type]

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case Welcome():
                peer.is_joined = True
                self._pong(peer, -1.0)
                if peer.asked_at and not peer.lease_ids:
                    self._send(peer, LeaseRequest(GROUP_SIZE))
            case Bye() if peer.is_joined:
                peer.is_joined, self.num_rejoined = False, self.num_rejoined + 1
                self._say_hello(peer)
            case Ping(sent_at=sent_at):
                self._pong(peer, sent_at)
            case Prompts() if peer.lease_ids:
                return  # It asked before it rejoined: that lease lapses.
            case Prompts(prompts=[]):
                self._send(peer, LeaseRequest(GROUP_SIZE))
            case Prompts(prompts=[prompt, *_]):
                now = time.perf_counter()
                self.waits_s.append(now - peer.asked_at)
                peer.lease_ids, peer.num_left = [prompt.lease.id], GROUP_SIZE
                # Spread over the interval, so that generators that asked at once do not run in lockstep.
                heapq.heappush(self._due, (now + self._put_every_s * np.random.random(), id(peer), peer))
            case Ack(ids=ids):
                self.num_acked += len(ids)
            case Nack():
                self.num_rejected += 1
            case Members(generators=generators):
                self._live[id(peer)] = [each.member for each in generators]
            case Update(version=version, epoch=epoch):
                peer.version, self.num_updates = version, self.num_updates + 1
                self._pong(peer, -1.0)
                self._send(peer, UpdateApplied(epoch, version, peer.member))

    def _pong(self, peer: Peer, sent_at: float) -> None:
        self._send(peer, Pong(sent_at, "ready", peer.version, gauges=_GAUGES, lease_ids=peer.lease_ids))

    def _ask(self, peer: Peer) -> None:
        peer.asked_at = time.perf_counter()
        self._send(peer, LeaseRequest(GROUP_SIZE))

    def _put_one(self, peer: Peer, at: float) -> None:
        """Put the next member of the peer's group. After the last one, ask for another group."""
        lease_id, index = peer.lease_ids[0], GROUP_SIZE - peer.num_left
        group_id, _, attempt = lease_id.rpartition("-")
        ids = {"id": make_trajectory_id(lease_id, index), "group_id": group_id, "index": index}
        made = msgspec.structs.replace(self._template, **ids, attempt=int(attempt))
        header, payload = pack(made, lease_id=lease_id, purpose="train", group_size=GROUP_SIZE)
        self._send(peer, Put([header]), payload)
        peer.num_left -= 1
        if peer.num_left:
            heapq.heappush(self._due, (at + self._put_every_s, id(peer), peer))
        else:
            peer.lease_ids = []
            self._ask(peer)

    def _announce(self) -> None:
        version = self._learners[0].version = self._learners[0].version + 1
        members = [member for live in self._live.values() for member in live]
        names = [f"model.layers.{number}.mlp.weight" for number in range(_NUM_TENSORS)]
        slots = [TensorSlot(name, [4096, 4096], "bfloat16", 0, number) for number, name in enumerate(names)]
        order = Update(
            NO_EPOCH, members, version, slots, [2**26] * 8, [2**63] * 8, [[1] * 32] * 4,
            [[-1.0] * 31] * 4, max_probe_diff=1e-3, timeout_s=60.0,
        )  # fmt: skip
        for learner in self._learners:
            self._send(learner, order)


def _work(pipe: Connection, numbers: range, settings: dict[str, Any], seconds: float) -> None:
    crowd = Crowd(numbers, **settings)
    crowd.join()
    pipe.send("joined")
    crowd.wait(pipe)
    crowd.burst()
    pipe.send(crowd.waits_s)
    crowd.wait(pipe)
    crowd.waits_s, crowd.num_acked, crowd.num_updates, crowd.num_rejoined = [], 0, 0, 0
    cpu_s = time.process_time()
    crowd.steady(seconds)
    counts = crowd.num_acked, crowd.num_updates, crowd.num_rejected, crowd.num_rejoined
    pipe.send((crowd.waits_s, time.process_time() - cpu_s, *counts))


def measure(served: ServedRun, num_peers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the peers on an unused served run; return the figures."""
    context = multiprocessing.get_context("spawn")
    put_every_s = num_peers * arguments.tokens / arguments.tokens_per_s
    seconds = max(arguments.seconds, 1.5 * GROUP_SIZE * put_every_s)
    settings = {"addresses": served.addresses, "is_plain": served.is_plain}
    settings |= {"tokens": arguments.tokens, "put_every_s": put_every_s}
    pipes, workers = [], []
    for number in range(arguments.processes):
        ours, theirs = context.Pipe()
        numbers = range(number, num_peers, arguments.processes)
        work = (theirs, numbers, settings | {"has_learner": number == 0}, seconds)
        workers.append(context.Process(target=_work, args=work, daemon=True))
        workers[-1].start()
        theirs.close()
        pipes.append(ours)
    _gather(pipes)
    before, idle_s = served.cpu_s(), min(5.0, arguments.seconds)
    time.sleep(idle_s)
    idle = _cores_since(before, served, idle_s)
    _release(pipes)
    burst = [wait for waits in _gather(pipes) for wait in waits]
    before, started_at = served.cpu_s(), time.perf_counter()
    _release(pipes)
    results = _gather(pipes)
    wall_s = time.perf_counter() - started_at
    cores, memory = _cores_since(before, served, wall_s), served.memory_mib()
    for worker in workers:
        worker.join(5.0)
    waits = [wait for result in results for wait in result[0]]
    peers_cpu_s, acked, updates, rejected, rejoined = (sum(each) for each in list(zip(*results, strict=True))[1:])
    return {
        "peers": num_peers,
        "brokers": len(served.addresses),
        "sockets": "plain" if served.is_plain else "",
        "idle_cores": _brokers_and_store(idle),
        "burst_ms": _quantiles_ms(burst),
        "lease_ms": _quantiles_ms(waits),
        "leases": len(waits),
        "cores": _brokers_and_store(cores) | {"peers": peers_cpu_s / wall_s},
        "memory_mib": _brokers_and_store(memory),
        "broker_us": 1e6 * _brokers_and_store(cores)["brokers"] * wall_s / max(1, acked),
        "load": os.getloadavg()[0],
        "tokens_per_s": arguments.tokens * acked / wall_s,
        "seconds": wall_s,
        "updates": updates,
        "rejected": rejected,
        "rejoined": rejoined,
    }


def _cores_since(before: dict[str, float], served: ServedRun, seconds: float) -> dict[str, float]:
    return {name: (used - before[name]) / seconds for name, used in served.cpu_s().items()}


def _brokers_and_store(figures: dict[str, float]) -> dict[str, float]:
    return {"brokers": sum(figures.values()) - figures["store"], "store": figures["store"]}


def _gather(pipes: list[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]


def _release(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.send("go")


def _quantiles_ms(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": float("nan"), "p99": float("nan"), "max": float("nan")}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99), "max": 1e3 * max(seconds)}


def main(arguments: argparse.Namespace) -> None:
    """Measure each number of generators on each number of brokers, each combination with a new store."""
    rows = []
    for sockets, num_peers, brokers in product(arguments.sockets, arguments.peers, arguments.brokers):
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            own = {"sockets": sockets, "brokers": brokers, "settings": ["broker.peer_timeout_s=8"]}
            served = ServedRun(Path(folder), durability="standard", **own)
            try:
                served.start()
                rows.append(measure(served, num_peers, arguments))
            finally:
                served.stop()
        write_result(arguments, {"group_size": GROUP_SIZE, "rows": rows})
    title = "ms to a lease: median and last of all at once (burst), then p50, p99; shares of a core: brokers together"
    console.print(make_table(rows, _COLUMNS, title=title))


if __name__ == "__main__":
    parser = make_parser("benchmarks.peers_at_scale", __doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[250, 1000, 4000], help="generators (250 1000 4000)")
    parser.add_argument("--brokers", type=int, nargs="+", default=[1], help="number of brokers (1)")
    parser.add_argument("--sockets", nargs="+", default=["ipc"], choices=SOCKETS, help="of the brokers (ipc)")
    parser.add_argument("--tokens-per-s", type=float, default=1e6, help="total rate of all generators (1,000,000)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a trajectory (1024)")
    parser.add_argument("--seconds", type=float, default=20.0, help="minimum time measured after the burst (20)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the generators (1)")
    main(parser.parse_args())
