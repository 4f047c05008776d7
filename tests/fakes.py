"""Fakes and scenes that several test modules share: a clock, a router with its peers, and the reports of a run."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as ThreadEvent
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import AnyMessage, Hello, LeaseRequest, OpenEpoch, Ping, Pong, Prompts, Update
from slipstream.broker.router import Router
from slipstream.broker.transport.channels import MemoryBroker
from slipstream.broker.weights.transport import HostBuckets, MemoryReceiver
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.records import Event
from slipstream.configs.run import RunConfig
from slipstream.observe.run_status import Monitor, RunStatus
from slipstream.runtime.credentials import derive_keys
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_run
from tests.memory_store.store import MemoryStore

TOKEN = "the token of all tests"
KEYS = derive_keys(TOKEN)


class FakeClock:
    """A clock that the test sets: `clock.now += 5`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class RouterScene:
    """A router that admits two groups, over a store in memory, on a fake clock."""

    def __init__(
        self,
        folder: Path,
        *,
        model: ModelFingerprint | None = None,
        settings: dict[str, Any] | None = None,
        rows: Path | None = None,
        staleness: dict[str, Any] | None = None,
        **buffer: object,
    ) -> None:
        """`staleness`: in addition to `max_lag=0`; `settings`: those of other parts."""
        self.clock = FakeClock()
        self.store_is_ahead_s = 0.0
        self.store = MemoryStore(clock=lambda: self.clock() + self.store_is_ahead_s)
        self.run = make_run(**(settings or {}), staleness={"max_lag": 0} | (staleness or {}), buffer=buffer)
        self.hub = MemoryBroker()
        data = self.data = Dataset(rows or write_rows(folder / "rows.parquet"))
        self.config_json = msgspec.json.encode(self.run).decode()
        curriculum = self.run.data.curriculum
        self.store.open_run("test", config_json=self.config_json, num_rows=len(data), seed=0, curriculum=curriculum)
        sets = {"train": data, "heldout": {each.name: data for each in self.run.data.eval_sets}}
        self.router = Router(self.hub.server(), self.store, run=self.run, model=model, clock=self.clock, **sets)

    def step(self) -> None:
        self.router.step(timeout_s=0)

    def tick(self, seconds: float | None = None) -> None:
        """Advance the clock once, by default by one heartbeat, and step the router."""
        self.clock.now += self.run.broker.heartbeat_s if seconds is None else seconds
        self.step()

    def wait(self, seconds: float) -> None:
        """Let time pass while the router runs."""
        ends_at = self.clock.now + seconds
        while self.clock.now < ends_at:
            self.tick()

    def join(
        self, name: str = "g0", *, role: str = "generator", incarnation: str = "1", is_ready: bool = False
    ) -> "FakePeer":
        """Add a peer that has received its Welcome, and has reported that it is ready if it is."""
        peer = FakePeer(self, role, name, incarnation)
        if is_ready:
            peer.send([encode(Pong(-1.0, "ready", 0))])
        peer.receive()
        return peer

    def events(self) -> list[tuple[str, str]]:
        """(role, text) of the run's events."""
        return [(event.role, event.text) for event in self.store.events(limit=99)]


class FakePeer:
    """A peer driven by the test. Frames leave a channel with its `receive`, so every send is followed by one."""

    def __init__(self, scene: RouterScene, role: str, peer_id: str, incarnation: str = "1") -> None:
        self.scene = scene
        self.channel = scene.hub.client()
        self.received: list = []
        self.send([encode(Hello(role, peer_id, incarnation, "here", 1))])

    def send(self, frames: list[bytes]) -> None:
        self.channel.send(frames)
        self.read()
        self.scene.step()

    def read(self) -> None:
        while (frames := self.channel.receive(timeout_s=0)) is not None:
            message = decode(frames[0], AnyMessage)
            self.received += [] if isinstance(message, Ping) else [message]

    def receive(self) -> list:
        """Return the messages since the last call, without pings."""
        self.read()
        messages, self.received = self.received, []
        return messages

    def exchange(self, message, *payloads: bytes) -> list:
        """Send a message, step the router, return its answers."""
        self.send([encode(message), *payloads])
        return self.receive()

    def lease(self, *, max_trajectories: int = 4) -> Prompts:
        """Request a lease; returns the prompts."""
        answers = self.exchange(LeaseRequest(max_trajectories=max_trajectories))
        return next(answer for answer in answers if isinstance(answer, Prompts))


