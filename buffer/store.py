"""Store: a run's durable state, its outages as a role sees them, and requests to a live run (scale, drain, pause)."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.configs.base import ConfigError
from slipstream.configs.learner import PAUSE_REQUEST
from slipstream.runtime.clock import Clock

Store = RedisStore
"""All operations. The tests also run them against a model on dicts."""

_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """A period of failing store calls. Life cycle: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence per call."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, for a Nack; empty while the store works."""

    @property
    def seconds(self) -> float:
        """Duration so far; 0 without an outage."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def record(self, error: StoreUnavailableError) -> None:
        """Record a failed call; report it every few seconds."""
        now = self._clock()
        if self._began_at is None:
            self._began_at = self._next_report_at = now
        self.reason = "store_cannot_write" if isinstance(error, StoreCannotWriteError) else "store_unavailable"
        if now >= self._next_report_at:
            self._next_report_at = now + _REPORT_INTERVAL_S
            self._report(f"waiting for the store for {self.seconds:.0f} s: {error}")

    def end(self) -> None:
        if self._began_at is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._began_at, self.reason = None, ""


# --- requests to a live run ------------------------------------------------------------------------------------------
DRAIN_REQUEST = "drain/"
"""Subject prefix, followed by the generator id. Value: deadline on the store's clock and, once sent, the incarnation
that received the order.
"""
GENERATORS = "generators"
"""Subject of a scaling request. Value: `<number> <request id>`."""
_DRAIN_TIMEOUT_S = 60.0
"""For returning leases, sending the outbox, and leaving."""
_LAUNCHER_TIMEOUT_S = 10.0
_POLL_EVERY_S = 0.2


class NoAnswerError(Exception):
    """A role that must answer a command did not, or is missing."""


def request_generators(store: Store, target: int, *, run: str) -> int:
    """Have the launcher change the number of generators; return the previous number.

    Raises ConfigError if it refuses, NoAnswerError if it does not answer.
    """
    before = _launcher(store)
    # A killed launcher leaves its last report behind.
    if before.get("state") != "ready" or store.now() - before["reported_at"] > _LAUNCHER_TIMEOUT_S:
        remedy = "start generators with `python -m slipstream.generators`"
        raise NoAnswerError(f"run {run!r} must have a live launcher, got none: {remedy}")
    # The id distinguishes the answer from that to an earlier command.
    request_id = uuid.uuid4().hex
    store.request("launcher", GENERATORS, f"{target} {request_id}")
    ends_at = time.monotonic() + _LAUNCHER_TIMEOUT_S
    while (launcher := _launcher(store)).get("answered") != request_id:
        if time.monotonic() >= ends_at:
            # It must not take effect after this command has reported a failure.
            store.take_requests("launcher")
            must = f"the launcher of run {run!r} must answer within {_LAUNCHER_TIMEOUT_S:g} s"
            raise NoAnswerError(f"{must}, but did not; nothing was changed")
        time.sleep(_POLL_EVERY_S)
    if launcher["refusal"]:
        raise ConfigError(launcher["refusal"])
    return before["generators_target"]


def _launcher(store: Store) -> dict[str, Any]:
    return store.roles().get(LAUNCHER, {})


def request_drain(store: Store, generator_id: str, *, run: str) -> None:
    """Ask a generator, through the broker, to leave. Raises ConfigError if it is not connected."""
    roles = store.roles().items()
    connected = sorted(name for name, gauges in roles if gauges.get("role") == "generator" and _is_connected(gauges))
    if generator_id not in connected:
        known = ", ".join(connected) or "none"
        raise ConfigError(f"drain needs a generator of run {run!r}, got {generator_id!r}; there are {known}.")
    # After the deadline the broker ignores the request, which has been reported as failed.
    store.request("broker", DRAIN_REQUEST + generator_id, str(store.now() + _DRAIN_TIMEOUT_S))


def wait_until_gone(store: Store, generator_id: str) -> None:
    """Wait until the generator has left. Raises NoAnswerError at the deadline."""
    ends_at = time.monotonic() + _DRAIN_TIMEOUT_S
    while _is_connected(gauges := store.roles().get(generator_id, {})):
        if time.monotonic() >= ends_at:
            raise NoAnswerError(
                f"{generator_id} must leave within {_DRAIN_TIMEOUT_S:g} s, but it is still {gauges.get('state')} "
                f"({gauges.get('reason') or 'no reason given'}): check that it and the broker are alive."
            )
        time.sleep(_POLL_EVERY_S)


def _is_connected(gauges: dict[str, Any]) -> bool:
    return gauges.get("state", "gone") != "gone"


def request_pause(store: Store, *, is_off: bool, run: str) -> None:
    """Set or withdraw the standing pause request. Raises ConfigError if the run is not training, or not paused."""
    if (phase := store.run_state().phase) not in ("starting", "training"):
        raise ConfigError(f"pause needs a run that trains, got run {run!r}, which is {phase}.")
    if not is_off:
        store.request("learner", PAUSE_REQUEST, str(store.now()))
    elif PAUSE_REQUEST not in store.take_requests("learner", subjects=[PAUSE_REQUEST]):
        raise ConfigError(f"pause --off needs a run that is paused, got run {run!r}, which is not.")
