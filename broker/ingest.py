"""Ingest: trajectories from the wire into the store, acknowledged only once they are there."""

import structlog

from broker.messages import Ack, Message, Nack, Put
from buffer.codec import check_header
from buffer.errors import Refused, StoreUnavailable
from buffer.store import Insertion, Store
from buffer.trajectory import TrajectoryHeader

_RETRY_S = 1.0
_RETRIABLE = ("store_full",)

log = structlog.get_logger(__name__)


class Ingest:
    """Collects what arrived during one step of the router, inserts it as one batch, answers every sender.

    Consumes: Put messages with their payload.
    Produces: one Ack or Nack per Put.
    Invariant: an Ack is produced only after the store has the trajectory (as durable as configured).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: list[tuple[bytes, TrajectoryHeader, bytes]] = []

    def take(self, identity: bytes, put: Put, payload: bytes) -> Nack | None:
        """Accept a Put into the batch; returns the Nack for one that is malformed (it is in quarantine then)."""
        try:
            check_header(put.header, payload)
        except Refused as refusal:
            return self._refuse(put.header, payload, refusal)
        self._pending.append((identity, put.header, payload))
        return None

    def flush(self) -> list[tuple[bytes, Message]]:
        """Insert the batch; returns (identity, answer) pairs."""
        batch, self._pending = self._pending, []
        if not batch:
            return []
        try:
            insertions = self._store.insert([(header, payload) for _, header, payload in batch])
        except StoreUnavailable as error:
            log.warning("store_unavailable", error=str(error), trajectories=len(batch))
            return [(who, Nack(header.id, "store_unavailable", False, _RETRY_S)) for who, header, _ in batch]
        return self._answers(batch, insertions)

    def _answers(
        self, batch: list[tuple[bytes, TrajectoryHeader, bytes]], insertions: list[Insertion]
    ) -> list[tuple[bytes, Message]]:
        acks: dict[bytes, list[str]] = {}
        answers: list[tuple[bytes, Message]] = []
        for (identity, header, payload), insertion in zip(batch, insertions, strict=True):
            if insertion.outcome != "refused":
                acks.setdefault(identity, []).append(header.id)
                continue
            is_fatal = insertion.reason not in _RETRIABLE
            if is_fatal:
                self._keep(insertion.reason, payload)
                log.warning("trajectory_refused", id=header.id, reason=insertion.reason)
            answers.append((identity, Nack(header.id, insertion.reason, is_fatal, _RETRY_S)))
        return [*answers, *((identity, Ack(ids)) for identity, ids in acks.items())]

    def _refuse(self, header: TrajectoryHeader, payload: bytes, refusal: Refused) -> Nack:
        log.warning("trajectory_refused", id=header.id, reason=refusal.reason, detail=refusal.detail)
        self._keep(refusal.reason, payload)
        return Nack(header.id, str(refusal), True)

    def _keep(self, reason: str, payload: bytes) -> None:
        try:
            self._store.quarantine(reason, payload)
        except StoreUnavailable as error:
            log.warning("quarantine_failed", error=str(error))
