"""Publisher: brings a policy version into every living generator, and verifies that it got there.

Consumes: a staged version, news of members, EpochOpened and UpdateApplied.
Produces: OpenEpoch, Update, the broadcast itself; a snapshot for those that fetch.
Waits for: every word of a member of the epoch, each phase at most its configured time; of those that fetch, for one,
and only when nobody else holds the version.
Invariant: a version is committed only after every member of its epoch adopted it with equal checksums and a probe
within bounds; whoever did not is out of the epoch and is tried again when the next synchronisation is due.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread

import msgspec
import structlog

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, EpochOpened, Member, Members, Message, OpenEpoch, UpdateApplied
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.inbox import Inbox
from slipstream.broker.weights.transport import WeightSender
from slipstream.buffer.trajectory import Record
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.fetches import FetchTracker, SnapshotServer
from slipstream.learner.publishing.members import MemberTable
from slipstream.learner.publishing.staging import Staged
from slipstream.runtime.clock import Clock, Deadline

_MAX_ATTEMPTS = 3
_JOIN_TIMEOUT_S = 20.0
"""Longest building of a process group: living members of one epoch meet within a second or two, also over a tunnel."""
_AFTER_FAULT_S = 2.0
"""Longest wait for the others' word after a transfer failed: it tells who is well."""
_LEAST_TRANSFER_S = 2.0
_PATIENCE_FACTOR = 5.0
_TRANSFERS_KEPT = 16
_LOOK_EVERY_S = 0.005
_STEP_S = 0.2

log = structlog.get_logger(__name__)


class Published(Record):
    """What a synchronisation did. Example: Published(version=12, num_members=2, seconds=0.08, probe_diff_max=4e-7)."""

    version: int
    """Which version."""
    num_members: int
    """Generators that hold it now."""
    seconds: float
    """How long it took."""
    probe_diff_mean: float = 0.0
    """Largest mean difference over members, nats."""
    probe_diff_max: float = 0.0
    """Largest single difference over members, nats."""
    pause_s: float = 0.0
    """Longest standstill of a member's generation, seconds."""


