"""StepTokens: per-token numbers computed by the learner, one Parquet file per step in the run folder.

token_stats/step-00000012.parquet   a row per trajectory: `id`, and `log_ratio` and `entropy` per token, null where not
                                    trained on; 4 bytes per trained token
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream.buffer.durable_files import write_durably

FOLDER = "token_stats"
"""Subfolder of the run folder."""
_PREFIX = "step-"

TokenNumbers = dict[str, list[float | None]]
"""Name -> one number per token; None where not trained on or not finite."""


class StepTokens(NamedTuple):
    """Numbers of the N tokens that a step trained on, over all trajectories.

    Example: StepTokens(["17-0-3"], lengths=[12], positions=[np.arange(6, 12)], columns={"entropy": np.array([...])})
    """

    ids: list[str]
    lengths: list[int]
    positions: list[np.ndarray]
    """int64[W] per trajectory: indices of the tokens trained on."""
    columns: dict[str, np.ndarray]
    """Float[N] each: `log_ratio`, log(pi_learner / pi_generator), and `entropy`, nats."""

    def to_table(self) -> pa.Table:
        """Build a table with one row per trajectory. Non-finite numbers become null."""
        ends = np.cumsum([0, *self.lengths])
        indices = np.concatenate([np.empty(0, np.int64), *map(np.add, self.positions, ends)])
        columns: dict[str, pa.Array] = {"id": pa.array(self.ids, pa.string())}
        for name, values in self.columns.items():
            numbers = np.full(ends[-1], np.nan, np.float16)
            with np.errstate(over="ignore"):
                numbers[indices] = values
            entries = pa.array(numbers, mask=~np.isfinite(numbers))
            columns[name] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), entries)
        return pa.table(columns)


def write_step(folder: Path, step: int, tokens: StepTokens) -> int:
    """Write a step's file atomically; return its size in bytes. Raises OSError."""
    folder.mkdir(exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(tokens.to_table(), sink, compression="zstd")
    content = memoryview(sink.getvalue())
    write_durably(_file(folder, step), content)
    return content.nbytes


def keep_newest(folder: Path, *, max_bytes: float) -> None:
    """Delete the files of the oldest steps beyond `max_bytes`. Raises OSError."""
    files = _files(folder)
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        if total <= max_bytes:
            break
        file.unlink()
        total -= size


def drop_steps(folder: Path, *, after: int) -> None:
    """Delete the files of steps undone by a rollback to `after`. Raises OSError."""
    for file in _files(folder):
        if file > _file(folder, after):
            file.unlink()


def read_steps(folder: Path, last_steps: Mapping[str, int | None]) -> dict[str, TokenNumbers]:
    """Trajectory id -> numbers of its last step, named `learner_*`; without those of missing or damaged files."""
    found: dict[str, TokenNumbers] = {}
    for step in {step for step in last_steps.values() if step is not None}:
        ids = [name for name, last_step in last_steps.items() if last_step == step]
        with suppress(OSError, pa.ArrowException):
            table = pq.read_table(_file(folder, step), filters=pc.field("id").isin(ids), partitioning=None)
            for row in table.to_pylist():
                trajectory_id = row.pop("id")
                found[trajectory_id] = {f"learner_{name}": numbers for name, numbers in row.items()}
    return found


def _file(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08}.parquet"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*.parquet"))
