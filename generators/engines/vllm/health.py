"""Health of vLLM's engine: statistics, progress, and the error that ended its process.

vLLM reports only that the engine died. Here the engine process also writes its fatal error to a file.
"""

import hashlib
import logging
import multiprocessing
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.errors import EngineDiedError
from slipstream.runtime.clock import Clock


class StepWatchdog:
    """Detects an engine with requests that makes no steps, although it answers health checks."""

    def __init__(self, *, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = -1
        self._progressed_at = clock()

    def check(self, load: EngineLoad, *, is_paused: bool) -> None:
        if is_paused or not load.num_open or load.num_steps != self._num_steps:
            self._num_steps, self._progressed_at = load.num_steps, self._clock()
        elif self._clock() - self._progressed_at > self._limit_s:
            raise EngineDiedError(
                f"the engine must make a step within {self._limit_s:g} s while requests are open, but made none with "
                f"{load.num_open} open: see the log above, or raise learner.stall.timeout_s"
            )


class LoadRecorder(PrometheusStatLogger):
    """Keeps the newest statistics. Replaces vLLM's Prometheus metrics, which cost more."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        # super().__init__() would register the metrics.
        self.load = EngineLoad()
        """As of the newest step, without `num_open`."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        changes = {"num_steps": self.load.num_steps + 1}
        if scheduler_stats is not None:
            num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            changes |= {"kv_usage": scheduler_stats.kv_cache_usage, "num_waiting": num_waiting}
        if iteration_stats is not None:
            changes["num_preempted"] = self.load.num_preempted + iteration_stats.num_preempted_reqs
        self.load = msgspec.structs.replace(self.load, **changes)

    # The inherited methods would write to unregistered metrics.
    def log_engine_initialized(self) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...


def read_load(llm: AsyncLLM) -> EngineLoad:
    """The engine must have a LoadRecorder."""
    newest = next(logger.load for logger in llm.logger_manager.stat_loggers if isinstance(logger, LoadRecorder))
    if num_open := llm.output_processor.get_num_unfinished_requests():
        return msgspec.structs.replace(newest, num_open=num_open)
    # An idle engine's statistics still show the last request.
    return msgspec.structs.replace(newest, kv_usage=0.0, num_waiting=0)


_MAX_LENGTH = 400


class _FatalErrorHandler(logging.Handler):
    """Writes the engine process's first fatal exception to a file."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # "EngineCore failed to start." or "EngineCore encountered a fatal error."
        if error is None or not str(record.msg).startswith("EngineCore"):
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LENGTH]
        with suppress(OSError), os.fdopen(os.open(_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def report_fatal_errors() -> None:
    """Make this engine process record its fatal error."""
    logging.getLogger("vllm").addHandler(_FatalErrorHandler())


def read_fatal_error() -> str:
    """Fatal error in one line, or empty."""
    try:
        return _path().read_text(errors="replace")
    except OSError:
        return ""


def forget_fatal_error() -> None:
    """Delete the error of an earlier engine."""
    _path().unlink(missing_ok=True)


def _path() -> Path:
    # Only a process and its children share multiprocessing's key.
    key = hashlib.sha256(multiprocessing.current_process().authkey).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"slipstream-engine-{key}.txt"
