"""Sources of the rows of a run: its store or, for a run of one process, the file that it writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.buffer.archive.trajectory_filter import Decode
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store, store_url
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import Record
from slipstream.configs.run import RunConfig
from slipstream.observe.catalog.token_decoder import find_decoder
from slipstream.observe.loggers.logger import Cell
from slipstream.runtime.model_files import find_file
from slipstream.runtime.run_folder import parse_row

SAMPLE_COLUMNS = ("step", "trajectory", "data_source", "prompt", "answer", "reward", "ended by", "lag")
_MAX_TEXT = 4000
"""Characters of one cell."""


class News(Record):
    """Rows since the last read. Example: News(rows=[{"step": 12}], cursor=12, num_lost=0)."""

    rows: list[dict[str, Any]]
    cursor: int
    """Position behind them, from which the next read goes on."""
    num_lost: int = 0
    """Rows in between that the source does not have any more."""


class FileRows:
    """Rows of a `metrics.jsonl`; a position is one in bytes. It has no answers, and nobody to report to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, cursor: int) -> News:
        if not self._path.is_file():
            return News([], 0)
        # A resume cuts the file to the steps that it continues from.
        start = min(cursor, self._path.stat().st_size)
        with self._path.open("rb") as file:
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        return News([row for line in whole if (row := parse_row(line))], start + sum(map(len, whole)))

    def samples(self, step: int, *, limit: int) -> list[list[Cell]]:
        return []

    def report(self, role: str, gauges: dict[str, Any]) -> None:
        pass


class StoreRows:
    """Rows of a store; a position is a number of rows. All methods raise StoreUnavailableError."""

    def __init__(self, store: Store, *, model: str) -> None:
        """`model` may not exist yet."""
        self._store = store
        self._model = model

    def read(self, cursor: int) -> News:
        """Return the rows behind a position."""
        found = self._store.metrics(after=cursor)
        # A store that was emptied counts from the beginning.
        return News(found.rows, found.last, max(0, found.last - cursor - len(found.rows)))

    def samples(self, step: int, *, limit: int) -> list[list[Cell]]:
        """Return answers of a step as rows of SAMPLE_COLUMNS; none where they are gone."""
        entry = next((each for each in self._store.ledger(first_step=step) if each.step == step), None)
        if entry is None:
            return []
        file = find_file(self._model, "tokenizer.json")
        found, decode = [], find_decoder(file, candidates=[])
        for group_id in entry.group_ids[:limit]:
            try:
                (payloads,) = self._store.fetch([group_id])
            except StaleFenceError:  # a checkpoint has retired it
                continue
            found.append(_sample(unpack(payloads[0]), decode, step=step, version=entry.version))
        return found

    def report(self, role: str, gauges: dict[str, Any]) -> None:
        self._store.report_role(role, gauges)


RowSource = FileRows | StoreRows


def _sample(trajectory: Trajectory, decode: Decode | None, *, step: int, version: int) -> list[Cell]:
    ids, first = trajectory.token_ids, int(trajectory.model_mask.argmax())
    texts = [decode(part) if decode else str(part.tolist()) for part in (ids[:first], ids[first:])]
    prompt, answer = (text[:_MAX_TEXT] for text in texts)
    lag = version - min(span.version for span in trajectory.version_spans)
    origin: list[Cell] = [step, trajectory.id, trajectory.data_source]
    return [*origin, prompt, answer, trajectory.reward.total, trajectory.stop_reason, lag]


@contextmanager
def open_rows(run: RunConfig, folder: Path, *, timeout_s: float) -> Iterator[RowSource]:
    """Open the source of a run, whose store must answer within `timeout_s`. Raises StoreUnavailableError."""
    if run.mode != "async":
        yield FileRows(folder / "metrics.jsonl")
        return
    url = store_url(run, folder)
    with open_run_store(url, run.name, timeout_s=timeout_s, answer_timeout_s=COMMAND_TIMEOUT_S) as store:
        yield StoreRows(store, model=run.model.path)
