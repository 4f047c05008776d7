"""Rows of metrics.jsonl: read incrementally, kept as columns, and checked against healthy ranges."""

import math
import os
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.configs.base import Record
from slipstream.configs.run import RunConfig
from slipstream.runtime.healthy_ranges import RANGES, Watched, changed, explain_value, figures_of
from slipstream.runtime.run_folder import parse_row

_TAIL_BYTES = 256 * 2**10
_DIGITS = 6
"""Significant digits of a value in `series`."""
_NESTED = ("lag/histogram", "times")
"""Objects, of which only the newest is kept."""

Row = dict[str, Any]


class RunChanges(Record):
    """Rows added since a position."""

    rows: list[Row]
    position: int
    """Offset at which to resume reading: bytes of metrics.jsonl, or rows of the store."""
    num_lost: int = 0
    """Rows that the store dropped before they were read."""
    is_restarted: bool = False
    """Whether the file was replaced or truncated, as by a resume."""


class MetricsFile:
    """Reads a metrics.jsonl after a byte position. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0

    def read(self, after: int) -> RunChanges:
        """Complete rows after a position without damaged lines; on an I/O error, the rows read so far."""
        rows: list[Row] = []
        position, is_restarted = after, False
        with suppress(OSError), self.path.open("rb") as file:
            # Check the open file, because its path may be replaced.
            found = os.fstat(file.fileno())
            is_restarted = found.st_size < after or self._inode not in (0, found.st_ino)
            self._inode = found.st_ino
            position = min(after, found.st_size)
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                if (row := parse_row(line)) is not None:
                    rows.append(row)
        return RunChanges(rows, position, is_restarted=is_restarted)


def read_rows(path: Path) -> list[Row]:
    """Return all complete rows; none without a file."""
    return MetricsFile(path).read(0).rows


def read_tail(path: Path) -> list[Row]:
    """Return the last rows without reading the rest."""
    with suppress(OSError):
        return MetricsFile(path).read(max(0, path.stat().st_size - _TAIL_BYTES)).rows
    return []


class MetricsTable:
    """One array of numbers per key, with NaN where a row lacks it. Not thread-safe.

    If the file is replaced, the table is rebuilt and `generation` increases.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._file = MetricsFile(path)
        self._reset()

    def _reset(self) -> None:
        self._position = 0
        self._columns: dict[str, array[float]] = {}
        self._length = 0
        self.nested: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def keys(self) -> list[str]:
        return sorted(self._columns)

    def poll(self) -> list[Row]:
        """Read appended rows, or all rows of a replaced file."""
        changes = self._file.read(self._position)
        if changes.is_restarted:
            self.generation += 1
            self._reset()
            changes = self._file.read(0)
        self._position = changes.position
        for row in changes.rows:
            for key, value in row.items():
                if isinstance(value, int | float):
                    column = self._columns.setdefault(key, array("d"))
                    column.extend([math.nan] * (self._length - len(column)))
                    column.append(value)
                elif key in _NESTED:
                    self.nested[key] = value
            self._length += 1
        return changes.rows

    def series(self, keys: list[str]) -> dict[str, list[float | None]]:
        """Columns of known keys, with None for missing values."""
        found: dict[str, list[float | None]] = {}
        for key in keys:
            if (column := self._columns.get(key)) is not None:
                rounded = [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in column]
                found[key] = rounded + [None] * (self._length - len(column))
        return found

    def row(self, index: int) -> Row:
        found = {key: column[index] for key, column in self._columns.items() if index < len(column)}
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def newest(self, key: str) -> float | None:
        return next((value for value in reversed(self._columns.get(key, ())) if not math.isnan(value)), None)


class HealthWarning(Record):
    """A metric outside its healthy range.

    Example: HealthWarning("learner/ess", value=0.21, since_step=40, healthy=">= 0.3", advice="the answers come ...")
    """

    metric: str
    value: float
    since_step: int
    """Step of detection; the violation may have begun earlier."""
    healthy: str
    advice: str
    """Effect and remedy."""


class Health:
    """Checks rows, added in order, against the healthy ranges."""

    def __init__(self, run: RunConfig | None = None) -> None:
        """`run`: settings that the advice quotes."""
        self._run = run
        self._watched = {key: Watched(healthy) for key, healthy in RANGES.items()}
        self._since: dict[str, int] = {}
        self._newest: dict[str, float] = {}

    def add(self, row: dict[str, Any]) -> None:
        # The file is not validated.
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        for key, watched in changed(self._watched, numbers):
            if watched.is_unhealthy:
                self._since[key] = row["step"]
            else:
                self._since.pop(key, None)
        self._newest |= numbers

    @property
    def warnings(self) -> list[HealthWarning]:
        """Metrics outside their range, most recent violation first."""
        figures = figures_of(self._newest, self._run) if self._run else None
        found = []
        for key, step in sorted(self._since.items(), key=lambda item: -item[1]):
            value, healthy = self._newest[key], RANGES[key]
            found.append(HealthWarning(key, value, step, str(healthy), explain_value(value, healthy, figures)))
        return found
