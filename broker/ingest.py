"""Ingest: trajectories from the wire into the store, acknowledged only once they are there."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from slipstream.broker.messages import Ack, Message, Nack, Put, oversized
from slipstream.broker.store_outage import StoreOutage
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, check_header
from slipstream.buffer.errors import RecordRefusedError, StoreUnavailableError
from slipstream.buffer.store import Insertion, Store
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.runtime.logs import LogLimiter

_MAX_TRAJECTORIES = 512
_MAX_BYTES = 16 * 2**20
_RETRY_S = 1.0
_RETRIABLE = ("store_full",)
"""The store's own reasons that pass; so do those of an StoreOutage."""

log = structlog.get_logger(__name__)

_Arrived = tuple[bytes, TrajectoryHeader, bytes]
"""Identity of the sender, header, payload."""


class Ingest:
    """Collects what arrived during one step of the router, inserts it, answers every sender.

    As soon as there is enough for one call of the store it is inserted on a thread, so that the store works on it while
    the next ones are checked; at the end of the step all of that is waited for.

    Consumes: Put messages with their payloads.
    Produces: one Ack or Nack per trajectory.
    Invariant: an Ack is produced only after the store has the trajectory (as durable as configured).
    """

    def __init__(
        self, store: Store, outage: StoreOutage, *, throttle: LogLimiter | None = None, max_payload_bytes: int = 2**26
    ) -> None:
        """`outage` is told when the store is away, `throttle` of every refusal."""
        self._throttle = throttle or LogLimiter(log.warning)
        self._max_payload_bytes = max_payload_bytes
        self._store = store
        self._outage = outage
        self._pending: list[_Arrived] = []
        self._pending_bytes = 0
        self._inserting: list[tuple[list[_Arrived], Callable[[], list[Insertion]]]] = []
        self._num_taken = 0
        self._bytes_taken = 0
        self._inserter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inserter")
        self.deferred: Counter[str] = Counter()
        """Trajectories a sender was told to send again, by reason, since this broker started."""
        self.reason = ""
        """Why the newest batch was put off; empty when it was not."""

    @property
    def is_full(self) -> bool:
        """Whether it is time to flush."""
        return self._num_taken >= _MAX_TRAJECTORIES or self._bytes_taken >= _MAX_BYTES

    def take(self, identity: bytes, put: Put, payloads: list[bytes]) -> list[Nack]:
        """Accept a Put into the batch; returns a Nack for each of it that is malformed (it is in quarantine then)."""
        if len(put.headers) != len(payloads):
            return self._refuse_count(put.headers, payloads)
        nacks = (self._take_one(identity, *packed) for packed in zip(put.headers, payloads, strict=True))
        return [nack for nack in nacks if nack]

    def _take_one(self, identity: bytes, header: TrajectoryHeader, payload: bytes) -> Nack | None:
        try:
            if len(payload) > self._max_payload_bytes:
                raise oversized(payload, max_bytes=self._max_payload_bytes)
            check_header(header, payload)
        except RecordRefusedError as refusal:
            self._keep(refusal.reason, payload)
            return self._fatal(header, refusal.reason, detail=refusal.detail)
        except Exception:
            # What nobody foresaw must not be sent again, to the next broker, for ever.
            if self._throttle.log("check_failed", "fault", id=header.id):
                log.exception("check_failed", id=header.id)
            self._keep("fault", payload)
            return self._fatal(header, "fault", detail="its check failed; the broker's log says how")
        self._pending.append((identity, header, payload))
        self._pending_bytes += len(payload)
        self._num_taken += 1
        self._bytes_taken += len(payload)
        if len(self._pending) == MAX_TRAJECTORIES or self._pending_bytes >= MAX_BYTES:
            batch = self._take_pending()
            self._inserting.append((batch, self._inserter.submit(self._insert, batch).result))
        return None

    def flush(self) -> list[tuple[bytes, Message]]:
        """Insert what is left, wait for the rest; returns (identity, answer) pairs."""
        inserting, self._inserting = self._inserting, []
        self._num_taken = self._bytes_taken = 0
        answers = [answer for batch, result in inserting for answer in self._settle(batch, result)]
        batch = self._take_pending()
        return [*answers, *self._settle(batch, lambda: self._insert(batch))] if batch else answers

    def _take_pending(self) -> list[_Arrived]:
        batch, self._pending, self._pending_bytes = self._pending, [], 0
        return batch

    def _insert(self, batch: list[_Arrived]) -> list[Insertion]:
        return self._store.insert([(header, payload) for _, header, payload in batch])

    def _settle(self, batch: list[_Arrived], result: Callable[[], list[Insertion]]) -> list[tuple[bytes, Message]]:
        try:
            insertions = result()
        except StoreUnavailableError as error:
            self._outage.record(error)
            self.reason = self._outage.reason
            return [(who, self._not_now(header)) for who, header, _ in batch]
        self.reason = next((each.reason for each in insertions if each.reason in _RETRIABLE), "")
        return self._answers(batch, insertions)

    def _answers(self, batch: list[_Arrived], insertions: list[Insertion]) -> list[tuple[bytes, Message]]:
        acks: dict[bytes, list[str]] = {}
        answers: list[tuple[bytes, Message]] = []
        for (identity, header, payload), insertion in zip(batch, insertions, strict=True):
            if insertion.outcome != "refused":
                acks.setdefault(identity, []).append(header.id)
                continue
            if insertion.reason in _RETRIABLE:
                answers.append((identity, self._not_now(header)))
                continue
            self._keep(insertion.reason, payload)
            answers.append((identity, self._fatal(header, insertion.reason)))
        return [*answers, *((identity, Ack(ids)) for identity, ids in acks.items())]

    def _refuse_count(self, headers: list[TrajectoryHeader], payloads: list[bytes]) -> list[Nack]:
        detail = f"a Put of {len(headers)} trajectories must have as many payloads, got {len(payloads)}"
        self._keep("frame_count", b"".join(payloads[:1]))
        return [self._fatal(header, "frame_count", detail=detail) for header in headers]

    def _not_now(self, header: TrajectoryHeader) -> Nack:
        self.deferred[self.reason] += 1
        return Nack(header.id, self.reason, False, retry_after_s=_RETRY_S, lease_id=header.lease_id)

    def _keep(self, reason: str, payload: bytes) -> None:
        try:
            self._store.quarantine(reason, payload)
        except StoreUnavailableError as error:
            self._throttle.log("quarantine_failed", reason, error=str(error))

    def _fatal(self, header: TrajectoryHeader, reason: str, *, detail: str = "") -> Nack:
        self._throttle.log("trajectory_refused", reason, id=header.id, detail=detail)
        return Nack(header.id, f"{reason}: {detail}" if detail else reason, True, lease_id=header.lease_id)
