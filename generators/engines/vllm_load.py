"""vllm_load: how full vLLM's engine is, from the statistics that it sends along with every step's tokens."""

from typing import Any

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from generators.engines.engine import EngineLoad


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
