"""ClaimKeeper: renews the claim of a step while the step runs."""

import threading
from types import TracebackType
from typing import Self

import structlog

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import Claim
from slipstream.buffer.store import Store

log = structlog.get_logger(__name__)


class ClaimKeeper:
    """Context that renews a claim while its step runs, so that a slow step is not taken for a dead learner.

    A claim may lapse nevertheless, when this process stands still; its fencing token then fails the commit.
    """

    def __init__(self, store: Store, claim: Claim, *, lease_s: float) -> None:
        self._store = store
        self._claim = claim
        self._lease_s = lease_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(timeout=1.0)

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s / 3):
            try:
                self._store.renew_claim(self._claim, lease_s=self._lease_s)
            except ReplayBufferError as error:
                log.warning("claim_not_renewed", step=self._claim.step, error=str(error))
