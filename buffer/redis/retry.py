"""RetryPolicy: repeats what a store that is away did not answer, until it is back or the time is up.

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
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
"""Between two tries: what a store that is back is kept waiting."""
_REST_S = 1.0
"""After an answer that did not come in time, for clients without patience."""
_SAY_EVERY_S = 5.0
_WRITES_REFUSED = ("MISCONF", "READONLY", "OOM command not allowed")

log = structlog.get_logger(__name__)


class RetryPolicy(Retry):
    """How a client repeats its commands: for `patience_s` after the first failure; with 0, not at all. Thread-safe.

    Without patience, one unanswered command makes all of the next second fail at once: a suspended server holds up a
    loop that must go on now and then, not with every command.

    Example: redis.Redis.from_url(url, retry=RetryPolicy(60.0, what="the store at unix:///run/redis.sock"))
    """

    def __init__(self, patience_s: float, *, what: str) -> None:
        """`what` is waited for, in status and log."""
        super().__init__(NoBackoff(), 0)
        self.patience_s = patience_s
        """Seconds."""
        self._what = what
        self._waiting: dict[int, float] = {}
        self._inside = threading.local()
        self._say_at = 0.0
        self._rests_until = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Connections copy what they are given; they all share this one."""
        return self

    @property
    def reason(self) -> str:
        """What is waited for right now, such as `waiting for the store at ... for 3 s of 60 s`; empty when nothing."""
        since = min(list(self._waiting.values()), default=None)
        if since is None:
            return ""
        return f"waiting for {self._what} for {time.monotonic() - since:.0f} s of {self.patience_s:g} s"

    def call_with_retry(self, *arguments: Any, **named: Any) -> Any:
        """Called by redis-py for every command, and for the connecting within it."""
        attempt = super().call_with_retry
        # Connecting is part of the command that is repeated already: its time must not count twice.
        if getattr(self._inside, "a_command", False):
            return attempt(*arguments, **named)
        self._inside.a_command = True
        repeat = self._repeating() if self.patience_s > 0 else self._once
        try:
            return repeat(attempt, *arguments, **named)
        finally:
            self._inside.a_command = False
            self._waiting.pop(threading.get_ident(), None)

    def _repeating(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception(is_worth_waiting),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            before_sleep=self._note,
            reraise=True,
        )

    def _once(self, attempt: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if time.monotonic() < self._rests_until:
            raise redis.TimeoutError("it did not answer a moment ago")
        try:
            return attempt(*arguments, **named)
        except redis.TimeoutError:
            self._rests_until = time.monotonic() + _REST_S
            raise

    def _note(self, state: RetryCallState) -> None:
        self._waiting.setdefault(threading.get_ident(), state.start_time)
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            error = state.outcome.exception() if state.outcome else None
            log.warning("waiting", for_=self._what, patience_s=self.patience_s, error=str(error))


def is_worth_waiting(error: BaseException) -> bool:
    """Whether the same command may succeed later: the store is away, still loads its data, or refuses writes."""
    if isinstance(error, redis.AuthenticationError):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError) or refuses_writes(error)


def refuses_writes(error: BaseException) -> bool:
    """Whether the server took nothing in: disk full, memory full, a replica (inside a script the type is lost)."""
    if isinstance(error, redis.ReadOnlyError | redis.OutOfMemoryError):
        return True
    return isinstance(error, redis.ResponseError) and any(word in str(error) for word in _WRITES_REFUSED)
