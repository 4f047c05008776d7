"""Logs: one line per event on stderr, which the launcher redirects to files."""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict

from slipstream.runtime.clock import Clock
from slipstream.runtime.command_line import printable

_BURST = 8
_LINE_EVERY_S = 5.0


@dataclass
class _Allowance:
    """Token bucket for one kind of line."""

    lines: float
    at: float
    left_out: int = 0

    def refill(self, now: float) -> None:
        self.lines = min(_BURST, self.lines + (now - self.at) / _LINE_EVERY_S)
        self.at = now


class LogLimiter:
    """Rate limit for events; lines count suppressed ones. Life: (log* -> flush)*.

    Each kind keeps state, so it must not contain peer input.
    """

    def __init__(self, write: Callable[..., object], *, clock: Clock = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def log(self, event: str, kind: str, **details: object) -> bool:
        """Return whether a line was written."""
        now = self._clock()
        allowance = self._allowances.setdefault((event, kind), _Allowance(_BURST, now))
        allowance.refill(now)
        if allowance.lines < 1:
            allowance.left_out += 1
            return False
        self._write_line(event, kind, allowance, details)
        return True

    def flush(self) -> None:
        """Write the counts of suppressed lines, within the rate limit."""
        now = self._clock()
        for (event, kind), allowance in self._allowances.items():
            allowance.refill(now)
            if allowance.left_out and allowance.lines >= 1:
                self._write_line(event, kind, allowance, {})

    def _write_line(self, event: str, kind: str, allowance: _Allowance, details: dict[str, object]) -> None:
        more = {"more": allowance.left_out} if allowance.left_out else {}
        # Reset first, so that a writer error cannot repeat the count.
        allowance.lines, allowance.left_out = allowance.lines - 1, 0
        self._write(event, kind=kind, **details, **more)


class _LossyStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_output_lossy() -> None:
    """Drop output that a full disk or closed terminal does not take."""
    if not isinstance(sys.stdout, _LossyStream):
        sys.stdout = cast(TextIO, _LossyStream(sys.stdout))
    if not isinstance(sys.stderr, _LossyStream):
        sys.stderr = cast(TextIO, _LossyStream(sys.stderr))


def escape_control_characters(_logger: object, _method: str, event: EventDict) -> EventDict:
    """structlog processor: keep events on one line, and escape control sequences from peers."""
    return {
        key: printable(value).replace("\n", r"\n") if isinstance(value, str) else value for key, value in event.items()
    }


def configure_logs(role: str) -> None:
    """Configure structlog and logging, once, from a `__main__` module."""
    make_output_lossy()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            escape_control_characters,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
