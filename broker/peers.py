"""Peers: who is connected, when they were last heard, what they last said of themselves."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.broker.messages import Gauges, Hello, Member, Members, MemberState, Pong
from slipstream.broker.weights.records import WeightTransport
from slipstream.runtime.clock import Clock


@dataclass
class Peer:
    """One incarnation of a generator or the learner, as the broker sees it."""

    identity: bytes
    """Of its connection."""
    hello: Hello
    """Who it says it is."""
    heard_at: float
    """Broker's clock, seconds."""
    state: str = "starting"
    """Pong.state."""
    version: int = -1
    """Pong.version."""
    reason: str = ""
    """Pong.reason."""
    gauges: Gauges = field(default_factory=dict)
    """Pong.gauges."""
    lease_ids: list[str] = field(default_factory=list)
    """Pong.lease_ids."""
    is_cut_off: bool = False
    """Whether its connection was gone at the last ping."""

    @property
    def owner(self) -> str:
        """Name its leases are kept under: an incarnation, so that a restarted generator does not inherit them."""
        return f"{self.hello.peer_id}/{self.hello.incarnation}"

    @property
    def report(self) -> dict[str, object]:
        """What the store is told of it."""
        return {
            "role": self.hello.role,
            "state": self.state,
            "version": self.version,
            "reason": self.reason,
            "host": self.hello.host,
            "pid": self.hello.pid,
            **self.gauges,
        }

    @property
    def member(self) -> Member:
        """As a membership epoch names it."""
        return Member(self.hello.peer_id, self.hello.incarnation)


class Peers:
    """The table of living peers, by connection."""

    def __init__(
        self, *, timeout_s: float, suspect_after_s: float, transport: WeightTransport = "collective", clock: Clock
    ) -> None:
        """`transport`: of the generators that do not choose one themselves."""
        self._timeout_s = timeout_s
        self._suspect_after_s = suspect_after_s
        self._transport = transport
        self._clock = clock
        self._by_identity: dict[bytes, Peer] = {}

    def __iter__(self) -> Any:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        """The peer on this connection, marked as heard just now."""
        peer = self._by_identity.get(identity)
        if peer:
            peer.heard_at = self._clock()
        return peer

    def namesake(self, hello: Hello) -> Peer | None:
        """Another incarnation with this role and id that is not known to be silent."""
        for peer in self._by_identity.values():
            same_name = (peer.hello.role, peer.hello.peer_id) == (hello.role, hello.peer_id)
            if same_name and peer.hello.incarnation != hello.incarnation and self._is_alive(peer):
                return peer
        return None

    def add(self, identity: bytes, hello: Hello) -> list[Peer]:
        """Enter a peer; returns the entries it replaces: its own older connection, a dead namesake, and whoever spoke
        on this connection before, since one connection has one name."""
        name = (hello.role, hello.peer_id)
        replaced = [p for p in self if p.identity == identity or (p.hello.role, p.hello.peer_id) == name]
        for peer in replaced:
            self.remove(peer.identity)
        self._by_identity[identity] = Peer(identity, hello, heard_at=self._clock())
        return replaced

    def remove(self, identity: bytes) -> Peer | None:
        """Take a peer out."""
        return self._by_identity.pop(identity, None)

    def take_silent(self) -> list[Peer]:
        """Remove and return the peers not heard for too long."""
        silent = [peer for peer in self if not self._is_alive(peer)]
        for peer in silent:
            self.remove(peer.identity)
        return silent

    def generators(self) -> list[Peer]:
        """Living generators, by name."""
        return sorted((p for p in self if p.hello.role == "generator"), key=lambda p: p.hello.peer_id)

    def learner(self) -> Peer | None:
        """The learner, if it is here."""
        return next((p for p in self if p.hello.role == "learner"), None)

    def note(self, peer: Peer, pong: Pong) -> bool:
        """Keep what a Pong says; returns whether state or version changed."""
        changed = (peer.state, peer.version) != (pong.state, pong.version)
        peer.state, peer.version, peer.reason = pong.state, pong.version, pong.reason
        peer.gauges, peer.lease_ids = pong.gauges, pong.lease_ids
        return changed

    def members(self) -> Members:
        """The message that tells the learner who is alive; who may not be is `silent`, whatever it said last.

        A broadcast with a member that has died or stands still would hold up all others, long before it counts as gone.
        """
        return Members(
            [
                MemberState(p.member, self._state(p), p.version, p.hello.weight_transport or self._transport)
                for p in self.generators()
            ]
        )

    def _state(self, peer: Peer) -> str:
        silent_s = self._clock() - peer.heard_at
        return "silent" if peer.is_cut_off or silent_s > self._suspect_after_s else peer.state

    def _is_alive(self, peer: Peer) -> bool:
        return self._clock() - peer.heard_at <= self._timeout_s


# --- requests to drain -----------------------------------------------------------------------------------------------
DRAIN_REQUEST = "drain/"
"""How the subject of a request begins; the generator's id follows. Its value: until when it counts (store clock)."""


class Drains:
    """Whom the broker was asked to drain, until they have gone: one may come only later, and a word may get lost."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    def take(self, requests: dict[str, str], *, now: float) -> None:
        """Requests as they were left in the store; what nobody waits for any more is forgotten."""
        for subject, ends_at in requests.items():
            if subject.startswith(DRAIN_REQUEST):
                self._asked[subject.removeprefix(DRAIN_REQUEST)] = _Asked(float(ends_at))
        self._asked = {name: asked for name, asked in self._asked.items() if now < asked.ends_at}

    @property
    def are_none(self) -> bool:
        """Whether nobody is to be told."""
        return not self._asked

    def due(self, generators: Iterable[Peer]) -> list[Peer]:
        """Those that are to be told now, once more if need be; never another one that came under the same name."""
        return [peer for peer in generators if peer.state != "draining" and self._means(peer)]

    def note_told(self, peer: Peer) -> bool:
        """It was told. Returns whether for the first time."""
        asked = self._asked[peer.hello.peer_id]
        is_first, asked.owner = not asked.owner, peer.owner
        return is_first

    def _means(self, peer: Peer) -> bool:
        asked = self._asked.get(peer.hello.peer_id)
        return asked is not None and asked.owner in ("", peer.owner)


@dataclass
class _Asked:
    ends_at: float
    """Store's clock."""
    owner: str = ""
    """Incarnation that was told; empty before that."""
