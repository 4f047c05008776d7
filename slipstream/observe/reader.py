"""RunReader: all that is known of one run, from its store where that answers, else from its folder."""

import json
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import EVENTS_KEPT, Event
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.metrics_rows import Health, HealthWarning, MetricsTable, Row, read_tail
from slipstream.observe.run_status import RunStatus, StatusReader
from slipstream.runtime.run_folder import is_held

_CONNECT_TIMEOUT_S = 1.0
_IDLE_TIMEOUT_S = 30.0
"""Time after which the server of a run that is over, started to read it, ends by itself."""
_START_TIMEOUT_S = 30.0

_ENDED = ("finished", "failed")
_ACCURACY = "eval/accuracy_"


class RunView(Record):
    """State of a run at one moment."""

    id: str
    phase: str
    """As in RunStatus; without a store running, finished or stopped (no process holds it, and it left no summary)."""
    step: int
    max_steps: int | None
    """None if the run's settings cannot be read."""
    max_lag: int | None
    """buffer.staleness.max_lag; None likewise."""
    is_live: bool
    """Whether a process holds the run."""
    status: RunStatus | None
    """As last read from the store; None if it never answered."""
    status_age_s: float | None
    """Seconds since the status was read; 0 for that of a run that is over."""
    problem: str
    """Reason why the store is not read; empty if it is."""
    summary: dict[str, Any]
    """summary.json; empty before the end."""
    times: dict[str, Any]
    """StepTimes: where the wall time went; empty before the first step."""
    lag_tokens: dict[str, int]
    """Lag -> tokens of the newest step."""
    warnings: list[HealthWarning]
    num_rows: int


class RunLine(Record):
    """A run in a list. Example: RunLine("digits_cpu", phase="finished", mode="async", step=80, max_steps=80, ...)."""

    id: str
    phase: str
    """running | finished | stopped."""
    mode: str
    """Empty if the run's settings cannot be read."""
    step: int
    max_steps: int | None
    changed_at: float | None
    """Time of the newest step, seconds since 1970."""
    started_at: float
    time_s: float | None
    reward: float | None
    accuracies: dict[str, float]
    """Newest held-out accuracy by set."""


