"""TimeAccount: seconds of a role by what it does; ProcessorTime: the seconds that its processes compute."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

import psutil

from slipstream.runtime.clock import Clock
from slipstream.runtime.trace import Trace

_LIST_EVERY_S = 10.0
"""Time between two looks for new child processes, which read the whole process table."""


class TimeAccount:
    """Seconds by phase. Exactly one phase runs at any time, so that all of them sum to the wall time.

    One thread switches; `totals` may be read by any. A switch takes about a microsecond.

    Example: account = TimeAccount("rest")
        with account.phase("forward"): ...       # a phase within it interrupts it, and `rest` goes on afterwards
    """

    def __init__(self, phase: str, *, trace: Trace | None = None, clock: Clock = time.perf_counter) -> None:
        """In real time, also where a serial run counts turns. `trace` gets each phase as a span."""
        self.trace = trace
        self._clock = clock
        self._lock = Lock()
        self._totals: dict[str, float] = {}
        self._phase = phase
        self._since = clock()

    def switch(self, phase: str) -> str:
        """End the current phase and begin another; return the one that ended."""
        with self._lock:
            before = self._phase
            if phase != before:
                now = self._clock()
                self._totals[before] = self._totals.get(before, 0.0) + now - self._since
                seconds, self._phase, self._since = now - self._since, phase, now
                if self.trace and self.trace.is_on:
                    self.trace.span(before, seconds=seconds)
            return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in that phase for the duration of the block."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def restart(self) -> None:
        with self._lock:
            self._totals, self._since = {}, self._clock()

    def totals(self) -> dict[str, float]:
        """Return seconds by phase, those of the current one included."""
        with self._lock:
            running = self._totals.get(self._phase, 0.0) + self._clock() - self._since
            return self._totals | {self._phase: running}

    def gauges(self) -> dict[str, float]:
        """Return the totals as gauges of a Pong, `time/PHASE`."""
        return {f"time/{phase}": round(seconds, 3) for phase, seconds in self.totals().items()}


class ProcessorTime:
    """Processor seconds of this process and its descendants, such as vLLM's engine process; only ever grows.

    Example: processor = ProcessorTime(); processor.seconds == 41.7
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._children: list[psutil.Process] = []
        self._list_at = clock()
        self._most = 0.0

    @property
    def seconds(self) -> float:
        if self._clock() >= self._list_at:
            self.list_children()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time() + ended.ru_utime + ended.ru_stime
        for child in self._children:
            # A child that has ended is counted above once it was waited for.
            with suppress(psutil.Error):
                total += sum(child.cpu_times()[:4])
        self._most = max(self._most, total)
        return self._most

    def list_children(self) -> None:
        """Look for children now; call it when one was started that is to be counted from the beginning."""
        self._list_at = self._clock() + _LIST_EVERY_S
        with suppress(psutil.Error):
            self._children = psutil.Process().children(recursive=True)
