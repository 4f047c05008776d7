"""vllm_load: how full vLLM's engine is, from the statistics that it sends along with every step's tokens."""

import time
from typing import Any

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.errors import EngineDiedError
from slipstream.runtime.clock import Clock


# @@ StallWatch: notices an engine that has requests and makes no step; it would answer pings for ever.
class StallWatch:
    """Life: look, now and then. Counts only time in which the engine should have stepped."""

    def __init__(self, *, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = -1
        self._moved_at = clock()

    def look(self, load: EngineLoad, *, is_paused: bool) -> None:
        """`is_paused`: it is not meant to step now. Raises EngineDiedError."""
        if is_paused or not load.num_open or load.num_steps != self._num_steps:
            self._num_steps, self._moved_at = load.num_steps, self._clock()
        elif self._clock() - self._moved_at > self._limit_s:
            raise EngineDiedError(
                f"the engine must make a step within generators.engine.stall_timeout_s ({self._limit_s:g} s) while "
                f"requests are open, it did not with {load.num_open} of them: look at the log above, or raise the limit"
            )


class LoadRecorder(PrometheusStatLogger):
    """Keeps the newest numbers. Stands in for vLLM's Prometheus metrics, which would cost more and are read by nobody.

    A class rather than an instance is what AsyncLLM takes, so it is found again among the loggers it made.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Registers no metrics."""
        self._kv_usage = 0.0
        self._num_waiting = 0
        self._num_preempted = 0
        self._num_steps = 0

    @property
    def load(self) -> EngineLoad:
        """As of the newest step."""
        return EngineLoad(self._kv_usage, self._num_waiting, self._num_preempted, num_steps=self._num_steps)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called after every step; either may be None."""
        self._num_steps += 1
        if scheduler_stats is not None:
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            self._num_preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing is ever rejected: there is no limit on what waits."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """It never sleeps."""


def load_of(llm: AsyncLLM) -> EngineLoad:
    """Of an engine started with a LoadRecorder."""
    recorder = next(each for each in llm.logger_manager.stat_loggers if isinstance(each, LoadRecorder))
    newest = recorder.load
    if num_open := llm.output_processor.get_num_unfinished_requests():
        return msgspec.structs.replace(newest, num_open=num_open)
    # Without requests there are no steps, and the numbers stay those of the last one.
    return msgspec.structs.replace(newest, kv_usage=0.0, num_waiting=0)
