"""Router: the broker's message loop.

Consumes: every message of broker/messages.py that peers send.
Produces: answers, pings, membership updates for the learner, relayed weight orders.
Waits for: the next message, at most `timeout_s` per step.
Woken by: any peer.
Invariant: a restart loses no state. All state is in the store, or peers send it again after their next Hello.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog
from msgspec.structs import replace

from slipstream.broker.chief import Chief
from slipstream.broker.dataset import Dataset
from slipstream.broker.guests import Guests
from slipstream.broker.handshake import Inspection, Rejection, check_hello, reject_unreadable
from slipstream.broker.ingest import Ingest
from slipstream.broker.lease_scheduler import LeaseScheduler
from slipstream.broker.messages import (
    Ack,
    Audited,
    Bye,
    Drain,
    EpochOpened,
    Frames,
    Hello,
    HelloHeader,
    LeaseRequest,
    Message,
    OpenEpoch,
    Ping,
    Pong,
    Profile,
    Put,
    Refuse,
    ReturnLeases,
    Update,
    UpdateApplied,
    Welcome,
    decode_header,
    decode_message,
    nacks_for_unreadable,
)
from slipstream.broker.peers import LEFT, Departures, Peer, Peers, PingRound, send_drain_requests
from slipstream.broker.transport.channels import ServerChannel
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError, StoreUnavailableError
from slipstream.buffer.records import Heartbeat
from slipstream.buffer.store import Store, StoreOutage
from slipstream.buffer.trajectory import make_trajectory_id
from slipstream.configs.broker import FIRST_BROKER
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.logs import LogLimiter
from slipstream.runtime.model_files import ModelFingerprint
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import TimeAccount, Trace

_MAX_MESSAGES_PER_STEP = 512
_CREDIT_MESSAGES, _CREDIT_BYTES = 512, 64 * 2**20
"""Credit of each generator: enough to keep it busy for a round trip, but little enough that all backlogs fit into
memory during a store outage."""
_SERVE_INTERVAL_S = 0.02
_SERVE_SHARE = 0.2
"""Maximum share of the broker's time spent on lease rounds that lease nothing."""
_MEMBERS_AT_ONCE, _MEMBERS_INTERVAL_S = 64, 1e-4
"""Peers up to which the learner gets every change at once, and the delay that each further one adds, seconds."""
_REAP_INTERVAL_S = 1.0
_REAP_AFTER_OUTAGE_S = 10.0
"""Time to renew leases and claims after the last failed call to the store."""

log = structlog.get_logger(__name__)