class RunReader:
    """Reads one run. Threads may share it; each of `poll` and `view` is done by one at a time."""

    def __init__(self, run_id: str, folder: Path) -> None:
        self.id = run_id
        self.folder = folder
        self.table = MetricsTable(folder / "metrics.jsonl")
        self.events: list[Event] = []
        self._health = Health(self._known_config)
        self._generation = 0
        # Two: a store that does not answer holds up no metrics.
        self._polling, self._viewing = threading.Lock(), threading.Lock()
        self._tail_read = (0, 0)
        self._tail: tuple[float, Row, dict[str, float]] = (0.0, {}, {})
        self._store: RedisStore | None = None
        self._reader: StatusReader | None = None
        self._status: RunStatus | None = None
        self._status_at: float | None = None
        self._is_final = False
        self._problem = ""

    # --- settings ------------------------------------------------------------------------------------------------
    @property
    def config(self) -> RunConfig:
        """Settings of the run, which a resume may change. Raises ConfigError for one of another version."""
        file = self.folder / "config.yaml"
        return _read_config(self.folder, file.stat().st_mtime_ns if file.is_file() else 0)

    @property
    def _known_config(self) -> RunConfig | None:
        with suppress(ConfigError):
            return self.config
        return None

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty before the end of the run."""
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "summary.json").read_bytes())
        return {}

    # --- metrics -------------------------------------------------------------------------------------------------
    def poll(self) -> list[Row]:
        """Read the metrics that were added; return the new rows."""
        # A client that leaves cancels its task, not the thread that reads for it.
        with self._polling:
            rows = self.table.poll()
            if self.table.generation != self._generation:
                self._generation, self._health = self.table.generation, Health(self._known_config)
            for row in rows:
                self._health.add(row)
            return rows

    # --- the store -----------------------------------------------------------------------------------------------
    def open_store(self, *, starts_server: bool = False) -> RedisStore:
        """Open the store of a live run, or start that of a run that is over. Raises ConfigError, ReplayBufferError."""
        is_started = starts_server and isinstance(self.config.buffer.store, EmbeddedRedisConfig)
        return open_run_store(
            self.folder,
            timeout_s=_START_TIMEOUT_S if is_started else _CONNECT_TIMEOUT_S,
            answer_timeout_s=COMMAND_TIMEOUT_S,
            starts_server=is_started,
            # A run that is resumed meanwhile takes it over.
            idle_timeout_s=_IDLE_TIMEOUT_S,
        )

    def view(self) -> RunView:
        """Read the state; blocks for seconds at most while a store does not answer."""
        with self._viewing:
            return self._view()

    def _view(self) -> RunView:
        is_live = is_held(self.folder)
        # A run that was over may have been resumed.
        self._is_final = self._is_final and not is_live
        if not self._is_final:
            self._read_store(is_live=is_live)
        summary, status, run = self.summary, self._status, self._known_config
        step = int(self.table.newest("step") or 0)
        return RunView(
            id=self.id,
            phase=self._phase(is_live=is_live),
            step=max(step, status.step) if status and not self._problem else step,
            max_steps=run.learner.max_steps if run else None,
            max_lag=run.buffer.staleness.max_lag if run else None,
            is_live=is_live,
            status=status,
            status_age_s=self._status_age_s(),
            problem=self._problem,
            summary=summary,
            times=summary.get("times") or self.table.nested.get("times") or {},
            lag_tokens=self.table.nested.get("lag/histogram") or {},
            warnings=self._health.warnings,
            num_rows=len(self.table),
        )

    def _phase(self, *, is_live: bool) -> str:
        if self._status and not self._problem and (is_live or not self._is_final or self._status.phase in _ENDED):
            return self._status.phase
        if is_live:
            return "running"
        return "finished" if self.summary else "stopped"

    def _status_age_s(self) -> float | None:
        if self._status_at is None:
            return None
        return 0.0 if self._is_final else time.monotonic() - self._status_at

    def _read_store(self, *, is_live: bool) -> None:
        try:
            if self._reader is None or self._store is None:
                self._store = self.open_store(starts_server=not is_live)
                self._reader = StatusReader(self._store, self.config)
            self._status, self._status_at, self._problem = self._reader.read(), time.monotonic(), ""
            self.events = self._store.events(limit=EVENTS_KEPT)
            self._is_final = not is_live and not any(role.is_alive for role in self._status.roles)
        except (ReplayBufferError, ConfigError) as error:
            self._problem = str(error)
            self._is_final = not is_live
        if self._is_final or self._problem:
            # A server that nobody else uses must be able to end.
            self.close()

    def close(self) -> None:
        if self._store:
            self._store.close()
        self._store = self._reader = None

    # --- a line of a list ----------------------------------------------------------------------------------------
    def line(self) -> RunLine:
        """Summarise the run from its folder alone."""
        changed_at, last, accuracies = self._newest_rows()
        is_live, run = is_held(self.folder), self._known_config
        return RunLine(
            id=self.id,
            phase="running" if is_live else "finished" if self.summary else "stopped",
            mode=run.mode if run else "",
            step=int(last.get("step", 0)),
            max_steps=run.learner.max_steps if run else None,
            changed_at=changed_at if last else None,
            started_at=(self.folder / "config.yaml").stat().st_mtime,
            time_s=last.get("time_s"),
            reward=last.get("learner/reward_mean"),
            accuracies=accuracies,
        )

    def _newest_rows(self) -> tuple[float, Row, dict[str, float]]:
        """Return when a row was written last, that row, and the newest accuracies."""
        with suppress(OSError):
            found = self.table.path.stat()
            # Every open page asks for all runs every few seconds: a file that is as before is not read again.
            if (found.st_mtime_ns, found.st_size) != self._tail_read:
                self._tail_read = found.st_mtime_ns, found.st_size
                rows = read_tail(self.table.path)
                evaluated = {key: value for row in rows for key, value in row.items() if key.startswith(_ACCURACY)}
                newest = {key.removeprefix(_ACCURACY): value for key, value in evaluated.items()}
                self._tail = found.st_mtime, rows[-1] if rows else {}, newest
        return self._tail


@lru_cache(maxsize=1024)
def _read_config(folder: Path, written_at: int) -> RunConfig:
    return read_config(folder)
