"""MetricsLog: metrics per step, per-token statistics (StepTokensWriter), and the run's summary."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

import msgspec
import pyarrow as pa
import structlog

from slipstream.buffer.archive.step_tokens import StepTokens, drop_steps, keep_newest, write_step
from slipstream.buffer.records import Claim, EvaluationResult
from slipstream.buffer.role_reports import Counter, Roles, make_step_times, time_counters
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.run import RunConfig
from slipstream.learner.publishing.publisher import Published
from slipstream.runtime.clock import Clock, Growth, Rate
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.healthy_ranges import MetricAlerts
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.trace import ProcessorTime, TimeAccount

Row = dict[str, Any]
"""Metrics of one step, keyed `role/thing/stat`. See docs/metrics.md."""

log = structlog.get_logger(__name__)


_TOKEN_STATS_GIB = 1.0
"""Disk space for log-ratio and entropy of trained tokens: the newest 250 million at 4 bytes."""
_MAX_WAITING = 4
"""Steps that may wait for the thread of StepTokensWriter."""
_SWEEPS = 64
"""Deletions of old files per `max_gib` of new ones."""
_CLOSE_S = 60.0
_RATE_STEPS = 10
"""Steps over which the rate of generation is averaged."""


class StepTokensWriter:
    """Writes one file per step and deletes the oldest. Skips a step if too many wait or the disk fails."""

    def __init__(self, folder: Path, *, max_gib: float, in_background: bool) -> None:
        self._folder = folder
        self._max_bytes = max_gib * 2**30
        self._unswept_bytes = self._max_bytes
        self._in_background = in_background
        self._waiting: Queue[tuple[int, StepTokens] | None] = Queue(_MAX_WAITING)
        self._thread: Thread | None = None

    def add(self, step: int, tokens: StepTokens) -> None:
        if not self._in_background:
            self._write(step, tokens)
            return
        if self._thread is None:
            # A daemon: unwritten steps are lost when the learner stops.
            self._thread = Thread(target=self._run, name="token-stats", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((step, tokens))
        except Full:
            log.warning("token_stats_not_written", step=step, reason=f"{_MAX_WAITING} steps wait for the disk")

    def close(self) -> None:
        if self._thread:
            with suppress(Full):
                self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            self._write(*waiting)

    def _write(self, step: int, tokens: StepTokens) -> None:
        try:
            self._unswept_bytes += write_step(self._folder, step, tokens)
            # Listing 100,000 files takes longer than a step.
            if self._unswept_bytes > self._max_bytes / _SWEEPS:
                keep_newest(self._folder, max_bytes=self._max_bytes)
                self._unswept_bytes = 0.0
        except (OSError, pa.ArrowException) as error:
            log.warning("token_stats_not_written", step=step, reason=str(error))


class MetricsLog:
    """Writes `metrics.jsonl`, the store's metrics, `token_stats/`, and `summary.json`.

    Life: record_before? -> start_training -> add_step* -> end_training -> write_summary.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        folder: RunFolder,
        store: Store,
        disk: DiskWait | None = None,
        account: TimeAccount | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.folder = folder
        self.disk = disk or DiskWait()
        self._run = run
        self._store = store
        self._clock = clock
        self._alerts = MetricAlerts(lambda text: store.record_event("learner", text), run=run)
        in_background = not run.is_one_process
        self._step_tokens = StepTokensWriter(folder.token_stats, max_gib=_TOKEN_STATS_GIB, in_background=in_background)
        self._tokens = Rate(window_s=10.0, clock=clock)
        self._generated = Growth({})
        self._generated_by: deque[tuple[float, float]] = deque(maxlen=_RATE_STEPS + 1)
        self.account = account or TimeAccount("rest")
        self._processor = ProcessorTime()
        self._times = Growth({})
        self._own_rows = 0
        self._started_at = self._row_at = self._ended_at = clock()
        self._resumed_at_s = 0.0
        self._before: dict[Purpose, EvaluationResult] = {}

    def gauges(self) -> Row:
        rates = {"tokens_per_s": round(self._tokens.per_s, 1), "tokens": self._tokens.total}
        return rates | self.account.gauges() | {"cpu_s": round(self._processor.seconds, 3)}

    def record_before(self, evaluated: dict[Purpose, EvaluationResult]) -> None:
        self._before = evaluated
        self.folder.record_stage("learner", "evaluated")
        log.info("before_training", **{purpose: round(result.accuracy, 3) for purpose, result in evaluated.items()})

    def start_training(self, *, step: int, ends: Callable[[Row], bool] = lambda _: False) -> bool:
        """Start the run's clock, on a resume from the rows that the checkpoint covers.

        Returns whether any of them `ends` the run.
        """
        # Later rows belong to steps that were rolled back.
        has_ended, self._resumed_at_s = False, 0.0
        for row in self._rows(up_to_step=step):
            has_ended = has_ended or ends(row)
            self._resumed_at_s = row["time_s"]
        drop_steps(self.folder.token_stats, after=step)
        self._row_at = self._clock()
        self._started_at = self._row_at - self._resumed_at_s
        self._tokens = Rate(window_s=10.0, clock=self._clock)
        roles = self._store.roles()
        self._generated = Growth(_generated_tokens(roles))
        self._generated_by.clear()
        self._generated_by.append((self._row_at, 0.0))
        self.account.restart()
        self._times = Growth(self._time_counters(roles))
        self.folder.record_stage("learner", "training")
        return has_ended

    def end_training(self) -> None:
        self._ended_at = self._clock()
        self.folder.record_stage("learner", "trained")
        self._update_counters()

    def add_step(
        self,
        *,
        step: int,
        version: int,
        metrics: Row,
        published: Published | None,
        evaluated: Row | None,
        times: dict[str, float],
        tokens: StepTokens | None = None,
    ) -> Row:
        """Write a row to the file and the store. `evaluated`: metrics of an evaluation."""
        if tokens:
            self._step_tokens.add(step, tokens)
        self._tokens.add(metrics["learner/tokens"])
        began_at, self._row_at = self._row_at, self._clock()
        time_s = round(self._row_at - self._started_at, 3)
        row: Row = {"step": step, "version": version, "time_s": time_s, **metrics, **times}
        row["learner/tokens_per_s"] = metrics["learner/tokens"] / max(1e-9, self._row_at - began_at)
        self._update_counters()
        self._generated_by.append((self._row_at, self._generated.total))
        (since, before), (now, total) = self._generated_by[0], self._generated_by[-1]
        rate = (total - before) / max(1e-9, now - since)
        # Before the first report of a generator, the rate is unknown, not 0.
        row |= {"generators/tokens_per_s": rate} if self._generated.total else {}
        if published:
            names = ("receive_s", "prepare_s", "pause_s", "probe_s", "probe_diff_mean", "probe_diff_max")
            row |= {"weights/sync_s": published.seconds, "weights/members": published.num_members}
            row |= {f"weights/{name}": getattr(published, name) for name in names}
        row |= evaluated or {}
        self._own_rows += 1
        row |= {"times": self._step_times()}
        self.disk.retry(lambda: self.folder.append_metrics(row), what="the metrics", path=self.folder.metrics)
        self._store.append_metrics(row)
        self._alerts.check(row)
        log.info("step", step=step, reward=round(row["learner/reward_mean"], 3), lag=round(row["lag/mean"], 2))
        return row

    def buffer_metrics(self, claim: Claim, *, target_lag: float) -> Row:
        counts = self._store.counts()
        return (counts.curriculum_metrics if self._run.data.curriculum else {}) | {
            "buffer/lag_in_flight": claim.lag.in_flight,
            "buffer/lag_publish": claim.lag.publish,
            "buffer/lag_queue": claim.lag.queue,
            "buffer/target_lag": target_lag,
            "buffer/reused_fraction": sum(claim.reused) / len(claim.group_ids),
            "buffer/length_bias": counts.length_bias,
            "buffer/waste_fraction": counts.waste_fraction,
            "buffer/filtered_fraction": counts.filtered_fraction,
        }

    def write_summary(
        self, *, step: int, after: dict[Purpose, EvaluationResult], evaluation: Row, best: Row | None = None
    ) -> None:
        """See docs/metrics.md. `evaluation`: metrics of the last evaluation."""
        self._step_tokens.close()
        # Rates exclude time before a resume, like the counted tokens.
        seconds = max(1e-9, self._ended_at - self._started_at)
        own_seconds = max(1e-9, seconds - self._resumed_at_s)
        sets, before = self._run.data.eval_sets, self._before
        goals, num_tokens, sum_lags = self._run.evaluation.goals[:1], 0, 0
        over_rows: Row = {"seconds_to_goal": None, "lag_max": 0, "logprob_diff_max": 0.0}
        for row in self._rows(up_to_step=step):
            if over_rows["seconds_to_goal"] is None and any(goal.holds(row) for goal in goals):
                over_rows["seconds_to_goal"] = row["time_s"]
            over_rows["lag_max"] = max(over_rows["lag_max"], int(row["lag/max"]))
            diff = row.get("weights/probe_diff_max", 0.0)
            over_rows["logprob_diff_max"] = max(over_rows["logprob_diff_max"], diff)
            for lag, count in row["lag/histogram"].items():
                num_tokens, sum_lags = num_tokens + count, sum_lags + int(lag) * count
        summary = {
            **{f"accuracy_{name}": result.accuracy for name, result in after.items()},
            **{each.before_key: before[each.name].accuracy if before else None for each in sets},
            "evaluation": evaluation,
            "num_final_prompts": {each.name: after[each.name].num_asked // each.samples for each in sets},
            "best": best,
            "train_seconds": round(seconds, 3),
            "steps": step,
            "generated_tokens_per_s": self._generated.total / own_seconds,
            "learner_tokens_per_s": self._tokens.total / own_seconds,
            **over_rows,
            "lag_mean": sum_lags / max(1, num_tokens),
            "seed": self._run.seed,
            "mode": self._run.mode,
            "times": self._step_times(),
        }
        self.disk.retry(lambda: self.folder.write_summary(summary), what="the summary", path=self.folder.summary)

    def _rows(self, *, up_to_step: int) -> Iterator[Row]:
        keep = partial(self.folder.keep_metrics, up_to_step=up_to_step)
        return self.disk.retry(keep, what="the metrics", path=self.folder.metrics)

    def _update_counters(self) -> None:
        gauges = self._store.roles()
        self._generated.update(_generated_tokens(gauges))
        self._times.update(self._time_counters(gauges))

    def _time_counters(self, roles: Roles) -> dict[Counter, float]:
        return time_counters(roles | {"learner": self.gauges() | {"role": "learner"}})

    def _step_times(self) -> Row:
        times: Row = msgspec.to_builtins(make_step_times(self._times.each, steps=self._own_rows))
        return times


def _generated_tokens(roles: Roles) -> dict[str, float]:
    """Numbers only: gauges are not validated."""
    reported = {name: gauges.get("tokens") for name, gauges in roles.items() if gauges.get("role") == "generator"}
    return {name: count for name, count in reported.items() if isinstance(count, int | float)}