class Router:
    """The broker's loop over one server channel. Single-threaded."""

    def __init__(
        self,
        channel: ServerChannel,
        store: Store,
        *,
        run: RunConfig,
        train: Dataset,
        heldout: Mapping[str, Dataset],
        store_url: str = "",
        model: ModelFingerprint | None = None,
        name: str = FIRST_BROKER,
        address: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        """`model`: None without a model folder. `address`: for other machines; empty if they cannot reach it."""
        self._channel = channel
        self._store = store
        self._run = run
        self._store_url = store_url
        self._model = model
        self._address = address
        self._clock = clock
        self._incarnation = uuid.uuid4().hex
        self.chief = Chief(store, run, name=name, incarnation=self._incarnation, address=address, clock=clock)
        self._peers = Peers(run, clock=clock)
        self._outage = StoreOutage(report=log.warning, clock=clock)
        self._log_limiter = LogLimiter(log.warning, clock=clock)
        self._guests = Guests(run, store, self._peers, send=self._send, depart=self._depart, clock=clock, model=model)
        limit = run.broker.max_message_bytes
        self._ingest = Ingest(store, self._outage, self._guests.check, self._log_limiter, max_payload_bytes=limit)
        self._num_heldout = {name: len(rows) for name, rows in heldout.items()}
        self._leases = LeaseScheduler(
            store, self.chief, run=run, train=train, heldout=heldout, outage=self._outage, guests=self._guests,
            clock=clock,
        )  # fmt: skip
        self._departures = Departures(store, self._peers, run=run, broker=name)
        self._trace = Trace(name, RunFolder(run).profile)
        self._account = TimeAccount("routing", trace=self._trace)
        if (steps := run.profile.steps) and steps[0] - run.profile_lead_steps <= store.run_state().step + 1 <= steps[1]:
            # The learner's order would come after the generators' first leases.
            self._trace.obey("events")
        self._inspection = Inspection(run, channel.send, self._peers.weights_at, self.chief.living_for, model=model)
        self._ping_round = PingRound(())
        self._members_changed = False
        self._next_ping_at = self._next_reap_at = self._next_members_at = self._next_serve_at = self._may_serve_at = 0.0

    def step(self, *, timeout_s: float) -> None:
        """Handle received messages, then do due periodic work; blocks at most `timeout_s`."""
        # Pacing may admit prompts without any message arriving.
        if self._leases.has_requests:
            timeout_s = min(timeout_s, _SERVE_INTERVAL_S)
        with self._account.phase("waiting"):
            received = self._channel.receive(timeout_s=timeout_s)
        count = 0
        while received is not None:
            self._try(partial(self._handle, *received))
            count += 1
            # Bounded, so that a flood of messages does not delay Acks and pings.
            if count >= _MAX_MESSAGES_PER_STEP or self._ingest.is_full:
                break
            received = self._channel.receive(timeout_s=0)
        # A sender deletes its copy on Ack, so send Acks only after the store has confirmed the insert.
        with self._account.phase("storing"):
            answers = self._ingest.flush()
        for identity, answer in answers:
            self._leases.record_answer(peer := self._peers.get(identity), answer)
            self._try(partial(self._guests.record_answer, peer, answer))
            self._trace.mark("stored", *(answer.ids if isinstance(answer, Ack) else ()))
            self._send(identity, answer)
        self._guests.poll()
        self._try(self._serve_leases)
        self._try(self._run_periodic)
        self._members_changed |= self._peers.silence_has_changed()
        learner, now = self._peers.learner(), self._clock()
        if learner is not None and self._members_changed and now >= self._next_members_at:
            self._members_changed = not self._send(learner.identity, self._peers.members())
            self._next_members_at = now + _MEMBERS_INTERVAL_S * max(0, len(self._peers) - _MEMBERS_AT_ONCE)
        self._inspection.send_due()

    def drain_all(self, *, reason: str) -> None:
        for peer in self._peers.generators():
            self._send(peer.identity, Drain(reason))

    def _try(self, action: Callable[[], object]) -> None:
        """Run `action`; record a store outage, since peers and timers retry."""
        try:
            action()
        except StoreUnavailableError as error:
            self._outage.record(error)
            # Let the holders of lapsed leases and claims renew them first.
            self._next_reap_at = max(self._next_reap_at, self._clock() + _REAP_AFTER_OUTAGE_S)

    # --- receiving -----------------------------------------------------------------------------------------------
    def _handle(self, identity: bytes, frames: Frames) -> None:
        try:
            message = decode_message(frames, max_bytes=self._run.broker.max_message_bytes)
        except RecordRefusedError as refusal:
            if not self._inspection.accept(identity, frames):
                self._answer_unreadable(identity, frames, refusal)
            return
        peer = self._peers.get(identity)
        if isinstance(message, Hello):
            self._welcome(identity, message)
        elif peer is None:
            # It joined a predecessor, or was removed as silent: Bye makes it say Hello again.
            self._send(identity, Bye())
        else:
            self._dispatch(peer, message, frames)

    def _answer_unreadable(self, identity: bytes, frames: Frames, refusal: RecordRefusedError) -> None:
        """Quarantine an undecodable message and answer its sender."""
        self._log_limiter.log("frame_refused", refusal.reason, error=str(refusal))
        hello = decode_header(frames, HelloHeader)
        if hello:
            self._reject(identity, hello.sender, reject_unreadable(hello, refusal))
        elif self._peers.get(identity):
            for nack in nacks_for_unreadable(frames, refusal):
                self._send(identity, nack)
        # Never store the bytes of a Hello: an older version's Hello contains a token.
        self._store.quarantine(refusal.reason, b"" if hello or not frames else frames[0])

    def _dispatch(self, peer: Peer, message: Message, frames: Frames) -> None:
        match message:
            case Put():
                for nack in self._ingest.add(peer.identity, message, frames[1:], guest=peer.guest):
                    self._send(peer.identity, nack)
            case LeaseRequest(max_trajectories=room):
                # Serve it within this step: the generator has free slots until then.
                self._leases.request(peer, max_trajectories=room)
                self._next_serve_at = self._may_serve_at
            case Pong():
                self._members_changed |= self._peers.record_pong(peer, message)
            case ReturnLeases(lease_ids=ids, reason=reason):
                # The owner prevents a peer from returning leases of other peers.
                self._store.return_leases(lease_ids=ids, reason=reason, owner=peer.owner)
                log.info("leases_returned", peer=peer.hello.peer_id, leases=len(ids), reason=reason)
            case OpenEpoch() | Update() if peer is self._peers.learner():
                self._relay(message)
            case Profile() if peer is self._peers.learner():
                for generator in self._peers.generators():
                    self._send(generator.identity, message)
                self._trace.obey(message.stage)
            # A generator answers only for itself.
            case EpochOpened() | UpdateApplied() if message.member == peer.member:
                if learner := self._peers.learner():
                    # Ignore a guest's reports about other members.
                    is_accusing = peer.guest and isinstance(message, UpdateApplied)
                    self._send(learner.identity, replace(message, lender_errors=[]) if is_accusing else message)
            case Audited() if not peer.guest:
                self._guests.record_check(peer, message)
            case Bye(reason=reason, is_moving=is_moving):
                self._peers.remove(peer.identity)
                leave = self._forget if is_moving else self._depart
                leave(peer, f"{LEFT}: {reason}" if reason else LEFT)
            case _:
                self._log_limiter.log("unexpected_message", type(message).__name__, peer=peer.hello.peer_id)

    # --- peers ---------------------------------------------------------------------------------------------------
    def _welcome(self, identity: bytes, hello: Hello) -> None:
        guest = self._channel.guest
        quarantined = self._store.quarantined_guests() if guest else {}
        trusts_network, locate = self._run.cluster.trusted_network, self._locate_duplicate
        if rejection := check_hello(hello, locate, guest=guest, quarantined=quarantined, trusts_network=trusts_network):
            self._reject(identity, hello.peer_id, rejection)
            return
        if self.chief.is_outdated:
            self._report_broker()
        replaced = self._peers.add(identity, hello, guest=guest)
        for older in replaced:
            # Prompts sent to the old connection would be lost.
            self._leases.drop_request(older)
            # The same incarnation keeps its leases; an older process with this name loses them.
            if older.owner != f"{hello.peer_id}/{hello.incarnation}":
                self._depart(older, "replaced by a new incarnation")
        self._send(
            identity,
            Welcome(
                run_id=self._run.name,
                config_json=msgspec.json.encode(self._run).decode(),
                store_url=self._store_url if hello.role == "learner" else "",
                version=self._store.run_state().version,
                credit_messages=_CREDIT_MESSAGES,
                credit_bytes=_CREDIT_BYTES,
                broker_incarnation=self._incarnation,
                num_heldout=self._num_heldout,
                model=self._model,
                living=self.chief.living_for(hello.machine),
            ),
        )
        if self._trace.is_on:
            self._send(identity, Profile("events"))
        # A peer that waited for this broker has queued one Hello per second.
        if not any(older.identity == identity for older in replaced):
            log.info("peer_joined", role=hello.role, peer=hello.peer_id, host=hello.host, pid=hello.pid)
        self._members_changed = True

    def _reject(self, identity: bytes, peer_id: str, rejection: Rejection) -> None:
        # Answer first: recording the event fails during a store outage.
        self._send(identity, Refuse(rejection.reason))
        if self._log_limiter.log("peer_refused", rejection.kind, peer=peer_id, reason=rejection.reason):
            self._store.record_event(peer_id, f"refused: {rejection.reason}")

    def _locate_duplicate(self, hello: Hello) -> str:
        """Describe the live peer that already has this name; empty if none.

        Probes its connection, so that a restarted process need not wait for `peer_timeout_s`.
        """
        duplicate = self._peers.find_duplicate(hello)
        # With ROUTER_MANDATORY, a send to a closed connection fails immediately.
        if duplicate is None or not self._send(duplicate.identity, Ping(sent_at=self._clock())):
            return ""
        return f"process {duplicate.hello.pid} on {duplicate.hello.host}"

    def _forget(self, peer: Peer, _reason: str) -> None:
        self._leases.remove_peer(peer)
        self._members_changed = True

    def _depart(self, peer: Peer, reason: str) -> None:
        self._forget(peer, reason)
        self._departures.add(peer, reason)
        self._try(self._departures.record)

    def _relay(self, order: OpenEpoch | Update) -> None:
        members = set(order.members)
        # Only the broker needs an update's members: 1,000 would add 98 KB to each of 1,000 messages.
        frames = [encode(replace(order, members=[]) if isinstance(order, Update) else order)]
        # Matches incarnations: a restarted generator is not a member of the epoch.
        for peer in self._peers.generators():
            if peer.member in members:
                self._send_frames(peer.identity, frames, kind=type(order))

    # --- periodic ------------------------------------------------------------------------------------------------
    def _serve_leases(self) -> None:
        if self._leases.has_requests and self._clock() >= self._next_serve_at:
            began_at, self._next_serve_at = self._clock(), self._clock() + _SERVE_INTERVAL_S
            for identity, prompts in (answers := self._leases.serve()):
                for lease in (prompt.lease for prompt in prompts.prompts if self._trace.is_on):
                    self._trace.mark("leased", *(make_trajectory_id(lease.id, index) for index in lease.indices))
                # If the generator is gone, do not wait until its leases lapse.
                if not self._send(identity, prompts):
                    self._store.return_leases(lease_ids=[p.lease.id for p in prompts.prompts], reason="undeliverable")
            # A round's answers are bounded, so continue immediately if it had any.
            pause_s = min((self._clock() - began_at) / _SERVE_SHARE, 5 * _SERVE_INTERVAL_S)
            self._may_serve_at = 0.0 if answers else began_at + pause_s
            self._next_serve_at = 0.0 if answers else max(self._next_serve_at, self._may_serve_at)

    def _run_periodic(self) -> None:
        now = self._clock()
        self._peers.excuse_pause()
        if now >= self._next_ping_at:
            if self._ping_round.is_over:
                for peer in self._peers.pop_silent():
                    # Recorded together below: a hanging store causes only one timeout.
                    self._forget(peer, reason := f"silent for {self._run.broker.peer_timeout_s:g} s")
                    self._departures.add(peer, reason)
                self._ping_round = PingRound(self._peers)
            peers = [peer for peer in self._ping_round.take() if peer in self._peers]
            self._next_ping_at = now + self._run.broker.heartbeat_s * self._ping_round.share
            # Before reporting: a slow store must not make peers look silent.
            frames = [encode(Ping(sent_at=now))]
            for peer in peers:
                is_connected = self._send_frames(peer.identity, frames, kind=Ping)
                self._members_changed |= peer.is_disconnected == is_connected
                peer.is_disconnected = not is_connected
            self._report_to_store(peers)
        if now >= self._next_reap_at:
            self._next_reap_at = now + _REAP_INTERVAL_S
            num_refused = self._channel.take_refused()
            if num_refused and self._log_limiter.log("strangers_refused", "token", connections=num_refused):
                self._store.record_event(self.chief.name, f"refused: {num_refused} connections without the run's token")
            self._log_limiter.flush()
            self.chief.work()

    def _report_to_store(self, peers: list[Peer]) -> None:
        """Renew the leases that peers hold, and store their gauges and the broker's."""
        self._departures.record()
        # Another broker may serve a peer that is silent here: do not overwrite its report.
        served = [p for p in peers if not (self.chief.has_others and self._peers.is_silent(p))]
        beats = [p.beat(self._guests.gauges(p) | self.chief.serving_gauges(p.owner)) for p in served]
        if self._ping_round.is_over:
            beats.append(Heartbeat(self.chief.name, self._own_gauges()))
        self._store.heartbeat(beats, lease_s=self._run.broker.lease_s)
        if self._ping_round.is_over:
            send_drain_requests(self._store, self._peers, send=self._send)
            self._report_broker()
        self._outage.end()

    def _own_gauges(self) -> dict[str, object]:
        reason = f"trajectories are deferred: {self._ingest.reason}" if self._ingest.reason else ""
        return {
            "role": "broker",
            "state": "ready",
            "peers": len(self._peers),
            "is_chief": bool(self.chief.fence),
            "reason": reason,
            "waits_for": "store" if reason else "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self._address,
            **{f"deferred_{reason}": number for reason, number in self._ingest.deferred.items()},
            # Without children: an embedded store reports its own CPU time.
            "cpu_s": round(time.process_time(), 3),
            "store_cpu_s": self._store.cpu_s(),
            **self._account.gauges(),
        }

    def _report_broker(self) -> None:
        if self.chief.report(num_generators=sum(peer.hello.role == "generator" for peer in self._peers)):
            for peer in self._peers:
                if living := self.chief.living_for(peer.hello.machine):
                    self._send(peer.identity, living)

    def _send(self, identity: bytes, message: Message) -> bool:
        return self._send_frames(identity, [encode(message)], kind=type(message))

    def _send_frames(self, identity: bytes, frames: Frames, *, kind: type[Message]) -> bool:
        if not (sent := self._channel.send(identity, frames)):
            self._log_limiter.log("undeliverable", kind.__name__)
        return sent
