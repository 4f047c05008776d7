"""LeaseScheduler: answers generators' requests for prompts as soon as pacing admits some."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import msgspec
import structlog

from slipstream.broker.chief import Chief
from slipstream.broker.dataset import Dataset
from slipstream.broker.fair_share import FairShare
from slipstream.broker.guests import Guests
from slipstream.broker.messages import Ack, Message, Prompt, Prompts, Row
from slipstream.broker.peers import Peer
from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.pacing import admission_limit, admission_reason, oldest_version, pacing_reason, weights_reason
from slipstream.buffer.records import Lease, RunState
from slipstream.buffer.sampling import NOTHING_SKIPPED, Upcoming, look_ahead
from slipstream.buffer.store import Store, StoreOutage
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.images import image_id

log = structlog.get_logger(__name__)

_EVALUATION_FRACTION = 0.5
"""Maximum fraction of a lease for evaluations while training prompts are available."""
_MAX_WAIT_S = 1.0
"""Time after which a request is answered empty, with the reason."""
_MAX_ANSWERS = 64
"""Answers per round, each with a store call that blocks the broker."""
_ONLY_EVALUATIONS = -1
"""Admission limit with which the store leases no training prompts."""


@dataclass
class _Request:
    peer: Peer
    max_trajectories: int
    deadline: float


@dataclass
class _Offer:
    """Upper bounds for one lease."""

    max_groups: int
    admission_limit: int
    reason: str = ""
    """Reason for offering no training prompts; empty otherwise."""


class LeaseScheduler:
    """Holds at most one open request per generator.

    Consumes: lease requests.
    Produces: Prompts, empty with a reason if nothing can be leased for a while.
    Waits for: pacing to admit prompts, an evaluation to open, a lease to be returned.
    Invariant: a generator gets at most its fair share, and no training prompts with stale weights.
    """

    def __init__(
        self,
        store: Store,
        chief: Chief,
        *,
        run: RunConfig,
        train: Dataset,
        heldout: Mapping[str, Dataset],
        outage: StoreOutage,
        guests: Guests,
        clock: Clock,
    ) -> None:
        """`chief` knows this broker's share; `outage` records failed store calls."""
        self._guests = guests
        self._store = store
        self._outage = outage
        self._run = run
        self._datasets = {"train": train, **heldout}
        self._clock = clock
        self._chief = chief
        self._fair_share = FairShare(lost_after_s=run.broker.peer_timeout_s, clock=clock)
        self._requests: dict[bytes, _Request] = {}
        self._state: RunState | None = None
        self._counts: StoreCounts | None = None
        self._exhausted: set[int] = set()
        self._without_rows: set[int] = set()
        """Versions with nothing left in this round (`_exhausted`), or no evaluation rows."""
        self._has_warned = False
        self._unstored: dict[str, bytes] = {}
        """Name -> image that a failed call has not stored."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def request(self, peer: Peer, *, max_trajectories: int) -> None:
        self._fair_share.add(peer)
        self._requests[peer.identity] = _Request(peer, max_trajectories, self._clock() + _MAX_WAIT_S)

    def record_answer(self, peer: Peer | None, answer: Message) -> None:
        """Acks measure the peer's throughput."""
        if peer and isinstance(answer, Ack):
            self._fair_share.record_stored(peer, answer.ids)

    def drop_request(self, peer: Peer) -> None:
        self._requests.pop(peer.identity, None)

    def remove_peer(self, peer: Peer) -> None:
        self.drop_request(peer)
        self._fair_share.remove(peer)

    def serve(self) -> list[tuple[bytes, Prompts]]:
        """Answer requests, at most `_MAX_ANSWERS`; returns (identity, answer) pairs."""
        self._state = self._counts = None
        self._exhausted.clear()
        self._without_rows.clear()
        self._fair_share.start_round()
        answers: list[tuple[bytes, Prompts]] = []
        # Fastest first: prompts go to the generators that finish them soonest.
        for request in sorted(self._requests.values(), key=lambda each: self._fair_share.group_s(each.peer)):
            if len(answers) >= _MAX_ANSWERS:
                break
            prompts, reason = self._try(request)
            if prompts or reason:
                del self._requests[request.peer.identity]
                parts = _split(Prompts(prompts, reason=reason), max_bytes=self._run.broker.max_message_bytes)
                answers += [(request.peer.identity, part) for part in parts]
        return answers

    def _try(self, request: _Request) -> tuple[list[Prompt], str]:
        """Prompts, or after the deadline the reason for an empty answer."""
        # Hold back empty answers until the deadline, to save a round trip.
        is_due = self._clock() >= request.deadline
        if not is_due and request.peer.status.version in self._exhausted:
            return [], ""
        if request.peer.guest and (reason := self._guests.reason_to_wait(request.peer)):
            return [], reason if is_due else ""
        try:
            # Read once per round; with a curriculum, which needs the next ordinal, after each lease.
            state = self._state = self._state or self._store.run_state()
            offer = self._offer(request, state)
            prompts = self._lease(request.peer, offer, upcoming=self._upcoming(offer, state))
            if prompts or not is_due:
                return prompts, ""
            reason = offer.reason or admission_reason(self._run, state=state, counts=self._store_counts())
            return [], reason or pacing_reason(state)
        except StoreUnavailableError as error:
            self._outage.record(error)
            return [], self._outage.reason if is_due else ""

    # --- how much ------------------------------------------------------------------------------------------------
    def _offer(self, request: _Request, state: RunState) -> _Offer:
        peer, requested = request.peer, max(1, request.max_trajectories // self._run.members_per_group)
        limit, reason = admission_limit(self._run, state), ""
        if state.phase in ("starting", "training"):
            reason = weights_reason(self._run, version=peer.status.version, committed=state.version)
            share = None
            if not reason and self._fair_share.is_limiting:
                counts, oldest = self._store_counts(), oldest_version(self._run, committed=state.version)
                # Other brokers offer the rest.
                if available := ceil((counts.returned + max(0, limit - counts.admitted)) * self._chief.share):
                    share = self._fair_share.num_groups(peer, available=available, oldest_version=oldest)
            if share == 0:
                group_s = self._fair_share.group_s(peer)
                detail = f"; a group takes {group_s:.1f} s here" if group_s else ""
                reason = f"speed: faster generators take all available prompts{detail}"
            if not reason:
                return _Offer(requested if share is None else min(requested, share), limit)
            limit = _ONLY_EVALUATIONS
        # In other phases, the store leases only evaluation rows anyway.
        return _Offer(self._fair_share.num_rows(peer, requested=requested), limit, reason)

    def _store_counts(self) -> StoreCounts:
        self._counts = self._counts or self._store.counts()
        return self._counts

    # --- prompts -------------------------------------------------------------------------------------------------
    def _upcoming(self, offer: _Offer, state: RunState) -> Upcoming:
        """Next prompts, for the store to choose from by success rate."""
        curriculum, seed = self._run.data.curriculum, self._run.seed
        num_new = min(offer.max_groups, offer.admission_limit - state.admitted)
        if curriculum is None or num_new <= 0:
            return NOTHING_SKIPPED
        counts = self._store_counts()
        may_skip = counts.rows_out_of_band < len(self._datasets["train"])
        if not (may_skip or self._has_warned):
            self._has_warned = True
            reason = (
                "the success rate of every row of data.train lies outside data.curriculum.low and high: no prompt is "
                "skipped until one lies inside; widen the band, or check that the reward tells right from wrong answers"
            )
            log.warning("no_row_in_band", reason=reason, **counts.curriculum)
            self._store.record_event("broker", reason)
        return look_ahead(state.next_ordinal, num_new, curriculum=curriculum, seed=seed, may_skip=may_skip)

    def _lease(self, peer: Peer, offer: _Offer, *, upcoming: Upcoming) -> list[Prompt]:
        known_empty = self._exhausted | self._without_rows if offer.reason else self._exhausted
        if offer.max_groups == 0 or peer.status.version in known_empty:
            return []
        # First: without stored images, leased prompts would lapse until quarantined.
        self._put_images({})
        leases = self._store.lease(
            owner=peer.owner,
            max_groups=offer.max_groups,
            group_size=self._run.members_per_group,
            has_baseline=self._run.has_baseline,
            lease_s=self._run.broker.lease_s,
            admission_limit=offer.admission_limit,
            # Evaluations accept one version, and no guests.
            version=-1 if peer.guest else peer.status.version,
            max_evaluations=ceil(_EVALUATION_FRACTION * offer.max_groups * self._run.members_per_group),
            upcoming=upcoming,
        )
        self._fair_share.record_leases(peer, leases)
        self._count_in(leases)
        if not leases and not peer.guest:
            # One store call answers all generators with this version.
            (self._without_rows if offer.reason else self._exhausted).add(peer.status.version)
        prompts = [make_prompt(lease, self._datasets[lease.purpose].row(lease.row)) for lease in leases]
        if peer.guest:
            self._guests.record_leases(peer, prompts)
        # Before any answer refers to them. Evaluations need none, because they are never trained on.
        trained = (prompt for prompt in prompts if prompt.lease.purpose == "train")
        self._put_images({image_id(data): data for prompt in trained for data in prompt.images})
        return prompts

    def _put_images(self, images: dict[str, bytes]) -> None:
        """Store these images and those of failed calls. Raises StoreUnavailableError."""
        self._unstored |= images
        if self._unstored:
            self._store.put_images(self._unstored)
            self._unstored = {}

    def _count_in(self, leases: list[Lease]) -> None:
        if not leases:
            return
        if self._run.data.curriculum:
            self._state = None
        if self._counts is None or self._counts.returned:
            # Only the store knows how many were returned prompts.
            self._counts = None
            return
        num_new = sum(lease.purpose == "train" for lease in leases)
        admitted, leased = self._counts.admitted + num_new, self._counts.leased + num_new
        self._counts = msgspec.structs.replace(self._counts, admitted=admitted, leased=leased)


def make_prompt(lease: Lease, row: Row) -> Prompt:
    """Build the prompt of a lease."""
    return Prompt(lease=lease, **msgspec.structs.asdict(row))


def _split(answer: Prompts, *, max_bytes: int) -> list[Prompts]:
    """Split an answer into messages that fit. Every single prompt does."""
    half = len(answer.prompts) // 2
    if not half or len(encode(answer)) <= max_bytes:
        return [answer]
    halves = (answer.prompts[:half], answer.prompts[half:])
    return [part for prompts in halves for part in _split(Prompts(prompts), max_bytes=max_bytes)]