class Publisher:
    """Belongs to the learner's rank 0, one thread."""

    def __init__(
        self,
        *,
        link: BrokerClient,
        inbox: Inbox,
        sender: WeightSender,
        config: WeightsConfig,
        lender: SnapshotServer | None = None,
        is_patient: bool = False,
        tell: Callable[[str, str], object] = lambda peer_id, text: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`is_patient`: nothing blocks in this sender (a serial run's), so that nothing needs to be watched.

        `lender`: from whom joiners and those with another transport fetch; without one all take part in broadcasts.
        `tell`: given the id of each member that is evicted, and why.
        """
        self._link = link
        self._inbox = inbox
        self._sender = sender
        self._config = config
        self._clock = clock
        self._roster = MemberTable(tell=tell, clock=clock)
        self._lending = (
            FetchTracker(lender, link=link, roster=self._roster, config=config, clock=clock) if lender else None
        )
        self._epoch = 0
        self._epoch_members: list[Member] = []
        self._opened: dict[Member, EpochOpened] = {}
        self._adopted: dict[Member, UpdateApplied] = {}
        self._fetched: dict[Member, UpdateApplied] = {}
        self._transfers_s: deque[float] = deque(maxlen=_TRANSFERS_KEPT)
        self._staged: Staged | None = None
        self._is_patient = is_patient

    def hold(self, staged: Staged) -> Staged | None:
        """From here on `synchronize` brings this version; returns the one before, whose buckets are free."""
        before, self._staged = self._staged, staged
        return before

    @property
    def version(self) -> int:
        """What `synchronize` brings; -1 before the first."""
        return self._staged.version if self._staged else -1

    @property
    def num_alive(self) -> int:
        """Living generators, as far as the broker has told."""
        return len(self._roster.alive)

    @property
    def num_holding(self) -> int:
        """Living generators that hold the version."""
        return self._roster.num_holding(self.version)

    @property
    def is_due(self) -> bool:
        """Whether some living generator does not hold the version and may be tried now."""
        self.read_news(timeout_s=0)
        if self._staged is None:
            return False
        if self._lending:
            return bool(self._group() or self._lending.due(self.version))
        return any(not self._roster.holds(member, self.version) for member in self._group())

    def synchronize(self) -> Published:
        """Bring the version into every living generator; those that fail are left out and named in the log."""
        started_at = self._clock()
        self._adopted, self._fetched = {}, {}
        for _ in range(_MAX_ATTEMPTS):
            self.read_news(timeout_s=0)
            if self._try(self._group()):
                break
        if self._lending:
            self._lending.order(self._held())
            self._await_a_holder(self._lending)
        return self._summarise(seconds=self._clock() - started_at)

    def close(self) -> None:
        """Tear the group down."""
        if self._lending:
            self._lending.close()
        self._sender.close()

    def _group(self) -> list[Member]:
        """Who takes part in a broadcast now. Nobody hears the same version twice for the sake of one that came late."""
        if self._lending is None:
            return self._roster.wanted()
        return self._lending.not_fetching() if self.num_holding == 0 else []

    def _await_a_holder(self, lending: FetchTracker) -> None:
        """A version that nobody holds is not committed while somebody is about to."""
        deadline = Deadline(self._config.transfer_timeout_s, what="a generator to fetch", clock=self._clock)
        while not self.num_holding and lending.is_bringing(self.version) and not deadline.is_over:
            self.read_news(timeout_s=min(_STEP_S, deadline.left_s))

    # --- one attempt ---------------------------------------------------------------------------------------------
    def _try(self, members: list[Member]) -> bool:
        """Returns whether all of `members` hold the version now."""
        if not members:
            return True
        if members != self._epoch_members and not self._open_epoch(members):
            return False
        return self._broadcast(members)

    def _open_epoch(self, members: list[Member]) -> bool:
        self._epoch += 1
        self._epoch_members = []
        self._opened = {}
        timeout_s = min(_JOIN_TIMEOUT_S, self._config.transfer_timeout_s)
        host, port = self._sender.address
        self._link.send(OpenEpoch(self._epoch, members, host, port, timeout_s, self._config.backend))
        fault = ""
        try:
            self._watching(
                members, partial(self._sender.open_epoch, self._epoch, num_members=len(members), timeout_s=timeout_s)
            )
        except WeightTransferError as error:
            fault = str(error)
        missing = self._collect(members, self._opened, timeout_s=_AFTER_FAULT_S if fault else timeout_s)
        failed = dict.fromkeys(missing, "no answer") | {m: o.error for m, o in self._opened.items() if o.error}
        if fault or failed:
            self._roster.evict(missing or list(failed), f"epoch {self._epoch} could not be built: {fault or failed}")
            return False
        self._epoch_members = members
        log.info("epoch_opened", epoch=self._epoch, members=[m.peer_id for m in members])
        return True

    def _broadcast(self, members: list[Member]) -> bool:
        staged = self._held()
        started_at, timeout_s = self._clock(), self._transfer_timeout_s
        update = msgspec.structs.replace(staged.update, epoch=self._epoch, members=members, timeout_s=timeout_s)
        self._adopted = {}
        self._link.send(update)
        fault = ""
        try:
            self._watching(members, partial(self._sender.broadcast, staged.buckets, timeout_s=timeout_s))
            self._transfers_s.append(self._clock() - started_at)
        except WeightTransferError as error:
            fault = str(error)
            self._epoch_members = []
        timeout_s = _AFTER_FAULT_S if fault else self._config.transfer_timeout_s
        missing = self._collect(members, self._adopted, timeout_s=timeout_s)
        failed = [m for m, a in self._adopted.items() if a.error]
        if missing or failed:
            self._epoch_members = []
            reason = fault or "; ".join(a.error for a in self._adopted.values() if a.error) or "no answer"
            self._roster.evict(missing or failed, f"version {update.version} was not adopted: {reason}")
        return not (fault or missing or failed)

    def _watching(self, members: list[Member], action: Callable[[], None]) -> None:
        """Do what blocks until all members take part; when one of them dies meanwhile, it is broken off."""
        if self._is_patient:
            action()
            return
        underway: Future[None] = Future()
        # A daemon: a learner that is told to stop does not wait for generators.
        Thread(target=_settle, args=(underway, action), name="send-weights", daemon=True).start()
        while not wait([underway], timeout=_LOOK_EVERY_S).done:
            self.read_news(timeout_s=0)
            if not set(members) <= set(self._roster.alive):
                self._sender.abort()
        underway.result()

    @property
    def _transfer_timeout_s(self) -> float:
        """For a bucket: what whole broadcasts have taken says how soon one that does not end is given up.

        A member that stands still, or that died where its neighbours do not see it, holds up all others that long.
        """
        if not self._transfers_s:
            return self._config.transfer_timeout_s
        return min(self._config.transfer_timeout_s, _LEAST_TRANSFER_S + _PATIENCE_FACTOR * max(self._transfers_s))

    def _held(self) -> Staged:
        assert self._staged is not None, "hold() comes first"
        return self._staged

    def _collect(self, members: list[Member], answers: Mapping[Member, Message], *, timeout_s: float) -> list[Member]:
        """Wait until every living member of `members` has answered; returns those that did not."""
        deadline = Deadline(timeout_s, what="members to answer", clock=self._clock)
        while True:
            missing = [m for m in members if m not in answers]
            if not missing or deadline.is_over or not set(missing) & set(self._roster.alive):
                return missing
            self._read(self._inbox.get(timeout_s=min(_STEP_S, deadline.left_s)))

    # --- news ----------------------------------------------------------------------------------------------------
    def read_news(self, *, timeout_s: float) -> None:
        """Take in what has arrived; blocks at most `timeout_s` for the first message."""
        message = self._inbox.get(timeout_s=timeout_s)
        while message is not None:
            self._read(message)
            message = self._inbox.get(timeout_s=0)
        if self._lending:
            self._lending.poll()

    def _read(self, message: Message | None) -> None:
        match message:
            case Members():
                self._roster.take(message)
            case EpochOpened(epoch=epoch, member=member) if epoch == self._epoch:
                self._opened[member] = message
            case UpdateApplied(epoch=epoch, member=member) if epoch == NO_EPOCH and self._lending:
                if self._lending.take(message):
                    self._fetched[member] = message
            case UpdateApplied(epoch=epoch, version=version, member=member):
                if (epoch, version) == (self._epoch, self.version):
                    self._adopted[member] = message
                    if not message.error:
                        # Also of one that was given up before its answer came, with a broker that came back late.
                        self._roster.note_adopted(member, version)

    def _summarise(self, *, seconds: float) -> Published:
        good = [a for a in [*self._adopted.values(), *self._fetched.values()] if not a.error]
        return Published(
            version=self.version,
            num_members=self.num_holding,
            seconds=seconds,
            probe_diff_mean=max((a.probe_diff for a in good), default=0.0),
            probe_diff_max=max((a.probe_diff_max for a in good), default=0.0),
            pause_s=max((a.pause_s for a in good), default=0.0),
        )


def _settle(underway: "Future[None]", action: Callable[[], None]) -> None:
    try:
        action()
    except BaseException as error:
        underway.set_exception(error)
    else:
        underway.set_result(None)
