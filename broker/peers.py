"""Peers: connected generators and the learner, departures, and drain requests."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import ceil

import structlog

from slipstream.broker.messages import (
    MAX_REASON_LENGTH,
    Drain,
    Hello,
    Member,
    Members,
    MemberState,
    Message,
    Pong,
    WeightTransport,
)
from slipstream.buffer.records import Heartbeat
from slipstream.buffer.role_reports import LEARNER
from slipstream.buffer.store import DRAIN_REQUEST, Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

log = structlog.get_logger(__name__)

_SUSPECT_AFTER_PINGS = 2.5
"""Unanswered pings after which a generator is excluded from broadcasts."""
_UNHEARD = Pong(-1.0, "starting", version=-1)


@dataclass
class Peer:
    """One incarnation of a generator or the learner, as the broker sees it."""

    identity: bytes
    """ROUTER identity of its connection."""
    hello: Hello
    heard_at: float
    """Time of its last message, seconds by the broker's clock."""
    status: Pong = _UNHEARD
    """Newest Pong of the peer."""
    is_disconnected: bool = False
    """Whether the last ping could not be delivered."""
    guest: str = ""
    """Guest that owns its key; empty for the run's token."""

    @property
    def owner(self) -> str:
        """Owner of its leases; a restarted generator does not inherit them."""
        return f"{self.hello.peer_id}/{self.hello.incarnation}"

    def beat(self, more: dict[str, object]) -> Heartbeat:
        hello, status = self.hello, self.status
        own = {"role": hello.role, "state": status.state, "version": status.version, "reason": status.reason}
        # The peer's gauges come first, so that they cannot replace these.
        gauges = {**status.gauges, **own, "host": hello.host, "pid": hello.pid, **more}
        return Heartbeat(hello.peer_id, gauges, self.owner, self.status.lease_ids)

    @property
    def member(self) -> Member:
        return Member(self.hello.peer_id, self.hello.incarnation)


class Peers:
    """Connected peers by ROUTER identity, random per connection. Names come only from Hello."""

    def __init__(self, run: RunConfig, *, clock: Clock) -> None:
        self._timeout_s = run.broker.peer_timeout_s
        self._suspect_after_s = _SUSPECT_AFTER_PINGS * run.broker.heartbeat_s
        self._transport: WeightTransport = run.weights.transport
        self._clock = clock
        # Least recently heard first, so that the search for silent peers can stop early.
        self._by_identity: OrderedDict[bytes, Peer] = OrderedDict()
        self._by_name: dict[tuple[str, str], Peer] = {}
        self._silent: list[Peer] = []
        self._ran_at = clock()

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def __len__(self) -> int:
        return len(self._by_identity)

    def __contains__(self, peer: Peer) -> bool:
        return self._by_identity.get(peer.identity) is peer

    def get(self, identity: bytes) -> Peer | None:
        """Return the peer of this connection, and mark it as heard."""
        # Any message counts, because a busy peer may send its Pongs late.
        peer = self._by_identity.get(identity)
        if peer:
            peer.heard_at = self._clock()
            self._by_identity.move_to_end(identity)
        return peer

    def find_duplicate(self, hello: Hello) -> Peer | None:
        """Another live incarnation with the same role and id."""
        peer = self._by_name.get((hello.role, hello.peer_id))
        is_other = peer is not None and peer.hello.incarnation != hello.incarnation and self._is_alive(peer)
        return peer if is_other else None

    def add(self, identity: bytes, hello: Hello, *, guest: str = "") -> list[Peer]:
        """Add a peer; returns those it replaces: one with its name, and any other on its connection."""
        named = self._by_name.get((hello.role, hello.peer_id))
        replaced = [peer for peer in (self.remove(identity), named and self.remove(named.identity)) if peer]
        peer = self._by_identity[identity] = Peer(identity, hello, self._clock(), guest=guest)
        self._by_name[hello.role, hello.peer_id] = peer
        return replaced

    def remove(self, identity: bytes) -> Peer | None:
        peer = self._by_identity.pop(identity, None)
        if peer:
            del self._by_name[peer.hello.role, peer.hello.peer_id]
        return peer

    def pop_silent(self) -> list[Peer]:
        silent = [peer for peer in self if not self._is_alive(peer)]
        for peer in silent:
            self.remove(peer.identity)
        return silent

    def excuse_pause(self) -> None:
        """Exclude time for which the broker was stopped or blocked from the peers' silence."""
        now = self._clock()
        pause_s, self._ran_at = now - self._ran_at, now
        if pause_s > self._suspect_after_s:
            # Messages sent during the pause may still be queued.
            for peer in self._by_identity.values():
                peer.heard_at = min(now, peer.heard_at + pause_s)

    def generators(self) -> list[Peer]:
        return sorted((p for p in self if p.hello.role == "generator"), key=lambda p: p.hello.peer_id)

    def generator(self, peer_id: str) -> Peer | None:
        return self._by_name.get(("generator", peer_id))

    def learner(self) -> Peer | None:
        return self._by_name.get(("learner", LEARNER))

    def weights_at(self) -> str:
        learner = self.learner()
        return learner.status.lends_at if learner else ""

    def is_back(self, peer: Peer) -> bool:
        """Whether a removed peer has reconnected with the same incarnation."""
        named = self._by_name.get((peer.hello.role, peer.hello.peer_id))
        return named is not None and named.owner == peer.owner

    def silence_has_changed(self) -> bool:
        """Whether the late peers, and so `members`, have changed since the last call."""
        silent = list(takewhile(self._is_late, self._by_identity.values()))
        has_changed, self._silent = silent != self._silent, silent
        return has_changed

    def record_pong(self, peer: Peer, pong: Pong) -> bool:
        before, peer.status = peer.status, pong
        return (before.state, before.version, before.lends_at) != (pong.state, pong.version, pong.lends_at)

    def members(self) -> Members:
        """Build the learner's membership message.

        Late generators are `silent` long before removal, since a dead member delays a broadcast.
        """
        members = []
        for peer in self.generators():
            hello, status = peer.hello, peer.status
            # No broadcasts for guests, because all members wait for each other.
            own = "delta" if peer.guest and self._transport == "collective" else self._transport
            state, transport = "silent" if self.is_silent(peer) else status.state, hello.weight_transport or own
            members.append(MemberState(peer.member, state, status.version, transport, hello.machine, status.lends_at))
        return Members(members)

    def is_silent(self, peer: Peer) -> bool:
        """Whether the peer misses pings: stopped, dead, or moved."""
        return peer.is_disconnected or self._is_late(peer)

    def _is_late(self, peer: Peer) -> bool:
        return self._clock() - peer.heard_at > self._suspect_after_s

    def _is_alive(self, peer: Peer) -> bool:
        return self._clock() - peer.heard_at <= self._timeout_s


