"""Fake generators and a fake snapshot server, scripted by the test."""

from collections import deque
from collections.abc import Sequence

import torch

from slipstream.broker import messages
from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import Member, Update
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.publisher import BackgroundPublisher, Publisher
from slipstream.learner.publishing.staging import Staged, Stager
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

WEIGHTS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3))]
CANARY = ([[1, 2, 3]], [[-1.0, -2.0]])


class FakeGenerators:
    """Client, inbox, and sender in one. Each member behaves as set in `members`."""

    address = ("127.0.0.1", 1)

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.inbox = clock, deque()
        self.members, self.transports, self.machines, self.devices = {}, {}, {}, {}
        self.sent, self.evicted, self.opened_with, self.backends = [], [], [], []
        self.device, self.probe_diff, self.broadcasts = "cpu", 1e-7, 0

    def set_members(self, **members: str) -> None:
        """Set the live members and their behavior: well|silent|wrong|slow. For slow members see `finish_fetching`."""
        self.members = members
        states = []
        for name in sorted(members):
            place = self.transports.get(name, "collective"), self.machines.get(name, "elsewhere"), self.lends_at(name)
            states.append(messages.MemberState(member(name), "unsynced", -1, *place))
        self.inbox.append(messages.Members(states))

    def lends_at(self, name: str) -> str:
        return f"tcp://{name}:1" if name in self.machines else ""

    # --- client ---
    def send(self, message) -> None:
        self.sent.append(message)
        for name in (m.peer_id for m in message.members):
            behavior = self.members.get(name, "silent")
            if isinstance(message, messages.OpenEpoch) and behavior != "silent":
                self.inbox.append(messages.EpochOpened(message.epoch, member(name)))
            if isinstance(message, Update) and (behavior not in ("silent", "slow") or message.source is None):
                error = "the probe differs" if behavior == "wrong" else ""
                device = self.devices.get(name, "cpu")
                about = message.epoch, message.version, member(name), error
                answer = messages.UpdateApplied(*about, self.probe_diff, 2e-7, 0.02, device)
                self.inbox.append(answer)

    def updates(self, *, fetched: bool) -> list[tuple[int, list[str]]]:
        """Versions and members of fetch requests (`fetched`) or of broadcasts."""
        updates = [m for m in self.sent if isinstance(m, Update) and (m.source is not None) is fetched]
        return [(update.version, [m.peer_id for m in update.members]) for update in updates]

    def finish_fetching(self, name: str, version: int, *, lender_errors: Sequence[messages.LenderError] = ()) -> None:
        applied = messages.UpdateApplied(0, version, member(name), "", 1e-7, 2e-7, 0.02, lender_errors=[*lender_errors])
        self.inbox.append(applied)

    # --- inbox ---
    def get(self, *, timeout_s: float):
        if not self.inbox:
            self.clock.now += timeout_s
        return self.inbox.popleft() if self.inbox else None

    # --- sender ---
    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: str) -> None:
        self.opened_with.append(num_members)
        self.backends.append(backend)
        if "silent" in self.members.values():
            raise WeightTransferError("rank 1 did not arrive in time")

    def broadcast(self, buckets, *, timeout_s: float) -> None:
        self.broadcasts += 1

    def abort(self) -> None:
        self.sent.append("aborted")

    def close(self) -> None:
        self.sent.append("closed")


def member(name: str) -> Member:
    return Member(name, "1")


class FakeSnapshots:
    """Records the added versions, whether they had deltas, and which versions were pinned."""

    def __init__(self) -> None:
        self.added: list[tuple[int, bool, list[int]]] = []
        self.error = ""
        self.is_closed = False

    def add(self, update, buckets, *, with_delta: bool = False, pinned=()) -> messages.SnapshotSource:
        if self.error:
            raise WeightTransferError(self.error)
        self.added.append((update.version, with_delta, sorted(pinned)))
        return messages.SnapshotSource("tcp://127.0.0.1:2", "/weights", has_deltas=with_delta)

    def close(self) -> None:
        self.is_closed = True


def make_publisher(
    *,
    is_one_process=True,
    snapshots=None,
    transports=None,
    machines=None,
    trusts_network=True,
    backend="auto",
    **members,
) -> tuple[Publisher, FakeGenerators, FakeClock]:
    clock = FakeClock(0.0)
    generators = FakeGenerators(clock)
    settings = {"snapshots": snapshots, "is_one_process": is_one_process, "trusts_network": trusts_network}
    publisher = Publisher(
        **dict.fromkeys(("client", "inbox", "sender"), generators),
        config=WeightsConfig(backend=backend),
        on_evict=lambda peer_id, text: generators.evicted.append((peer_id, text)),
        clock=clock,
        **settings,
    )
    generators.transports, generators.machines = transports or {}, machines or {}
    generators.set_members(**members)
    return publisher, generators, clock


def make_stager(weights: list[tuple[str, torch.Tensor]] = WEIGHTS) -> Stager:
    return Stager(WeightsConfig(), metadata=[(name, tensor.shape, torch.float32) for name, tensor in weights])


def make_background(publisher: Publisher, stager: Stager | None = None) -> tuple[BackgroundPublisher, MemoryStore]:
    store = MemoryStore()
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    return BackgroundPublisher(publisher, stager or make_stager(), store, in_background=True), store


def stage(version: int) -> Staged:
    return make_stager().stage(version=version, weights=WEIGHTS, canary=CANARY)


def publish(publisher: Publisher, version: int):
    publisher.set_version(stage(version))
    return publisher.synchronize()
