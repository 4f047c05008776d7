from collections import Counter
from collections.abc import Iterable

import msgspec

from slipstream.broker.messages import LenderError, Member, Members, MemberState
from slipstream.broker.transport.endpoints import machine_id
from slipstream.learner.publishing.fetches import Lenders, MemberTable, Place
from tests.fakes import FakeClock

FAN_OUT = 4


class Scene:
    """Generators on many machines, none of them the learner's, `per_host` on each."""

    def __init__(self, *, num_hosts: int, per_host: int = 1, fan_out: int = FAN_OUT) -> None:
        self.clock = FakeClock()
        self.events: list[tuple[str, str]] = []
        self.table = MemberTable(on_evict=lambda peer_id, text: self.events.append((peer_id, text)), clock=self.clock)
        self.lenders = Lenders(self.table, fan_out=fan_out, clock=self.clock)
        self.states = {
            name: MemberState(Member(name, "1"), "ready", 0, "snapshot", f"host-{host}", f"tcp://10.0.0.{host}:{place}")
            for host in range(num_hosts)
            for place in range(per_host)
            for name in [f"g{host:03}-{place}"]
        }
        self.join(self.states)
        self.places: dict[str, Place] = {}

    def join(self, names: Iterable[str]) -> None:
        self.table.update(Members([self.states[name] for name in sorted(names)]))

    def assign(self, names: Iterable[str] | None = None, *, version: int = 1, by_delta: bool = False) -> None:
        members = [Member(name, "1") for name in sorted(self.states if names is None else names)]
        for place, together in self.lenders.assign(version, members, by_delta=by_delta).items():
            self.places |= {member.peer_id: place for member in together}

    def end(self, *names: str, errors: tuple[LenderError, ...] = (), is_lending: bool = True) -> None:
        for name in names:
            self.lenders.record_end(Member(name, "1"), is_lending=is_lending, errors=errors)

    def address(self, name: str) -> str:
        return self.states[name].lends_at

    def lend_at(self, address: str) -> None:
        """Change the address of all generators; `{name}` in it is the generator's."""
        for name, state in self.states.items():
            self.states[name] = msgspec.structs.replace(state, lends_at=address.format(name=name))
        self.join(self.states)

    def first_lent(self) -> tuple[str, str]:
        return next((name, place.lenders[0]) for name, place in self.places.items() if place.lenders)

    @property
    def from_learner(self) -> set[str]:
        return {name for name, place in self.places.items() if not place.lenders}

    @property
    def loads(self) -> Counter[str]:
        """Number of generators that fetch from each address first."""
        return Counter(place.lenders[0] for place in self.places.values() if place.lenders)


