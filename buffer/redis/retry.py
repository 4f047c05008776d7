"""RetryPolicy: repeats commands that the store did not answer, until it is back or the time is up.

Every operation of the store may be repeated after a lost answer: docs/decisions/0008-what-survives-a-killed-store.md.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

from slipstream.runtime.disk import is_disk_full

_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
"""Between two attempts: the delay added for a store that is back."""
_COOLDOWN_S = 1.0
"""After an answer that did not come in time, for clients that do not retry."""
_LOG_EVERY_S = 5.0
_WRITES_REFUSED = ("MISCONF", "READONLY", "OOM command not allowed")

log = structlog.get_logger(__name__)


class RetryPolicy(Retry):
    """Repeats a client's commands for `timeout_s` after the first failure; with 0, not at all. Thread-safe.

    A full disk does not count: its commands are repeated until somebody has made room.

    With 0, one unanswered command makes all commands of the next second fail at once: a suspended server delays a loop
    that must not block now and then, not with every command.

    Example: redis.Redis.from_url(url, retry=RetryPolicy(60.0, target="the store at unix:///run/redis.sock"))
    """

    def __init__(self, timeout_s: float, *, target: str) -> None:
        """`target` names the server in status and log."""
        super().__init__(NoBackoff(), 0)
        self.timeout_s = timeout_s
        self._target = target
        self._waiting_since: dict[int, float] = {}
        self._is_disk_full = False
        self._thread = threading.local()
        self._next_log_at = 0.0
        self._cools_until = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: redis-py copies the policy into each connection, and they must share its state."""
        return self

    @property
    def reason(self) -> str:
        """The longest wait under way, such as `waiting for the store at ... for 3 s of 60 s`; empty when none."""
        since = min(list(self._waiting_since.values()), default=None)
        if since is None:
            return ""
        if self._is_disk_full:
            return f"waiting {time.monotonic() - since:.0f} s for room on the disk of {self._target}"
        return f"waiting for {self._target} for {time.monotonic() - since:.0f} s of {self.timeout_s:g} s"

    def call_with_retry(self, *arguments: Any, **named: Any) -> Any:
        """Run a command; called by redis-py for every command, and for the connecting within it."""
        attempt = super().call_with_retry
        # Connecting is part of the command that is repeated already: its time must not count twice.
        if getattr(self._thread, "in_command", False):
            return attempt(*arguments, **named)
        self._thread.in_command = True
        repeat = self._retrying() if self.timeout_s > 0 else self._once
        try:
            return repeat(attempt, *arguments, **named)
        finally:
            self._thread.in_command = False
            self._waiting_since.pop(threading.get_ident(), None)

    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception(is_transient),
            stop=_StopAfter(self.timeout_s),
            wait=wait_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            before_sleep=self._record_wait,
            reraise=True,
        )

    def _once(self, attempt: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if time.monotonic() < self._cools_until:
            raise redis.TimeoutError("it did not answer a moment ago")
        try:
            return attempt(*arguments, **named)
        except redis.TimeoutError:
            self._cools_until = time.monotonic() + _COOLDOWN_S
            raise

    def _record_wait(self, state: RetryCallState) -> None:
        self._waiting_since.setdefault(threading.get_ident(), state.start_time)
        now = time.monotonic()
        error = state.outcome.exception() if state.outcome else None
        self._is_disk_full = error is not None and is_disk_full(error)
        if now >= self._next_log_at:
            self._next_log_at = now + _LOG_EVERY_S
            log.warning("waiting", for_=self._target, timeout_s=self.timeout_s, error=str(error))


class _StopAfter:
    """Ends the attempts of one command `timeout_s` after the first, or after the last that met a full disk."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._begins_at = 0.0

    def __call__(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        now = time.monotonic()
        if error is not None and is_disk_full(error):
            self._begins_at = now
        return now - max(self._begins_at, state.start_time) >= self._timeout_s


def is_transient(error: BaseException) -> bool:
    """Whether the same command may succeed later: the store is away, still loads its data, or refuses writes."""
    if isinstance(error, redis.AuthenticationError):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError) or refuses_writes(error)


def refuses_writes(error: BaseException) -> bool:
    """Whether the server refuses all writes: disk full, memory full, or a replica (a script's error has no type)."""
    if isinstance(error, redis.ReadOnlyError | redis.OutOfMemoryError):
        return True
    return isinstance(error, redis.ResponseError) and any(word in str(error) for word in _WRITES_REFUSED)
