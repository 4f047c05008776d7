"""Logs: one line per event, on stderr; the launcher puts each role's into a file of its own."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from slipstream.runtime.clock import Clock

# @@ LogLimiter: what may happen a thousand times a second, told now and then, with how often it happened.
_BURST = 8
_SAY_EVERY_S = 5.0


@dataclass
class _Allowance:
    """Lines that may be said of one kind: `_BURST` at once, then one in `_SAY_EVERY_S`."""

    lines: float
    at: float
    left_out: int = 0

    def refill(self, now: float) -> None:
        self.lines = min(_BURST, self.lines + (now - self.at) / _SAY_EVERY_S)
        self.at = now


class LogLimiter:
    """Life: (log* -> flush)*. Kinds are few and the program's own: never made of what a peer sent."""

    def __init__(self, say: Callable[..., object], *, clock: Clock = time.monotonic) -> None:
        """`say(event, **details)` is called for each line."""
        self._say = say
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def log(self, event: str, kind: str, **details: object) -> bool:
        """It happened once; returns whether that was said now."""
        now = self._clock()
        allowance = self._allowances.setdefault((event, kind), _Allowance(_BURST, now))
        allowance.refill(now)
        if allowance.lines < 1:
            allowance.left_out += 1
            return False
        self._tell(event, kind, allowance, details)
        return True

    def flush(self) -> None:
        """Say how often what was left out happened, once a line may be said of it again."""
        now = self._clock()
        for (event, kind), allowance in self._allowances.items():
            allowance.refill(now)
            if allowance.left_out and allowance.lines >= 1:
                self._tell(event, kind, allowance, {})

    def _tell(self, event: str, kind: str, allowance: _Allowance, details: dict[str, object]) -> None:
        more = {"more": allowance.left_out} if allowance.left_out else {}
        allowance.lines, allowance.left_out = allowance.lines - 1, 0
        self._say(event, kind=kind, **details, **more)


def configure_logs(role: str) -> None:
    """Set structlog and the standard library's logging up for this process; call once, from a `__main__` file."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
