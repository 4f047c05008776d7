"""Publisher: delivers a policy version to every live generator and verifies it.

Consumes: a staged version, member reports, EpochOpened, UpdateApplied.
Produces: OpenEpoch, Update, the broadcast, and a snapshot for members that fetch.
Waits for: answers of the epoch's members, up to a limit per phase; fetching members only if no other holds the version.
Invariant: a version is committed only after every member of its epoch applied it with equal checksums and a probe
within bounds. Failed members leave the epoch until their backoff ends.

BackgroundPublisher: publishes versions while training continues.

Produces: announced and committed versions in the store.
Invariant: one version is in flight and at most one, the newest, is queued, in two sets of buckets. Only the
synchronizing thread uses the publisher.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from threading import Lock, Thread

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, Members, Message, OpenEpoch, UpdateApplied
from slipstream.broker.transport.session import Inbox, Sender
from slipstream.broker.weights.buckets import SLOWEST_BYTES_PER_S
from slipstream.broker.weights.process_group import choose_backend
from slipstream.broker.weights.transport import WeightSender
from slipstream.buffer.records import VersionEntry
from slipstream.buffer.store import Store
from slipstream.configs.base import Record
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.fetches import FetchTracker, MemberTable, SnapshotServer
from slipstream.learner.publishing.staging import Canary, Staged, Stager
from slipstream.runtime.clock import Clock, Deadline
from slipstream.runtime.process import run_in_thread
from slipstream.runtime.trace import PUBLISH, Trace

_MAX_ATTEMPTS = 3
_JOIN_TIMEOUT_S = 20.0
"""Limit for building a process group, which takes two seconds, even over a tunnel."""
_AFTER_ERROR_S = 2.0
"""Wait for answers after a failed transfer. They identify the healthy members."""
_MIN_TRANSFER_S = 2.0
_TRANSFER_TIMEOUT_FACTOR = 5.0
_TRANSFERS_KEPT = 16
_POLL_EVERY_S = 0.005
_WAIT_STEP_S = 0.2

log = structlog.get_logger(__name__)


class Published(Record):
    """Result of a synchronization. Example: Published(version=12, num_members=2, seconds=0.08, probe_diff_max=4e-7)."""

    version: int
    num_members: int
    """Live generators that hold the version."""
    seconds: float
    """Duration of `synchronize`."""
    probe_diff_mean: float = 0.0
    """Largest mean difference of canary log-probabilities in one member, nats."""
    probe_diff_max: float = 0.0
    """Largest single difference, nats."""
    pause_s: float = 0.0
    """Longest time that a member paused generation."""
    receive_s: float = 0.0
    """Longest stages of a member in which it did not: see UpdateApplied."""
    prepare_s: float = 0.0
    probe_s: float = 0.0


class Publisher:
    """Used by one thread of rank 0. Life: (set_version -> synchronize)* -> close."""

    def __init__(
        self,
        *,
        client: Sender,
        inbox: Inbox,
        sender: WeightSender | None,
        config: WeightsConfig,
        snapshots: SnapshotServer | None = None,
        is_one_process: bool = False,
        on_evict: Callable[[str, str], object] = lambda peer_id, text: None,
        trusts_network: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`sender`: None without a trusted network, so without broadcasts. `snapshots`: None if all join them.

        `is_one_process`: a serial run or a replay, where the sender never blocks. Others: see MemberTable.
        """
        self._client = client
        self._inbox = inbox
        self._sender = sender
        self._config = config
        self._is_one_process = is_one_process
        self._clock = clock
        self._members = MemberTable(on_evict=on_evict, clock=clock, trusts_network=trusts_network)
        self._fetches: FetchTracker | None = None
        if snapshots:
            self._fetches = FetchTracker(snapshots, client=client, members=self._members, config=config, clock=clock)
        self._staged: Staged | None = None
        self._epoch = 0
        self._epoch_members: list[Member] = []
        self._opened: dict[Member, EpochOpened] = {}
        self._applied: dict[Member, UpdateApplied] = {}
        self._fetched: dict[Member, UpdateApplied] = {}
        self._transfers_s: deque[float] = deque(maxlen=_TRANSFERS_KEPT)

    def set_version(self, staged: Staged) -> Staged | None:
        """Returns the previous version for reuse of its memory; None while a generator may read it."""
        before, self._staged = self._staged, staged
        may_overwrite = before and (self._fetches is None or self._fetches.may_overwrite(before.version))
        return before if may_overwrite else None

    @property
    def version(self) -> int:
        """-1 before the first `set_version`."""
        return self._staged.version if self._staged else -1

    @property
    def num_alive(self) -> int:
        return len(self._members.live)

    @property
    def num_holding(self) -> int:
        return self._members.num_holding(self.version)

    @property
    def is_due(self) -> bool:
        """Whether an eligible live generator lacks the version."""
        self.poll(timeout_s=0)
        if self._staged is None:
            return False
        if self._fetches:
            return bool(self._broadcast_members() or self._fetches.due(self.version))
        return any(not self._members.holds(member, self.version) for member in self._broadcast_members())

    def synchronize(self) -> Published:
        """Deliver the version to live generators, evicting members that fail."""
        started_at = self._clock()
        self._applied, self._fetched = {}, {}
        # Each attempt evicts the members that failed.
        for _ in range(_MAX_ATTEMPTS):
            self.poll(timeout_s=0)
            members = self._broadcast_members()
            is_open = members == self._epoch_members or (bool(members) and self._open_epoch(members))
            if not members or (is_open and self._broadcast(members)):
                break
        if self._fetches:
            self._fetches.request(self._require_staged())
            deadline = Deadline(self._limit_s, what="generators to apply a version", clock=self._clock)
            while self._fetches.is_awaited(self.version) and not deadline.is_over:
                self.poll(timeout_s=min(_WAIT_STEP_S, deadline.left_s))
        applied = [a for a in [*self._applied.values(), *self._fetched.values()] if not a.error]
        names = ("probe_diff_max", "pause_s", "receive_s", "prepare_s", "probe_s")
        largest = {name: max((getattr(each, name) for each in applied), default=0.0) for name in names}
        largest["probe_diff_mean"] = max((each.probe_diff for each in applied), default=0.0)
        return Published(self.version, self.num_holding, self._clock() - started_at, **largest)

    def close(self) -> None:
        if self._fetches:
            self._fetches.close()
        if self._sender:
            self._sender.close()

    def _broadcast_members(self) -> list[Member]:
        if self._fetches is None:
            return self._members.eligible()
        # Latecomers fetch: rebroadcasting would pause every holder.
        return self._fetches.broadcast_members() if self.num_holding == 0 else []

    @property
    def _limit_s(self) -> float:
        return self._config.transfer_timeout_s + sum(self._require_staged().update.bucket_bytes) / SLOWEST_BYTES_PER_S

    def _require_staged(self) -> Staged:
        assert self._staged is not None, "set_version() comes first"
        return self._staged

    def _require_sender(self) -> WeightSender:
        assert self._sender is not None, "without a trusted network, no member joins broadcasts"
        return self._sender

    def _open_epoch(self, members: list[Member]) -> bool:
        # A process group has fixed ranks, and members may disagree about a failed broadcast, so every change opens a
        # new group and epoch.
        self._epoch += 1
        self._epoch_members = []
        self._opened = {}
        timeout_s = min(_JOIN_TIMEOUT_S, self._config.transfer_timeout_s)
        sender = self._require_sender()
        host, port = sender.address
        try:
            # A CPU member or a shared GPU rules out NCCL.
            backend = choose_backend(self._config.backend, sender.device, [*map(self._members.device, members)])
        except WeightTransferError as unfit:
            self._members.evict(members, str(unfit))
            return False
        self._client.send(OpenEpoch(self._epoch, members, host, port, timeout_s, backend))

        def open_epoch() -> None:
            sender.open_epoch(self._epoch, num_members=len(members), timeout_s=timeout_s, backend=backend)

        error, missing = self._run_phase(open_epoch, self._opened, members, timeout_s=timeout_s)
        failed = dict.fromkeys(missing, "no answer") | {m: o.error for m, o in self._opened.items() if o.error}
        if error or failed:
            self._members.evict(missing or list(failed), f"epoch {self._epoch} could not be built: {error or failed}")
            return False
        self._epoch_members = members
        log.info("epoch_opened", epoch=self._epoch, members=[m.peer_id for m in members], backend=backend)
        return True

    def _broadcast(self, members: list[Member]) -> bool:
        """Return whether all `members` now hold the version."""
        staged, limit_s, started_at = self._require_staged(), self._limit_s, self._clock()
        # Recent transfers give a tighter limit: a hung member delays all others.
        timeout_s = min(limit_s, _MIN_TRANSFER_S + _TRANSFER_TIMEOUT_FACTOR * max(self._transfers_s, default=math.inf))
        update = msgspec.structs.replace(staged.update, epoch=self._epoch, members=members, timeout_s=timeout_s)
        self._applied = {}
        self._client.send(update)

        def send() -> None:
            self._require_sender().broadcast(staged.buckets, timeout_s=timeout_s)
            self._transfers_s.append(self._clock() - started_at)

        error, missing = self._run_phase(send, self._applied, members, timeout_s=limit_s)
        failed = [m for m, a in self._applied.items() if a.error]
        if error or missing or failed:
            # The group may still hold data of the failed broadcast.
            self._epoch_members = []
        if missing or failed:
            reason = error or "; ".join(a.error for a in self._applied.values() if a.error) or "no answer"
            self._members.evict(missing or failed, f"version {update.version} was not applied: {reason}")
        return not (error or missing or failed)

    def _run_phase(
        self, action: Callable[[], None], answers: Mapping[Member, Message], members: list[Member], *, timeout_s: float
    ) -> tuple[str, list[Member]]:
        """Run `action` and wait for answers of live members. Returns any error, and members without an answer."""
        error = ""
        try:
            self._run_watched(action, members)
        except WeightTransferError as raised:
            error = str(raised)
        limit_s = _AFTER_ERROR_S if error else timeout_s
        deadline = Deadline(limit_s, what="members to answer", clock=self._clock)
        while True:
            missing = [m for m in members if m not in answers]
            if not missing or deadline.is_over or not self._members.live.keys() & missing:
                return error, missing
            self._handle(self._inbox.get(timeout_s=min(_WAIT_STEP_S, deadline.left_s)))

    def _run_watched(self, action: Callable[[], None], members: list[Member]) -> None:
        """Run `action`, which needs all members. Abort if one dies."""
        if self._is_one_process:
            action()
            return
        in_flight = run_in_thread(action, name="send-weights")
        while not wait([in_flight], timeout=_POLL_EVERY_S).done:
            self.poll(timeout_s=0)
            if not set(members) <= self._members.live.keys():
                self._require_sender().abort()
        in_flight.result()

    def poll(self, *, timeout_s: float) -> None:
        """Handle received messages. Blocks at most `timeout_s` for the first."""
        message = self._inbox.get(timeout_s=timeout_s)
        while message is not None:
            self._handle(message)
            message = self._inbox.get(timeout_s=0)
        if self._fetches:
            self._fetches.poll()

    def _handle(self, message: Message | None) -> None:
        match message:
            case Members():
                self._members.update(message)
            case EpochOpened(epoch=epoch, member=member) if epoch == self._epoch:
                self._opened[member] = message
            case UpdateApplied(epoch=epoch, member=member) if epoch == NO_EPOCH and self._fetches:
                if self._fetches.record_answer(message):
                    self._fetched[member] = message
            case UpdateApplied(epoch=epoch, version=version, member=member):
                if (epoch, version) == (self._epoch, self.version):
                    self._applied[member] = message
                    if not message.error:
                        # Valid even after an eviction: a restarted broker briefly knows no members.
                        self._members.record_applied(member, version, device=message.device)