def write_rows(path: Path) -> Path:
    """Write ten prompts, `0=` to `9=`; returns the path."""
    same = {"data_source": "test"}
    truth = [{"style": "rule", "ground_truth": str(n)} for n in range(10)]
    rows = [{"prompt": f"{n}=", "reward_model": truth[n], "extra_info": {"index": n}} | same for n in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


STATUS_RUN = make_run(generators={"max_concurrency": 64}, learner={"prompts_per_step": 2, "max_steps": 40})
STATUS_ROW = {
    "step": 3,
    "time_s": 9.0,
    "learner/reward_mean": 0.5,
    "lag/mean": 1.5,
    "lag/max": 2,
    "generators/tokens_per_s": 1000.0,
    "learner/tokens_per_s": 900.0,
    "learner/wait_s": 1.0,
    "learner/train_s": 2.5,
    "learner/publish_s": 0.5,
}
"""A row of metrics."""


def make_gauges(pid: int = 7, **overrides: Any) -> dict[str, Any]:
    """Gauges of a generator that holds version 3."""
    gauges = {"role": "generator", "state": "ready", "version": 3, "running": 32, "reason": ""}
    return gauges | {"host": "node", "pid": pid} | overrides


def make_reports() -> dict[str, tuple[float, dict[str, Any]]]:
    """Name -> (seconds since the report, gauges): three generators, one of them silent, one gone."""
    learner = {"role": "learner", "state": "ready", "version": 3, "tokens": 5.0, "reason": "training step 4"}
    busy = make_gauges(version=2, tokens=9.0, tokens_per_s=5210.25, reason="pacing: wait", waits_for="prompts")
    return {
        "broker": (0.5, {"role": "broker", "state": "ready", "reason": "", "host": "node", "pid": 1}),
        "learner": (0.5, learner),
        "launcher": (0.1, {"role": "launcher", "state": "ready", "restarts": {"generator-0": 2}}),
        "generator-0": (0.5, busy),
        "generator-1": (90.0, make_gauges(version=1)),
        "generator-2": (300.0, {"role": "generator", "state": "gone", "reason": "left"}),
    }


class StatusStore(MemoryStore):
    """A store with given answers to some questions of a Monitor."""

    def __init__(self, *, clock: FakeClock, ready: dict[int, int], events: list[Event], full_disk: str) -> None:
        super().__init__(clock=clock)
        self._given = ready, events, full_disk

    def ready_versions(self) -> dict[int, int]:
        return self._given[0]

    def events(self, *, limit: int) -> list[Event]:
        return self._given[1]

    def full_disk(self) -> str:
        return self._given[2]


def status_of(
    reports: dict[str, tuple[float, dict[str, Any]]] | None = None,
    *,
    run: RunConfig = STATUS_RUN,
    phase: str = "training",
    ready_versions: dict[int, int] | None = None,
    events: list[Event] | None = None,
    rows: tuple[dict[str, Any], ...] = (),
    full_disk: str = "",
) -> RunStatus:
    clock, now = FakeClock(0.0), 1000.0
    store = StatusStore(clock=clock, ready=ready_versions or {}, events=events or [], full_disk=full_disk)
    store.open_run("test", config_json="{}", num_rows=4, seed=0)
    store.announce_version(3)
    store.set_phase(phase)
    for row in rows:
        store.append_metrics(row)
    for name, (age_s, gauges) in (make_reports() if reports is None else reports).items():
        clock.now = now - age_s
        store.report_role(name, gauges)
    clock.now = now
    return Monitor(store, run).status()


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """A disk that is full for this process: no file can be written beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python would cut the bytecode of a module that it imports here, and use it later.
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_bytecode


class NoBytes(MemoryReceiver):
    """Every version arrives at once, without buckets and without a thread, which simulated time would not wait for."""

    def __init__(self) -> None: ...

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None: ...

    def receive(self, update: Update, *, cancelled: ThreadEvent) -> HostBuckets:
        return HostBuckets([])

    def close(self) -> None: ...
