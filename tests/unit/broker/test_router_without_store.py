"""During a store outage the router keeps pinging, defers trajectories with the reason, and catches up afterwards."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.broker.messages import Ack, AnyMessage, LeaseRequest, Nack, Ping, Pong, Prompts, Put
from slipstream.buffer.codec import decode
from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.store import StoreOutage
from tests.builders import make_packed
from tests.fakes import FakeClock, RouterScene
from tests.memory_store.store import MemoryStore

UNAVAILABLE = StoreUnavailableError("it does not answer")


class FailingStore(MemoryStore):
    """A store whose every operation raises `error` while it is set."""

    error: StoreUnavailableError | None = None

    def __getattribute__(self, name: str) -> Any:
        error = object.__getattribute__(self, "error")
        if error and name != "error" and not name.startswith("_"):
            raise error
        return object.__getattribute__(self, name)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RouterScene:
    monkeypatch.setattr("tests.fakes.MemoryStore", FailingStore)
    return RouterScene(tmp_path)


def test_every_peer_is_pinged_during_an_outage(scene: RouterScene):
    peers = [scene.join(f"g{number}") for number in range(3)]
    for peer in peers:
        peer.exchange(Pong(0.0, "ready", 0, lease_ids=["0-0"]))
    scene.store.error = UNAVAILABLE
    for peer in peers:
        peer.receive()
    scene.tick()
    for peer in peers:
        frames = peer.channel.receive(timeout_s=0)
        assert isinstance(decode(frames[0], AnyMessage), Ping)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(UNAVAILABLE, "store_unavailable"), (StoreCannotWriteError("its disk is full"), "store_cannot_write")],
)
def test_trajectories_are_deferred_counted_and_stored_later(scene: RouterScene, error, reason):
    peer = scene.join("g0")
    peer.lease()
    header, payload = make_packed("0", 0)
    scene.store.error = error
    (nack,) = peer.exchange(Put([header]), payload)
    assert isinstance(nack, Nack)
    assert (nack.id, nack.reason, nack.is_fatal, nack.retry_after_s > 0) == (header.id, reason, False, True)
    scene.store.error = None
    scene.tick()
    gauges = scene.store.roles()["broker"]
    assert gauges[f"deferred_{reason}"] == 1
    assert gauges["reason"] == f"trajectories are deferred: {reason}"
    assert peer.exchange(Put([header]), payload) == [Ack([header.id])]
    scene.tick()
    assert scene.store.roles()["broker"]["reason"] == ""


def test_lease_requests_are_answered_with_the_reason_and_served_later(scene: RouterScene):
    peer = scene.join("g0")
    scene.store.error = UNAVAILABLE
    assert peer.exchange(LeaseRequest(max_trajectories=4)) == []
    scene.tick(1.0)
    assert peer.receive() == [Prompts([], reason="store_unavailable")]
    scene.store.error = None
    assert peer.lease().prompts


def test_departures_during_an_outage_are_recorded_afterwards(scene: RouterScene):
    peers = [scene.join(f"g{number}") for number in range(2)]
    peers[0].lease()
    scene.store.error = UNAVAILABLE
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    scene.store.error = None
    assert scene.store.counts().returned == 0
    scene.tick()
    assert scene.store.counts().returned == 2
    assert [scene.store.roles()[name]["state"] for name in ("g0", "g1")] == ["gone", "gone"]


def test_of_a_store_that_hangs_one_answer_is_waited_for_however_many_peers_fall_silent(
    scene: RouterScene, monkeypatch: pytest.MonkeyPatch
):
    for number in range(3):
        scene.join(f"g{number}")
    asked, record = [], scene.router._departures.record
    monkeypatch.setattr(scene.router._departures, "record", lambda: asked.append(1) or record())
    scene.store.error = UNAVAILABLE
    while len(scene.router._peers):
        asked.clear()
        scene.tick()
    assert len(asked) == 1


def test_a_peer_that_came_back_meanwhile_keeps_its_leases(scene: RouterScene):
    peer = scene.join("g0")
    peer.lease()
    scene.store.error = UNAVAILABLE
    scene.wait(scene.run.broker.peer_timeout_s + 1)
    scene.join()
    scene.store.error = None
    scene.tick()
    assert scene.store.counts().leased == 2
    assert scene.store.counts().returned == 0


def test_nothing_lapses_right_after_an_outage_so_that_its_holder_can_renew_it_first(scene: RouterScene):
    reaped_at: list[float] = []
    scene.store.reap = lambda **_: reaped_at.append(scene.clock.now) or []
    scene.tick()
    assert len(reaped_at) == 1
    scene.store.error = StoreCannotWriteError("its disk is full")
    scene.tick()
    scene.store.error = None
    scene.tick()
    assert len(reaped_at) == 1
    scene.tick(10)
    assert len(reaped_at) == 2


class OutageScene:
    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.reported: list[str] = []
        self.outage = StoreOutage(report=self.reported.append, clock=self.clock)

    def fail(self, error: StoreUnavailableError, *, at: float) -> None:
        self.clock.now = at
        self.outage.record(error)


def test_a_thousand_failures_produce_few_lines_and_the_end_is_reported_once():
    scene = OutageScene()
    for number in range(1000):
        scene.fail(StoreUnavailableError("it does not answer"), at=100 + number / 100)
    assert scene.reported == [f"waiting for the store for {s} s: it does not answer" for s in (0, 5)]
    assert scene.outage.reason == "store_unavailable"
    assert round(scene.outage.seconds) == 10
    scene = OutageScene()
    scene.outage.end()
    scene.fail(StoreCannotWriteError("its disk is full"), at=101)
    assert scene.outage.reason == "store_cannot_write"
    scene.clock.now = 103
    scene.outage.end()
    scene.outage.end()
    scene.fail(StoreUnavailableError("gone"), at=104)
    assert scene.outage.seconds == 0
    assert scene.reported == [
        "waiting for the store for 0 s: its disk is full",
        "the store works again after 2.0 s",
        "waiting for the store for 0 s: gone",
    ]
