"""Rows of a run's metrics.jsonl as columns, followed while the run appends, and the health that they show."""

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

_PIECE_BYTES = 32 * 2**20
"""Bytes of the file that are read at a time."""
_TAIL_BYTES = 256 * 2**10
"""Bytes at the end of the file from which `read_tail` takes its rows."""
_DIGITS = 6
"""Significant digits of a value in `series`: more than a screen shows."""
_NESTED = ("lag/histogram", "times")
"""Keys whose newest value alone is kept: they hold objects."""

Row = dict[str, Any]


class MetricsTable:
    """One array of numbers per key, with NaN where a row lacks it. Belongs to one thread at a time.

    A file that is replaced, as by a run that resumes from a checkpoint, is read anew: `generation` counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._reset(inode=0)

    def _reset(self, *, inode: int) -> None:
        self._inode = inode
        self._offset = 0
        self._rest = b""
        self._columns: dict[str, array[float]] = {}
        self._length = 0
        self.nested: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def keys(self) -> list[str]:
        """Keys of all numbers, in alphabetical order."""
        return sorted(self._columns)

    def poll(self) -> list[Row]:
        """Read what was appended; return the new rows, those of a replaced file included."""
        try:
            file = self.path.open("rb")
        # Not there yet, or a file system that does not answer at present.
        except OSError:
            return []
        rows: list[Row] = []
        # Reading may fail later, too: what is missing comes with another call.
        with file, suppress(OSError):
            # Of the file that is read: it may be replaced meanwhile.
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self.generation += bool(self._inode)
                self._reset(inode=found.st_ino)
            file.seek(self._offset)
            while piece := file.read(_PIECE_BYTES):
                self._offset += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                rows += [row for line in lines if (row := parse_row(line + b"\n")) is not None and self._append(row)]
        return rows

    def _append(self, row: Row) -> bool:
        for key, value in row.items():
            if isinstance(value, int | float):
                column = self._columns.setdefault(key, array("d"))
                column.extend([math.nan] * (self._length - len(column)))
                column.append(value)
            elif key in _NESTED:
                self.nested[key] = value
        self._length += 1
        return True

    def series(self, keys: list[str]) -> dict[str, list[float | None]]:
        """Return the columns of those keys that there are, all of one length; null where a row lacks the value."""
        return {key: [_rounded(value) for value in self._padded(key)] for key in keys if key in self._columns}

    def row(self, index: int) -> Row:
        found = {key: column[index] for key, column in self._columns.items() if index < len(column)}
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def newest(self, key: str) -> float | None:
        """Return the newest value of a key that not every row has."""
        return next((value for value in reversed(self._columns.get(key, ())) if not math.isnan(value)), None)

    def _padded(self, key: str) -> "array[float]":
        column = self._columns[key]
        return column + array("d", [math.nan] * (self._length - len(column)))


def read_tail(path: Path) -> list[Row]:
    """Return the last rows of a file, from its end alone; none without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    return [row for line in lines if (row := parse_row(line)) is not None]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


class HealthWarning(Record):
    """A metric outside of its range.

    Example: HealthWarning("learner/ess", value=0.21, since_step=40, healthy=">= 0.3", advice="the answers come ...")
    """

    metric: str
    value: float
    """Newest value."""
    since_step: int
    """Step in which it was found to be outside; it may have left its range some steps before."""
    healthy: str
    advice: str
    """Meaning for learning and remedy."""


class Health:
    """Follows the rows of a run, in order."""

    def __init__(self, run: RunConfig | None = None) -> None:
        """`run`: the one whose figures the advice quotes."""
        self._run = run
        self._watched = {key: Watched(healthy) for key, healthy in RANGES.items()}
        self._since: dict[str, int] = {}
        self._newest: dict[str, float] = {}

    def add(self, row: dict[str, Any]) -> None:
        # A file may hold anything.
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        for key, watched in changed(self._watched, numbers):
            if watched.is_unhealthy:
                self._since[key] = row["step"]
            else:
                self._since.pop(key, None)
        self._newest |= numbers

    @property
    def warnings(self) -> list[HealthWarning]:
        """Metrics outside of their range now, the newest first."""
        figures = figures_of(self._newest, self._run) if self._run else None
        newest_first = sorted(self._since.items(), key=lambda item: -item[1])
        return [
            HealthWarning(
                key, self._newest[key], step, str(RANGES[key]), explain_value(self._newest[key], RANGES[key], figures)
            )
            for key, step in newest_first
        ]
