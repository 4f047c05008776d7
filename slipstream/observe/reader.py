"""RunReader: reads a run from its store, and steps and members from its run folder once the store is gone."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError, RunConflictError, StaleFenceError, StoreUnavailableError
from slipstream.buffer.records import EVENTS_KEPT, StepEntry, VersionEntry
from slipstream.buffer.redis.connection import ANSWER_TIMEOUT_S
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.store import NoAnswerError, Store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError, require
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.finding import number_in
from slipstream.observe.metrics_rows import MetricsFile, Row, RunChanges, read_rows
from slipstream.observe.run_status import Monitor, RunStatus
from slipstream.runtime.command_line import NO_ANSWER, exit_with_error
from slipstream.runtime.run_folder import find_run, is_held

_CONNECT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0
"""An embedded server loads its data first."""

UNREADABLE = (ConfigError, ReplayBufferError, OSError)
"""OSError: an embedded server writes to its folder, which may be read-only."""


class RunReader(AbstractContextManager["RunReader"]):
    """Reads one run without changing it. Opens the store on first use."""

    def __init__(
        self,
        folder: Path,
        *,
        store: Store | None = None,
        starts_server: bool = False,
        timeout_s: float = _CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        idle_timeout_s: float | None = None,
    ) -> None:
        """`store`: an open store. `starts_server`: start the embedded server of a run that is over, until the reader is
        closed or, with `idle_timeout_s`, for that time without clients. `timeout_s`: limit for connecting.
        """
        self.folder = folder
        self.problem = ""
        """Reason that the store cannot be read; else empty."""
        self._store = store
        self._starts_server = starts_server
        self._timeout_s = timeout_s
        # A resumed run takes over a server without clients.
        self._options: dict[str, Any] = {"answer_timeout_s": answer_timeout_s, "idle_timeout_s": idle_timeout_s}
        self._monitor: Monitor | None = None
        self._archive: Archive | None = None
        self._file = MetricsFile(folder / "metrics.jsonl")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._store:
            self._store.close()
        self._store = self._monitor = None

    @property
    def config(self) -> RunConfig:
        """Settings, which a resume may change. Raises ConfigError."""
        file = self.folder / "config.yaml"
        return _read_config(self.folder, file.stat().st_mtime_ns if file.is_file() else 0)

    @property
    def summary(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "summary.json").read_bytes())
        return {}

    @property
    def is_live(self) -> bool:
        return is_held(self.folder)

    @property
    def folder_phase(self) -> Literal["running", "finished", "stopped"]:
        """Phase without the store; stopped: neither live nor with a summary."""
        if self.is_live:
            return "running"
        return "finished" if (self.folder / "summary.json").is_file() else "stopped"

    @property
    def archive(self) -> Archive | None:
        """The archive as of first use, or None. Raises ArchiveError for a damaged manifest."""
        if self._archive is None and is_archive(self.folder / "archive"):
            self._archive = Archive(self.folder / "archive")
        return self._archive

    def rows(self) -> list[Row]:
        """All rows of metrics.jsonl. Raises ConfigError if it has none."""
        rows, why = read_rows(self._file.path), "name the folder of a run that has made one"
        require(bool(rows), str(self._file.path), "hold a whole step", got="none", why=why)
        return rows

    @property
    def has_store(self) -> bool:
        """Whether other processes can read the run's store."""
        return self.config.has_roles

    @property
    def store(self) -> Store:
        """The run's store, opened at the first use. Raises ConfigError, ReplayBufferError."""
        if self._store is None:
            self._store = self.open_store(starts_server=self._starts_server)
        return self._store

    def connect(self) -> Self:
        """Open the store if the broker has begun the run. Raises as `store`."""
        if self.has_store:
            with suppress(RunConflictError):
                self._store = self.store
        return self

    def find_store(self) -> Store | None:
        """Open the store once; None and a `problem` if that fails."""
        if self._store is None and not self.problem:
            try:
                return self.store
            except UNREADABLE as error:
                self.problem = str(error)
        return self._store

    def open_store(self, *, starts_server: bool = False) -> RedisStore:
        """Open a connection for the caller to close. Raises ConfigError, ReplayBufferError."""
        is_started = starts_server and not self.is_live and isinstance(self.config.buffer.store, EmbeddedRedisConfig)
        timeout_s = _START_TIMEOUT_S if is_started else self._timeout_s
        return open_run_store(self.folder, timeout_s=timeout_s, starts_server=is_started, **self._options)

    def status(self) -> RunStatus:
        """Read the current status from the store. Raises ConfigError, ReplayBufferError."""
        if self._monitor is None:
            self._monitor = Monitor(self.store, self.config)
        return self._monitor.status()

    def changes(self, *, after: int) -> RunChanges:
        """Rows after a position, from the store or, unless `has_store`, from metrics.jsonl.

        Raises ConfigError, ReplayBufferError.
        """
        if not self.has_store:
            return self._file.read(after)
        found = self.store.metrics(after=after)
        # If the store was emptied, `last` is less than `after`.
        return RunChanges(found.rows, found.last, num_lost=max(0, found.last - after - len(found.rows)))

    def steps(self, *, first: int = 1, last: float = math.inf) -> list[StepEntry]:
        """Ledger of these steps; without a store, the archived part."""
        if store := self.find_store():
            return whole_ledger(store, self.archive, first_step=first, last_step=last)
        return self.archive.steps(first_step=first, last_step=last) if self.archive else []

    def find_step(self, step: int) -> StepEntry | None:
        return next(iter(self.steps(first=step, last=step)), None)

    def versions(self) -> list[VersionEntry]:
        """Return all published versions; none without a store."""
        return store.versions() if (store := self.find_store()) else []

    def members(self, entry: StepEntry) -> dict[str, Trajectory]:
        """A step's stored or archived trajectories, by id."""
        names = set(chain.from_iterable(entry.trajectory_ids))
        stored = chain.from_iterable(map(self.group, entry.group_ids))
        found = {each.id: each for each in stored if each.id in names}
        if self.archive and names - found.keys():
            self.archive.refresh()
            archived = self.archive.read(TrajectoryFilter(min_step=entry.step, max_step=entry.step))
            found |= {each.trajectory.id: each.trajectory for each in archived if each.trajectory.id in names}
        return found

    def group(self, group_id: str) -> list[Trajectory]:
        """A group's members; none once retired."""
        store = self.find_store()
        try:
            (payloads,) = store.fetch([group_id]) if store else ([],)
        except StaleFenceError:
            return []
        return [unpack(payload) for payload in payloads]

    def events_by_step(self, rows: list[Row]) -> dict[int, list[str]]:
        """Step -> events since the learner last started; none without a store.

        The end of the last step, which the store records, aligns the rows' times with those of events.
        """
        store = self.find_store()
        stepped_at = store.run_state().stepped_at if store else None
        if store is None or stepped_at is None:
            return {}
        num_steps = int((rows[-1].get("times") or {}).get("steps", len(rows)))
        timed = [row for row in rows[-num_steps:] if math.isfinite(number_in(row, "time_s"))]
        ends = [stepped_at + row["time_s"] - timed[-1]["time_s"] for row in timed]
        found: dict[int, list[str]] = {}
        for event in store.events(limit=EVENTS_KEPT):
            index = bisect_left(ends, event.at)
            if index < len(timed):
                found.setdefault(timed[index]["step"], []).append(f"{event.role}: {event.text}")
        return found


@lru_cache(maxsize=1024)
def _read_config(folder: Path, written_at: int) -> RunConfig:
    return read_config(folder)


@contextmanager
def read_run(words: Sequence[str], *, command: str) -> Iterator[RunReader]:
    """Open a run, as for `find_run`, without starting its store.

    Raises ConfigError; exits with NO_ANSWER without an answer.
    """
    folder = find_run(words, command=command)
    with RunReader(folder, timeout_s=COMMAND_TIMEOUT_S, answer_timeout_s=COMMAND_TIMEOUT_S) as reader:
        try:
            yield reader
        except StoreUnavailableError as error:
            exit_with_error(_describe_end(reader) or error, code=NO_ANSWER)
        except (NoAnswerError, ReplayBufferError) as error:
            exit_with_error(error, code=NO_ANSWER)


def _describe_end(reader: RunReader) -> str:
    name = reader.folder.name
    if (summary := reader.folder / "summary.json").is_file():
        return f"run {name!r} has ended and its store does not answer: its results are in {summary}."
    if reader.is_live or not isinstance(reader.config.buffer.store, EmbeddedRedisConfig):
        return ""
    return (
        f"no store answered, as run {name!r} is not in progress here: `slipstream run name={name} resume=true` "
        "continues it."
    )