def test_the_learner_and_each_lender_serve_fan_out_generators_and_no_cycle_forms():
    for count in (1, 4, 5, 16, 84, 200):
        scene = Scene(num_hosts=count)
        scene.assign()
        assert len(scene.from_learner) == min(count, FAN_OUT)
        assert max(scene.loads.values(), default=0) <= FAN_OUT
        lending = {scene.address(name) for name, place in scene.places.items() if place.is_lent}
        assert set(scene.loads) <= lending
        # No more generators than needed keep the version in memory.
        assert len(lending) == -(-count // FAN_OUT)
    scene = Scene(num_hosts=100)
    placed: set[str] = set()
    for name in sorted(scene.states):
        scene.assign([name])
        assert set(scene.places[name].lenders) <= placed
        placed.add(scene.address(name))


def test_machines_of_lenders_and_of_the_learner_are_taken_into_account():
    scene = Scene(num_hosts=6, per_host=3)
    scene.assign()
    for host in range(6):
        first, *others = (f"g{host:03}-{place}" for place in range(3))
        assert {scene.places[name].lenders[0] for name in others} == {scene.address(first)}
        assert scene.places[first].is_lent
    assert len(scene.from_learner) == FAN_OUT
    assert all(name.endswith("-0") for name in scene.from_learner)
    scene = Scene(num_hosts=3)
    own = MemberState(Member("own", "1"), "ready", 0, "snapshot", machine_id(), "tcp://10.0.0.9:1")
    scene.states["own"] = own
    scene.join(scene.states)
    scene.assign(["own"])
    assert scene.places["own"] == Place()
    scene.assign()
    assert len(scene.from_learner) == 4
    scene = Scene(num_hosts=2, per_host=8, fan_out=1)
    scene.lend_at("ipc:///tmp/{name}.sock")
    scene.assign()
    assert any(place.lenders for place in scene.places.values())
    for name, place in scene.places.items():
        assert all(address.startswith(f"ipc:///tmp/{name[:4]}") for address in place.lenders)
    scene = Scene(num_hosts=20)
    scene.lend_at("")
    scene.assign()
    assert set(scene.places.values()) == {Place()}


def test_generators_that_fetch_one_by_one_form_a_tree_and_delta_fetchers_avoid_lenders_without_deltas():
    scene = Scene(num_hosts=64)
    for name in sorted(scene.states):
        scene.assign([name], version=2)
        scene.end(name)
    assert len(scene.from_learner) == FAN_OUT
    scene.places.clear()
    scene.assign(version=3)
    assert len(scene.from_learner) == FAN_OUT
    scene = Scene(num_hosts=12)
    joining, holding = sorted(scene.states)[:6], sorted(scene.states)[6:]
    scene.assign(joining)
    whole = set(scene.loads)
    scene.places.clear()
    scene.assign(holding, by_delta=True)
    assert not whole & set(scene.loads)
    assert len(scene.from_learner) == FAN_OUT


def test_a_liar_never_lends_again_a_failed_lender_rests_and_reports_about_others_are_ignored():
    scene = Scene(num_hosts=12)
    scene.assign()
    victim, liar = scene.first_lent()
    name = next(name for name in scene.states if scene.address(name) == liar)
    scene.end(victim, errors=(LenderError(liar, "bucket 3 must have the learner's digest", is_altered=True),))
    ((peer_id, text),) = scene.events
    assert (peer_id, victim in text, "bucket 3" in text) == (name, True, True)
    scene.clock.now += 1e6
    scene.assign(version=2)
    assert liar not in scene.loads
    assert not scene.places[name].is_lent
    scene = Scene(num_hosts=12)
    scene.assign()
    victim, failed = scene.first_lent()
    scene.end(victim, errors=(LenderError(failed, "nobody listens there"),))
    scene.assign(version=2)
    assert failed not in scene.loads
    assert scene.events == []
    scene.clock.now += 61
    scene.places.clear()
    scene.assign(version=3)
    assert failed in scene.loads
    scene = Scene(num_hosts=12)
    scene.assign()
    (first, *_) = scene.loads
    stranger = next(name for name, place in scene.places.items() if first not in place.lenders)
    scene.end(stranger, errors=(LenderError(first, "it lies", is_altered=True),))
    assert scene.events == []
    scene.assign(version=2)
    assert first in scene.loads


def test_dead_failed_and_busy_lenders_get_no_more_fetchers():
    scene = Scene(num_hosts=12)
    inner, late = sorted(scene.states)[:11], sorted(scene.states)[11]
    scene.assign(inner)
    lending = [name for name in inner if scene.places[name].is_lent]
    scene.end(lending[0], is_lending=False)
    scene.join(set(scene.states) - {lending[1]})
    scene.assign([late])
    assert scene.places[late].lenders[0] == scene.address(lending[2])
    scene = Scene(num_hosts=20)
    (only, *others) = sorted(scene.states)
    lender = scene.states[only]
    scene.lend_at("")
    scene.states[only] = lender
    scene.join(scene.states)
    scene.assign([only, *others[:12]])
    assert scene.loads == {scene.address(only): FAN_OUT}
    assert len(scene.from_learner) == 13 - FAN_OUT
    fetching = [name for name, place in scene.places.items() if place.lenders]
    scene.end(*fetching[:2])
    scene.assign(others[12:])
    assert scene.loads == {scene.address(only): FAN_OUT + 2}
