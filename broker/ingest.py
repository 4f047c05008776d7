"""Ingest: inserts received trajectories into the store, then acknowledges them."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter

import structlog

from slipstream.broker.messages import Ack, Message, Nack, Put, oversized_error
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, check_header
from slipstream.buffer.errors import RecordRefusedError, StoreUnavailableError
from slipstream.buffer.records import Insertion
from slipstream.buffer.store import Store, StoreOutage
from slipstream.buffer.trajectory import Trajectory, TrajectoryHeader
from slipstream.runtime.logs import LogLimiter

# Limits per step. Acks wait for all of its inserts.
_MAX_TRAJECTORIES = 512
_MAX_BYTES = 16 * 2**20
_RETRY_S = 1.0
_RETRIABLE = ("store_full",)
"""Temporary refusals, answered like a store outage by a non-fatal Nack."""

log = structlog.get_logger(__name__)

_Received = tuple[bytes, TrajectoryHeader, bytes, str]
"""Sender's identity, header, payload, and guest (empty for others)."""
_Answer = tuple[bytes, Message]
"""Receiver's identity, and an Ack or Nack."""
_guest_of = itemgetter(3)
GuestCheck = Callable[[str, TrajectoryHeader, bytes, Trajectory], None]
"""(guest, header, payload, trajectory); raises RecordRefusedError if the guest may not send it."""


class Ingest:
    """Inserts the trajectories of one router step and answers every sender.

    A thread inserts full batches while the router checks the next ones.

    Consumes: Put messages with their payloads.
    Produces: one Ack or Nack per trajectory.
    Invariant: an Ack follows only after the store holds the trajectory, as durably as configured.
    """

    def __init__(
        self,
        store: Store,
        outage: StoreOutage,
        check_guest: GuestCheck | None = None,
        log_limiter: LogLimiter | None = None,
        *,
        max_payload_bytes: int = 2**26,
    ) -> None:
        self._check_guest = check_guest
        self._log_limiter = log_limiter or LogLimiter(log.warning)
        self._max_payload_bytes = max_payload_bytes
        self._store = store
        self._outage = outage
        self._pending: list[_Received] = []
        self._pending_bytes = 0
        self._inserting: list[tuple[list[_Received], Callable[[], list[Insertion]]]] = []
        self._num_received = self._bytes_received = 0
        # One thread, so that batches reach the store in order of arrival.
        self._inserter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inserter")
        self.deferred: Counter[str] = Counter()
        """Non-fatal Nacks by reason, since this broker started."""
        self.reason = ""
        """Reason for deferring the newest batch; empty if it was accepted."""

    @property
    def is_full(self) -> bool:
        return self._num_received >= _MAX_TRAJECTORIES or self._bytes_received >= _MAX_BYTES

    def add(self, identity: bytes, put: Put, payloads: list[bytes], *, guest: str = "") -> list[Nack]:
        """Add the trajectories of a Put; quarantine malformed ones and return their fatal Nacks."""
        if len(put.headers) != len(payloads):
            detail = f"a Put of {len(put.headers)} trajectories must have as many payloads, got {len(payloads)}"
            self._quarantine("frame_count", b"".join(payloads[:1]))
            return [self._fatal(header, "frame_count", detail=detail) for header in put.headers]
        nacks = (self._add_one(identity, *packed, guest) for packed in zip(put.headers, payloads, strict=True))
        return [nack for nack in nacks if nack]

    def _add_one(self, identity: bytes, header: TrajectoryHeader, payload: bytes, guest: str) -> Nack | None:
        try:
            if len(payload) > self._max_payload_bytes:
                raise oversized_error(payload, max_bytes=self._max_payload_bytes)
            trajectory = check_header(header, payload)
            if guest and self._check_guest:
                self._check_guest(guest, header, payload, trajectory)
        except RecordRefusedError as refusal:
            self._quarantine(refusal.reason, payload)
            return self._fatal(header, refusal.reason, detail=refusal.detail)
        except Exception:
            # Fatal: the sender would resend it forever after any other Nack.
            if self._log_limiter.log("check_failed", "internal_error", id=header.id):
                log.exception("check_failed", id=header.id)
            self._quarantine("internal_error", payload)
            return self._fatal(header, "internal_error", detail="the check raised an exception; see the broker's log")
        self._pending.append((identity, header, payload, guest))
        self._pending_bytes += len(payload)
        self._num_received += 1
        self._bytes_received += len(payload)
        if len(self._pending) == MAX_TRAJECTORIES or self._pending_bytes >= MAX_BYTES:
            batch = self._pop_pending()
            self._inserting.append((batch, self._inserter.submit(self._insert, batch).result))
        return None

    def flush(self) -> list[_Answer]:
        """Insert the last batch and wait for all."""
        inserting, self._inserting = self._inserting, []
        self._num_received = self._bytes_received = 0
        answers = [answer for batch, result in inserting for answer in self._answer_batch(batch, result)]
        batch = self._pop_pending()
        return [*answers, *self._answer_batch(batch, lambda: self._insert(batch))] if batch else answers

    def _pop_pending(self) -> list[_Received]:
        batch, self._pending, self._pending_bytes = self._pending, [], 0
        return batch

    def _insert(self, batch: list[_Received]) -> list[Insertion]:
        insertions: list[Insertion] = []
        for guest, sent in groupby(batch, _guest_of):
            insertions += self._store.insert([(header, payload) for _, header, payload, _ in sent], guest=guest)
        return insertions

    def _answer_batch(self, batch: list[_Received], result: Callable[[], list[Insertion]]) -> list[_Answer]:
        try:
            insertions = result()
        except StoreUnavailableError as error:
            # The insert may have succeeded. Resending is safe: inserts are idempotent.
            self._outage.record(error)
            self.reason = self._outage.reason
            return [(identity, self._defer(header)) for identity, header, *_ in batch]
        self.reason = next((each.reason for each in insertions if each.reason in _RETRIABLE), "")
        acks: dict[bytes, list[str]] = {}
        answers: list[_Answer] = []
        for (identity, header, payload, _), insertion in zip(batch, insertions, strict=True):
            if insertion.outcome != "refused":
                acks.setdefault(identity, []).append(header.id)
            elif insertion.reason in _RETRIABLE:
                answers.append((identity, self._defer(header)))
            else:
                self._quarantine(insertion.reason, payload)
                answers.append((identity, self._fatal(header, insertion.reason)))
        return [*answers, *((identity, Ack(ids)) for identity, ids in acks.items())]

    def _defer(self, header: TrajectoryHeader) -> Nack:
        self.deferred[self.reason] += 1
        return Nack(header.id, self.reason, False, retry_after_s=_RETRY_S, lease_id=header.lease_id)

    def _quarantine(self, reason: str, payload: bytes) -> None:
        try:
            self._store.quarantine(reason, payload)
        except StoreUnavailableError as error:
            # Quarantine serves diagnosis only, so its failure must not prevent the Nack.
            self._log_limiter.log("quarantine_failed", reason, error=str(error))

    def _fatal(self, header: TrajectoryHeader, reason: str, *, detail: str = "") -> Nack:
        self._log_limiter.log("trajectory_refused", reason, id=header.id, detail=detail)
        return Nack(header.id, f"{reason}: {detail}" if detail else reason, True, lease_id=header.lease_id)