_PINGED_AT_ONCE = 64


class PingRound:
    """One pass over all peers, spread over the ping interval to keep each step short."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._left = list(peers)
        self.share = 1 / max(1, ceil(len(self._left) / _PINGED_AT_ONCE))
        """Fraction of the ping interval between two calls of `take`."""

    @property
    def is_over(self) -> bool:
        return not self._left

    def take(self) -> list[Peer]:
        taken, self._left = self._left[:_PINGED_AT_ONCE], self._left[_PINGED_AT_ONCE:]
        return taken


# --- departures ------------------------------------------------------------------------------------------------------
LEFT = "left"
"""Reason of a regular departure; others are recorded as events."""


class Departures:
    """Departed peers with leases that the store has not taken back yet."""

    def __init__(self, store: Store, peers: Peers, *, run: RunConfig, broker: str) -> None:
        self._store = store
        self._peers = peers
        self._run = run
        self._broker = broker
        self._departed: list[tuple[Peer, str]] = []

    def add(self, peer: Peer, reason: str) -> None:
        self._departed.append((peer, reason))

    def record(self) -> None:
        """Return the leases of departed peers. After StoreUnavailableError, the next call resumes."""
        elsewhere: set[str] = set()
        if self._departed and self._run.broker.shards > 1:
            # Other brokers may serve generators that moved while this broker hung.
            oldest = self._store.now() - self._run.broker.peer_timeout_s
            roles = [gauges for gauges in self._store.roles().values() if gauges["reported_at"] >= oldest]
            elsewhere = {str(each["owner"]) for each in roles if "owner" in each and each["broker"] != self._broker}
        while self._departed:
            peer, reason = self._departed[0]
            # It may have reconnected here or elsewhere and still work on its leases.
            if not self._peers.is_back(peer) and peer.owner not in elsewhere:
                returned = self._store.return_leases_of(owner=peer.owner, reason=reason[:MAX_REASON_LENGTH])
                where = {"host": peer.hello.host, "pid": peer.hello.pid}
                gone = {"role": peer.hello.role, "state": "gone", "reason": reason, **where}
                self._store.report_role(peer.hello.peer_id, gone)
                if reason != LEFT:
                    self._store.record_event(peer.hello.peer_id, f"{reason}; {returned} leases returned")
                log.info("peer_gone", peer=peer.hello.peer_id, reason=reason, leases_returned=returned)
            del self._departed[0]


def send_drain_requests(store: Store, peers: Peers, *, send: Callable[[bytes, Message], bool]) -> None:
    """Send each drain request in the store, repeatedly, because a dying connection loses it.

    The store keeps it, also if this broker ends, until the generator drains or its deadline passes.
    """
    if not (requests := store.requests("broker")):
        return
    heard = (peer for peer in peers.generators() if not peers.is_silent(peer))
    here = {DRAIN_REQUEST + peer.hello.peer_id: peer for peer in heard}
    now, over = store.now(), []
    for subject, value in requests.items():
        deadline, _, owner = value.partition(" ")
        peer = here.get(subject)
        # Sending binds the request to that incarnation: a successor with the same name is not drained.
        is_answered = peer is not None and (peer.status.state == "draining" or owner not in ("", peer.owner))
        if is_answered or now >= float(deadline):
            over.append(subject)
        elif peer and send(peer.identity, Drain("drain requested")) and not owner:
            store.request("broker", subject, f"{deadline} {peer.owner}")
            store.record_event(peer.hello.peer_id, "ordered to drain, as requested")
    store.take_requests("broker", subjects=over)
