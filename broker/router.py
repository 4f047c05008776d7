"""Router: the broker's loop. It moves messages and holds no state that a restart could lose.

Consumes: every message of broker/messages.py.
Produces: answers, pings, news of members, relayed weight control.
Waits for: the next message, at most `timeout_s` per step.
Woken by: any peer.
Invariant: whatever it forgets by dying is in the store, or is said again by the peers at their next Hello.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from slipstream.broker.dataset import Dataset
from slipstream.broker.handshake import Handshake, Objection, objection_to_unreadable
from slipstream.broker.ingest import Ingest
from slipstream.broker.lease_scheduler import LeaseScheduler
from slipstream.broker.messages import (
    Bye,
    Drain,
    EpochOpened,
    Hello,
    LeaseRequest,
    Member,
    Members,
    Message,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    Refuse,
    ReturnLeases,
    Update,
    UpdateApplied,
    Welcome,
    read_message,
)
from slipstream.broker.partial_decode import HelloHeader, decode_header, nacks_for_unreadable
from slipstream.broker.peers import Drains, Peer, Peers
from slipstream.broker.store_outage import StoreOutage
from slipstream.broker.transport.channels import Frames, ServerChannel
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError, StoreUnavailableError
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.logs import LogLimiter
from slipstream.runtime.model_files import ModelFingerprint

_MAX_MESSAGES_PER_STEP = 512
_SERVE_EVERY_S = 0.02
_SUSPECT_AFTER_PINGS = 2.5
"""Pings without an answer after which a generator takes part in no broadcast; answers are due within one."""
_REAP_EVERY_S = 1.0
_GOODBYE = "said bye"
"""Why a peer has left that meant to."""

log = structlog.get_logger(__name__)


class Router:
    """One broker. `step` does everything; call it in a loop from one thread."""

    def __init__(
        self,
        channel: ServerChannel,
        store: Store,
        *,
        run: RunConfig,
        config_json: str,
        train: Dataset,
        heldout: Dataset,
        store_url: str = "",
        token: str = "",
        model: ModelFingerprint | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`token`: what peers must know; `model`: what theirs must be, as far as it is known."""
        self._channel = channel
        self._store = store
        self._run = run
        self._config_json = config_json
        self._store_url = store_url
        self._model = model
        self._clock = clock
        self._incarnation = uuid.uuid4().hex
        self._peers = Peers(
            timeout_s=run.broker.peer_timeout_s,
            suspect_after_s=_SUSPECT_AFTER_PINGS * run.broker.heartbeat_s,
            transport=run.weights.transport,
            clock=clock,
        )
        self._doorkeeper = Handshake(token=token, namesake=self._place_of_namesake)
        self._outage = StoreOutage(report=log.warning, clock=clock)
        self._throttle = LogLimiter(log.warning, clock=clock)
        limit = run.broker.max_message_bytes
        self._ingest = Ingest(store, self._outage, throttle=self._throttle, max_payload_bytes=limit)
        self._desk = LeaseScheduler(store, run=run, train=train, heldout=heldout, outage=self._outage, clock=clock)
        self._drains = Drains()
        self._departed: list[tuple[Peer, str]] = []
        self._next_ping_at = 0.0
        self._next_reap_at = 0.0
        self._next_serve_at = 0.0
        self._members_changed = False
        self._members_told: Members | None = None

    def step(self, *, timeout_s: float) -> int:
        """Handle what has arrived, then what is due; blocks at most `timeout_s`. Returns the number of messages."""
        handled = self._receive_all(timeout_s=self._patience(timeout_s))
        for identity, answer in self._ingest.flush():
            self._desk.note(self._peers.get(identity), answer)
            self._send(identity, answer)
        self._try(self._serve_leases)
        self._try(self._tick)
        self._tell_members()
        return handled

    def drain_all(self, *, reason: str) -> None:
        """Ask every generator to leave."""
        for peer in self._peers.generators():
            self._send(peer.identity, Drain(reason))

    def _patience(self, timeout_s: float) -> float:
        return min(timeout_s, _SERVE_EVERY_S) if self._desk.has_requests else timeout_s

    def _try(self, action: Callable[[], object]) -> None:
        """A store that is away must not end the broker: it says so, and the peers' own retries do the rest."""
        try:
            action()
        except StoreUnavailableError as error:
            self._outage.record(error)

    # --- receiving -----------------------------------------------------------------------------------------------
    def _receive_all(self, *, timeout_s: float) -> int:
        received = self._channel.receive(timeout_s=timeout_s)
        count = 0
        while received is not None:
            self._try(partial(self._handle, *received))
            count += 1
            if count >= _MAX_MESSAGES_PER_STEP or self._ingest.is_full:
                break
            received = self._channel.receive(timeout_s=0)
        return count

    def _handle(self, identity: bytes, frames: Frames) -> None:
        try:
            message = read_message(frames, max_bytes=self._run.broker.max_message_bytes)
        except RecordRefusedError as refusal:
            self._answer_unreadable(identity, frames, refusal)
            return
        peer = self._peers.get(identity)
        if isinstance(message, Hello):
            self._welcome(identity, message)
        elif peer is None:
            log.debug("message_from_stranger", type=type(message).__name__)
            self._send(identity, Bye())
        else:
            self._dispatch(peer, message, frames)

    def _answer_unreadable(self, identity: bytes, frames: Frames, refusal: RecordRefusedError) -> None:
        """So that nobody waits for an answer that never comes. It is counted, and kept for a look."""
        self._throttle.log("frame_refused", refusal.reason, error=str(refusal))
        hello = decode_header(frames, HelloHeader)
        if hello:
            self._turn_away(identity, hello.sender, objection_to_unreadable(hello, refusal))
        elif self._peers.get(identity):
            for nack in nacks_for_unreadable(frames, refusal):
                self._send(identity, nack)
        # Nothing of a Hello is kept: a token may be in it.
        self._store.quarantine(refusal.reason, b"" if hello or not frames else frames[0])

    def _dispatch(self, peer: Peer, message: Message, frames: Frames) -> None:
        match message:
            case Put():
                for nack in self._ingest.take(peer.identity, message, frames[1:]):
                    self._send(peer.identity, nack)
            case LeaseRequest(max_trajectories=room):
                self._desk.ask(peer, max_trajectories=room)
                self._next_serve_at = 0.0
            case Pong():
                self._members_changed |= self._peers.note(peer, message)
            case ReturnLeases(lease_ids=ids, reason=reason):
                self._store.return_leases(lease_ids=ids, reason=reason, owner=peer.owner)
                log.info("leases_returned", peer=peer.hello.peer_id, leases=len(ids), reason=reason)
            case OpenEpoch() | Update() if peer.hello.role == "learner":
                self._relay_to(message.members, message)
            case EpochOpened() | UpdateApplied() if message.member == peer.member:
                if learner := self._peers.learner():
                    self._send(learner.identity, message)
            case Bye(reason=reason):
                self._part(peer, f"left: {reason}" if reason else _GOODBYE)
            case _:
                self._throttle.log("message_out_of_place", type(message).__name__, peer=peer.hello.peer_id)

    # --- peers ---------------------------------------------------------------------------------------------------
    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if objection := self._doorkeeper.objection(hello):
            self._turn_away(identity, hello.peer_id, objection)
            return
        replaced = self._peers.add(identity, msgspec.structs.replace(hello, token=""))
        for older in replaced:
            if older.owner != f"{hello.peer_id}/{hello.incarnation}":
                self._give_back(older, "replaced by a new incarnation")
        is_learner = hello.role == "learner"
        self._send(
            identity,
            Welcome(
                run_id=self._run.name,
                config_json=self._config_json,
                store_url=self._store_url if is_learner else "",
                version=self._store.run_state().version,
                credit_messages=self._run.broker.credit_messages,
                credit_bytes=self._run.broker.credit_bytes,
                broker_incarnation=self._incarnation,
                model=self._model,
            ),
        )
        # A peer that waited for us has said Hello once a second.
        if not any(older.identity == identity for older in replaced):
            log.info("peer_joined", role=hello.role, peer=hello.peer_id, host=hello.host, pid=hello.pid)
        self._members_changed = True

    def _turn_away(self, identity: bytes, peer_id: str, objection: Objection) -> None:
        """The peer first: the store may be away."""
        self._send(identity, Refuse(objection.sentence))
        if self._throttle.log("peer_refused", objection.kind, peer=peer_id, reason=objection.sentence):
            self._store.record_event(peer_id, f"refused: {objection.sentence}")

    def _place_of_namesake(self, hello: Hello) -> str:
        """Asks the connection, too: a peer that was killed and started again need not wait for its own silence."""
        namesake = self._peers.namesake(hello)
        if namesake is None or not self._send(namesake.identity, Ping(sent_at=self._clock())):
            return ""
        return f"process {namesake.hello.pid} on {namesake.hello.host}"

    def _part(self, peer: Peer, reason: str) -> None:
        self._peers.remove(peer.identity)
        self._give_back(peer, reason)

    def _give_back(self, peer: Peer, reason: str) -> None:
        self._desk.forget(peer)
        self._members_changed = True
        self._departed.append((peer, reason))
        self._try(self._settle_departures)

    def _settle_departures(self) -> None:
        """A departure stays on the list until the store knows of it; nobody who has come back loses its leases."""
        while self._departed:
            peer, reason = self._departed[0]
            if peer.owner not in [other.owner for other in self._peers]:
                returned = self._store.return_leases_of(owner=peer.owner, reason=reason)
                where = {"host": peer.hello.host, "pid": peer.hello.pid}
                gone = {"role": peer.hello.role, "state": "gone", "reason": reason, **where}
                self._store.report_role(peer.hello.peer_id, gone)
                if reason != _GOODBYE:
                    self._store.record_event(peer.hello.peer_id, f"{reason}; {returned} leases returned")
                log.info("peer_gone", peer=peer.hello.peer_id, reason=reason, leases_returned=returned)
            del self._departed[0]

    def _relay_to(self, members: list[Member], message: Message) -> None:
        wanted = {(m.peer_id, m.incarnation) for m in members}
        for peer in self._peers.generators():
            if (peer.hello.peer_id, peer.hello.incarnation) in wanted:
                self._send(peer.identity, message)

    def _tell_members(self) -> None:
        learner, members = self._peers.learner(), self._peers.members()
        if learner is not None and (self._members_changed or members != self._members_told):
            self._members_changed = not self._send(learner.identity, members)
            self._members_told = members

    # --- what is due ---------------------------------------------------------------------------------------------
    def _serve_leases(self) -> None:
        if self._desk.has_requests and self._clock() >= self._next_serve_at:
            self._next_serve_at = self._clock() + _SERVE_EVERY_S
            for identity, prompts in self._desk.serve():
                if not self._send(identity, prompts):
                    self._store.return_leases(lease_ids=[p.lease.id for p in prompts.prompts], reason="undeliverable")

    def _tick(self) -> None:
        now = self._clock()
        if now >= self._next_ping_at:
            self._next_ping_at = now + self._run.broker.heartbeat_s
            self._ping_all(now)
            self._tell_store()
        if now >= self._next_reap_at:
            self._next_reap_at = now + _REAP_EVERY_S
            self._throttle.flush()
            self._reap()

    def _reap(self) -> None:
        reaped = self._store.reap(group_deadline=self._run.buffer.group_deadline)
        for event in reaped:
            log.warning("reaped", what=event)
        if reaped:
            # Together: the leases of a dead generator must not push everything else out of the list.
            self._store.record_event("broker", "; ".join(reaped))

    def _ping_all(self, now: float) -> None:
        for peer in self._peers.take_silent():
            self._give_back(peer, f"silent for {self._run.broker.peer_timeout_s:g} s")
        for peer in self._peers:
            peer.is_cut_off = not self._send(peer.identity, Ping(sent_at=now))

    def _tell_store(self) -> None:
        """Leases that are still worked on, and how everybody is. After all pings: those must not wait for the store."""
        self._settle_departures()
        for peer in self._peers:
            if peer.lease_ids:
                lease_s = self._run.broker.lease_s
                self._store.renew_leases(owner=peer.owner, lease_s=lease_s, lease_ids=peer.lease_ids)
            self._store.report_role(peer.hello.peer_id, peer.report)
        self._store.report_role("broker", self._own_gauges())
        self._do_requests()
        self._outage.end()

    def _do_requests(self) -> None:
        requests = self._store.take_requests("broker")
        if requests or not self._drains.are_none:
            self._drains.take(requests, now=self._store.now())
        for peer in self._drains.due(self._peers.generators()):
            if self._send(peer.identity, Drain("asked to leave")) and self._drains.note_told(peer):
                self._store.record_event(peer.hello.peer_id, "is told to leave, as asked")

    def _own_gauges(self) -> dict[str, object]:
        deferred = {f"deferred_{reason}": number for reason, number in self._ingest.deferred.items()}
        reason = f"trajectories are deferred: {self._ingest.reason}" if self._ingest.reason else ""
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        waits = {"reason": reason, "waits_for": "store" if reason else ""}
        return {"role": "broker", "state": "ready", "peers": len(list(self._peers)), **waits, **where, **deferred}

    def _send(self, identity: bytes, message: Message) -> bool:
        sent = self._channel.send(identity, [encode(message)])
        if not sent:
            self._throttle.log("undeliverable", type(message).__name__)
        return sent