class BackgroundPublisher:
    """Life: (publish -> take_published)* -> close. With all roles in one process, everything happens inside `publish`.

    `publish`, `flush`, `take_published`, `sync_members`, and `close` raise the background thread's error.
    """

    def __init__(
        self, publisher: Publisher, stager: Stager, store: Store, *, in_background: bool, trace: Trace | None = None
    ) -> None:
        self._trace = trace or Trace("learner")
        self._publisher = publisher
        self._stager = stager
        self._store = store
        self._in_background = in_background
        self._lock = Lock()
        self._waiting: Staged | None = None
        self._step = 0
        self._spare: Staged | None = None
        self._in_flight: Future[None] | None = None
        self._published: Published | None = None

    def publish(self, *, version: int, step: int, weights: Iterable[tuple[str, Tensor]], canary: Canary) -> None:
        self._raise_error()
        with self._lock:
            replaced, self._waiting = self._waiting, None
            reuse, self._spare = replaced or self._spare, None
        staged = self._stager.stage(version=version, weights=weights, canary=canary, reuse=reuse)
        # Announce before sending: the broker rejects trajectories from unannounced versions.
        self._store.announce_version(version)
        with self._lock:
            self._waiting, self._step = staged, step
        self._start()

    def flush(self) -> None:
        """Block until nothing is in flight.

        Bounded: at most two versions have a few attempts, with limits per phase in `weights` and for store calls.
        """
        if self._in_flight:
            wait([self._in_flight])
        self._raise_error()

    @property
    def probe_limit(self) -> float:
        return self._stager.probe_limit.nats

    def take_published(self) -> Published | None:
        """The newest result since the last call, or None."""
        self._raise_error()
        with self._lock:
            published, self._published = self._published, None
        return published

    def sync_members(self, *, timeout_s: float) -> None:
        """Publish to members without the current version. Waits at most `timeout_s` for reports."""
        if self._in_flight and not wait([self._in_flight], timeout=timeout_s).done:
            return
        self._raise_error()
        self._publisher.poll(timeout_s=timeout_s)
        if self._publisher.is_due:
            self._start()

    def describe_members(self) -> str:
        alive, holding = self._publisher.num_alive, self._publisher.num_holding
        if alive == 0:
            return "no generator is alive (start one with `python -m slipstream.generators`)"
        return f"{alive} generators alive, {holding} of them hold version {self._publisher.version}"

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._publisher.close()

    def _start(self) -> None:
        if self._in_flight and not self._in_flight.done():
            return
        self._raise_error()
        in_flight: Future[None] = Future()
        self._in_flight = in_flight
        if self._in_background:
            # A daemon: a stopping learner does not wait for generators.
            Thread(target=self._run, args=(in_flight,), name="publish", daemon=True).start()
        else:
            self._run(in_flight)

    def _run(self, in_flight: "Future[None]") -> None:
        try:
            while not in_flight.done():
                self._synchronize()
                # One lock for both, so a version queued right afterward starts a new thread.
                with self._lock:
                    if self._waiting is None:
                        in_flight.set_result(None)
        except BaseException as error:
            in_flight.set_exception(error)

    def _synchronize(self) -> None:
        """Deliver the queued version, else the current one again."""
        with self._lock:
            newest, self._waiting, step = self._waiting, None, self._step
        if newest:
            # In this thread: the checksum waits for the copy to the host.
            self._store.record_version(VersionEntry(newest.version, step, newest.checksum))
            with self._lock:
                self._spare = self._publisher.set_version(newest)
        with self._trace.timed(PUBLISH, version=self._publisher.version):
            published = self._publisher.synchronize()
            if published.probe_diff_max:
                self._stager.probe_limit.calibrate(published.probe_diff_mean)
            self._store.commit_version(published.version)
        with self._lock:
            self._published = published

    def _raise_error(self) -> None:
        if self._in_flight and self._in_flight.done():
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()
