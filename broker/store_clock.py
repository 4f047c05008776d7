"""StoreClock: keeps leases and claims alive when the store's clock is set, or its machine was suspended."""

import structlog

from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock

_JUMP_S = 5.0
"""Difference between the store's clock and this process's from which on it is a jump, and no slow answer."""

log = structlog.get_logger(__name__)


class StoreClock:
    """Compares the store's clock with this process's. Life: follow, about once a second."""

    def __init__(self, store: Store, run: RunConfig, *, clock: Clock) -> None:
        self._store = store
        self._run = run
        self._clock = clock
        self._is_ahead_s: float | None = None

    def follow(self) -> None:
        """Move the deadlines in the store by the jump of its clock since the last call, if there was one."""
        ahead_s = self._store.now() - self._clock()
        jump_s = 0.0 if self._is_ahead_s is None else ahead_s - self._is_ahead_s
        has_jumped = abs(jump_s) > _JUMP_S
        self._store.follow_clock(
            jump_s=jump_s if has_jumped and jump_s > 0 else 0.0,
            lease_s=self._run.broker.lease_s,
            claim_lease_s=self._run.buffer.claim_lease_s,
        )
        # Only now: after an error the jump is found again.
        self._is_ahead_s = ahead_s
        if has_jumped:
            what = f"the store's clock jumped by {jump_s:+.0f} s: leases and claims keep the time they had left"
            log.warning("clock_jumped", what=what)
            self._store.record_event("broker", what)
