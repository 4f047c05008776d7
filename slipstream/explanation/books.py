"""Books: the records of a run, from its store where that can be opened, else from its folder alone."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.manifest import is_archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ReplayBufferError, StaleFenceError
from slipstream.buffer.records import EVENTS_KEPT, StepEntry, VersionEntry
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.run import RunConfig, read_config
from slipstream.explanation.answer import number_in
from slipstream.runtime.run_folder import read_metrics

_CONNECT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0
"""Limit for a run's own server, which loads its data if it is started to be read."""


class Books:
    """Records of a run. Reads of the store raise ReplayBufferError, of the archive ArchiveError."""

    def __init__(
        self,
        run: RunConfig,
        folder: Path,
        *,
        store: Store | None = None,
        archive: Archive | None = None,
        note: str = "",
    ) -> None:
        """`note`: why there is no store."""
        self.run = run
        self.note = note
        self._folder = folder
        self._store = store
        self._archive = archive
        self.damage = archive.note if archive else ""
        """Sentence on a part of the archive that is missing, by damage or after a crash; empty if it is whole."""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics, in order. Raises ConfigError when there is none."""
        return read_metrics(self._folder / "metrics.jsonl")

    def entries(self, *, first_step: int = 1) -> list[StepEntry]:
        """Return the step ledger, in order; without a store, of the steps that are archived."""
        if self._store:
            return self._store.ledger(first_step=first_step)
        steps = self._archive.steps() if self._archive else []
        return [entry for entry in steps if entry.step >= first_step]

    def versions(self) -> list[VersionEntry]:
        """Return every published set of weights, in order; none without a store."""
        return self._store.versions() if self._store else []

    def members(self, entry: StepEntry) -> dict[str, Trajectory]:
        """Return the trajectories of a step that are still stored, by id."""
        names = {name for group in entry.trajectory_ids for name in group}
        stored = [each for group_id in entry.group_ids for each in self._in_store(group_id)]
        found = {each.id: each for each in stored if each.id in names}
        if self._archive and names - found.keys():
            selected = TrajectoryFilter(min_step=entry.step, max_step=entry.step)
            archived = (stored.trajectory for stored in self._archive.read(selected))
            found |= {each.id: each for each in archived if each.id in names}
        return found

    def _in_store(self, group_id: str) -> list[Trajectory]:
        # Payloads leave the store when a checkpoint retires their group; the ledger keeps the ids.
        try:
            (payloads,) = self._store.fetch([group_id]) if self._store else ([],)
        except StaleFenceError:
            return []
        return [unpack(payload) for payload in payloads]

    def events(self) -> dict[int, list[str]]:
        """Return step -> what happened while it was made, since the learner was started last; nothing without a store.

        Rows count seconds from the first step and events have the store's clock: both know when the last step ended.
        """
        stepped_at = self._store.run_state().stepped_at if self._store else None
        if self._store is None or stepped_at is None:
            return {}
        rows = self.rows
        latest = rows[-int((rows[-1].get("times") or {}).get("steps", len(rows))) :]
        own = [row for row in latest if math.isfinite(number_in(row, "time_s"))]
        ends = [stepped_at + row["time_s"] - own[-1]["time_s"] for row in own]
        found: dict[int, list[str]] = {}
        for event in self._store.events(limit=EVENTS_KEPT):
            index = bisect_left(ends, event.at)
            if index < len(own):
                found.setdefault(own[index]["step"], []).append(f"{event.role}: {event.text}")
        return found


@contextmanager
def open_books(folder: Path) -> Iterator[Books]:
    """Open what the run in a folder has recorded; starts the embedded server of a run that is over, and stops it again.

    Raises ConfigError when the run's settings cannot be read, ArchiveError for a damaged manifest.
    """
    run = read_config(folder)
    archive = Archive(folder / "archive") if is_archive(folder / "archive") else None
    store, note = None, ""
    timeout_s = _CONNECT_TIMEOUT_S if isinstance(run.buffer.store, RedisConfig) else _START_TIMEOUT_S
    with ExitStack() as stack:
        try:
            store = stack.enter_context(open_run_store(folder, timeout_s=timeout_s, starts_server=True))
        # A folder of another user's may not be written, which a server would.
        except (ConfigError, ReplayBufferError, OSError) as error:
            note = f"events and versions must be read from the store, which is not there: {error}"
        yield Books(run, folder, store=store, archive=archive, note=note)
