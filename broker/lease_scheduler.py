"""LeaseScheduler: answers generators' requests for prompts, now or as soon as pacing allows."""

from dataclasses import dataclass

from slipstream.broker.admission import (
    admission_limit,
    admission_reason,
    capacity_limit,
    oldest_version,
    pacing_reason,
    weights_reason,
)
from slipstream.broker.dataset import Dataset
from slipstream.broker.fair_share import FairShare
from slipstream.broker.messages import Ack, Message, Prompt, Prompts
from slipstream.broker.peers import Peer
from slipstream.broker.store_outage import StoreOutage
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.records import RunState
from slipstream.buffer.store import Lease, Store
from slipstream.configs.buffer import CapacityConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_LONGEST_WAIT_S = 1.0
"""A request is answered empty after this, so that a generator always knows why it has nothing to do."""


@dataclass
class _Request:
    peer: Peer
    max_trajectories: int
    ends_at: float


@dataclass
class _Offer:
    """What a request may have now: groups in all, the admission limit for it, and why it is less than there is."""

    max_groups: int
    admission_limit: int
    reason: str = ""


class LeaseScheduler:
    """Holds at most one open request per generator.

    Consumes: lease requests.
    Produces: Prompts, empty with a reason when nothing may be leased for a while.
    Waits for: pacing to admit, an evaluation to be opened, a prompt to return.
    Invariant: a generator gets its share of what may be leased, by its speed, and none with weights that are too old.
    """

    def __init__(
        self, store: Store, *, run: RunConfig, train: Dataset, heldout: Dataset, outage: StoreOutage, clock: Clock
    ) -> None:
        """`outage` is told when the store is away; requests are answered nevertheless."""
        self._store = store
        self._outage = outage
        self._run = run
        self._train = train
        self._heldout = heldout
        self._clock = clock
        self._shares = FairShare(lost_after_s=run.broker.peer_timeout_s, clock=clock)
        self._requests: dict[bytes, _Request] = {}
        self._counts: StoreCounts | None = None

    @property
    def has_requests(self) -> bool:
        """Whether somebody waits."""
        return bool(self._requests)

    def ask(self, peer: Peer, *, max_trajectories: int) -> None:
        """Open a request (a newer one replaces an older)."""
        self._shares.enter(peer)
        self._requests[peer.identity] = _Request(peer, max_trajectories, self._clock() + _LONGEST_WAIT_S)

    def note(self, peer: Peer | None, answer: Message) -> None:
        """What a peer is told of its trajectories: speeds are measured by those that the store has."""
        if peer and isinstance(answer, Ack):
            self._shares.accept(peer, answer.ids)

    def forget(self, peer: Peer) -> None:
        """The peer is gone."""
        self._requests.pop(peer.identity, None)
        self._shares.leave(peer)

    def serve(self) -> list[tuple[bytes, Prompts]]:
        """Answer what can be answered now, the quickest first; returns (identity, answer) pairs."""
        self._counts = None
        answers: list[tuple[bytes, Prompts]] = []
        for request in sorted(self._requests.values(), key=lambda each: self._shares.group_s(each.peer)):
            prompts, reason = self._try(request)
            if prompts or reason:
                del self._requests[request.peer.identity]
                answers.append((request.peer.identity, Prompts(prompts, reason=reason)))
        return answers

    def _try(self, request: _Request) -> tuple[list[Prompt], str]:
        """Prompts, or why there are none once there is no time left to wait."""
        is_over = self._clock() >= request.ends_at
        try:
            state = self._store.run_state()
            offer = self._offer(request, state)
            prompts = self._lease(request.peer, offer)
            return prompts, (offer.reason or self._reason()) if is_over and not prompts else ""
        except StoreUnavailableError as error:
            self._outage.record(error)
            return [], self._outage.reason if is_over else ""

    # --- how much ------------------------------------------------------------------------------------------------
    def _offer(self, request: _Request, state: RunState) -> _Offer:
        wanted = max(1, request.max_trajectories // self._run.generators.members_per_group)
        limit = self._admission_limit(state)
        if state.phase not in ("starting", "training"):
            return _Offer(self._shares.rows(request.peer, wanted=wanted), limit)
        if reason := weights_reason(self._run, version=request.peer.version, committed=state.version):
            return self._none(request.peer, wanted, reason)
        share = self._share(request.peer, state, limit=limit)
        if share == 0:
            return self._none(request.peer, wanted, self._slow_reason(request.peer))
        return _Offer(wanted if share is None else min(wanted, share), limit)

    def _none(self, peer: Peer, wanted: int, reason: str) -> _Offer:
        """No training prompt; rows of evaluations all the same, but while prompts wait that would come with them."""
        return _Offer(0 if self._counted().returned else self._shares.rows(peer, wanted=wanted), 0, reason)

    def _share(self, peer: Peer, state: RunState, *, limit: int) -> int | None:
        """Training groups it may have; None: as many as it likes, because there are none or nobody to share with."""
        if not self._shares.are_limited:
            return None
        counts = self._counted()
        num_groups = counts.returned + max(0, limit - counts.admitted)
        oldest = oldest_version(self._run, committed=state.version)
        return self._shares.of(peer, num_groups=num_groups, oldest_version=oldest) if num_groups else None

    def _admission_limit(self, state: RunState) -> int:
        limit, capacity = admission_limit(self._run, consumed=state.consumed), self._run.buffer.capacity
        if capacity == CapacityConfig():
            return limit
        return min(limit, capacity_limit(capacity, self._counted()))

    def _counted(self) -> StoreCounts:
        """Read once for all requests of a round, and again after each lease."""
        if self._counts is None:
            self._counts = self._store.counts()
        return self._counts

    # --- prompts -------------------------------------------------------------------------------------------------
    def _lease(self, peer: Peer, offer: _Offer) -> list[Prompt]:
        if offer.max_groups == 0:
            return []
        leases = self._store.lease(
            owner=peer.owner,
            max_groups=offer.max_groups,
            group_size=self._run.generators.members_per_group,
            has_baseline=self._run.generators.has_baseline,
            lease_s=self._run.broker.lease_s,
            admission_limit=offer.admission_limit,
        )
        self._shares.lease(peer, leases)
        self._counts = None if leases else self._counts
        return [self._prompt(lease) for lease in leases]

    def _prompt(self, lease: Lease) -> Prompt:
        row = (self._train if lease.purpose == "train" else self._heldout).row(lease.row)
        return Prompt(
            lease=lease,
            uid=row.uid,
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra_info=row.extra_info,
        )

    def _slow_reason(self, peer: Peer) -> str:
        group_s = self._shares.group_s(peer)
        here = f": a group takes {group_s:.1f} s here" if group_s else ""
        return f"speed: what may be leased now is the other generators' share{here}"

    def _reason(self) -> str:
        state = self._store.run_state()
        return admission_reason(self._run, state=state, counts=self._store.counts()) or pacing_reason(state)
