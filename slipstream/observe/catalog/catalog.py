"""Catalog: the trajectories of a source as one table to search, filter, sort, and page."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.buffer.archive.step_tokens import FOLDER, read_steps
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from slipstream.buffer.errors import ArchiveError, ReplayBufferError
from slipstream.configs.base import ConfigError, Record
from slipstream.observe.catalog.rows import (
    ROWS,
    CatalogRow,
    TrajectoryDetail,
    describe,
    has_value_within,
    read_stored,
    to_records,
)
from slipstream.observe.catalog.sources import Block, Source, decoder_of, open_source, without
from slipstream.observe.catalog.token_decoder import TokenDecoder, find_text

SORTABLE = tuple(field.name for field in ROWS if not pa.types.is_list(field.type))
_QUERIES_KEPT = 8
_EXCERPTS_KEPT = 4096
_SEARCH_THREADS = min(4, os.cpu_count() or 1)
"""Each holds about a million tokens in memory."""


class CatalogQuery(Record):
    """Selection and order of rows: CatalogQuery(TrajectoryFilter(min_step=10), sort_by="reward_total")."""

    where: TrajectoryFilter = TrajectoryFilter()
    sort_by: str = ""
    """One of SORTABLE, unknown values last, ties in archive order; empty: archive order, then the store."""
    is_descending: bool = False


class Page(Record):
    """Consecutive rows of a result."""

    num_rows: int
    """In the whole result."""
    start: int
    rows: list[CatalogRow]


class _Snapshot:
    """All blocks at one moment. Immutable, so threads and caches may share it."""

    def __init__(self, blocks: list[Block], step_versions: dict[int, int]) -> None:
        self.blocks = blocks
        self.rows = pa.concat_tables([ROWS.empty_table(), *(block.rows for block in blocks)])
        self.step_versions = step_versions


class Catalog:
    """The trajectories of a source. Threads may share it.

    Example: with open_catalog("runs/mine") as catalog: catalog.page(CatalogQuery(sort_by="reward_total"), size=20)
    """

    def __init__(self, source: Source, *, decoder: TokenDecoder | None = None) -> None:
        """Raises ConfigError and the errors of `refresh`."""
        self._source = source
        self._seen: list[Block] = []
        self._unread = ""
        self.decoder = decoder
        """Required to search text; None if not found."""
        self._refreshing = threading.Lock()
        self._snapshot = _Snapshot([], {})
        self._select = lru_cache(_QUERIES_KEPT)(_select)
        self._excerpts: dict[str, dict[str, str]] = {}
        self._found: tuple[str, dict[int, tuple[Block, np.ndarray]]] = "", {}
        self.refresh()

    @property
    def notes(self) -> list[str]:
        """One sentence per source that is not read in full."""
        return list(dict.fromkeys([*([self._unread] if self._unread else []), *self._source.notes]))

    @property
    def rows(self) -> pa.Table:
        return self._snapshot.rows

    def refresh(self) -> bool:
        """Read new trajectories; return whether any came. Raises ArchiveError."""
        with self._refreshing:
            step_versions = self._snapshot.step_versions
            try:
                step_versions, self._unread = self._source.step_versions(), ""
            except ReplayBufferError as error:
                # If the store does not answer, its own note says so.
                self._unread = str(error) if isinstance(error, ArchiveError) else ""
            # Read the store first: a group that moves to the archive in between is found twice, not lost.
            parts = self._source.parts
            read = [part.blocks(step_versions) for part in reversed(parts)]
            seen = [block for blocks in reversed(read) for block in blocks]
            if list(map(id, seen)) == list(map(id, self._seen)):
                return False
            self._seen = seen
            blocks = seen if len(parts) == 1 else [*seen[:-1], without(seen[-1], seen[:-1])]
            self._snapshot = _Snapshot(list(blocks), step_versions)
            self._select.cache_clear()
            return True

    def page(
        self, query: CatalogQuery, *, start: int = 0, size: int = 50, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Page:
        """Return up to `size` rows from index `start`. Searching gigabytes takes minutes.

        Raises the errors of `select`, and SearchCancelledError.
        """
        snapshot = self._snapshot
        indices = self._indices(snapshot, query, is_cancelled)
        shown = indices[start : start + size]
        chosen = [snapshot.rows.slice(index, 1) for index in shown.tolist()]
        rows = to_records(pa.concat_tables([ROWS.empty_table(), *chosen]))
        texts = self._read_excerpts(snapshot, shown, rows) if self.decoder else {}
        rows = [msgspec.structs.replace(row, **texts.get(row.id, {})) for row in rows]
        return Page(len(indices), start, rows)

    def select(self, query: CatalogQuery) -> pa.Table:
        """Return the rows of the result.

        Raises ConfigError for an unknown column or a text condition without a tokenizer, ArchiveError.
        """
        snapshot = self._snapshot
        return snapshot.rows.take(pa.array(self._indices(snapshot, query)))

    def group(self, group_id: str) -> list[TrajectoryDetail]:
        """Return a group's members in index order; empty for an unknown group. Raises ArchiveError."""
        found = self._details(pc.field("group_id") == group_id)
        return sorted(found, key=lambda detail: detail.row.index)

    def trajectory(self, trajectory_id: str) -> TrajectoryDetail | None:
        """Return a trajectory, or None for an unknown id. Raises ArchiveError."""
        return next(iter(self._details(pc.field("id") == trajectory_id)), None)

    def stored(self, query: CatalogQuery) -> Iterator[StoredTrajectory]:
        """Yield the trajectories of the result. Raises the errors of `select`."""
        snapshot = self._snapshot
        yield from self._read(snapshot, self._indices(snapshot, query))

    def _read(self, snapshot: _Snapshot, indices: np.ndarray) -> Iterator[StoredTrajectory]:
        indices, start = np.sort(indices), 0
        for block in snapshot.blocks:
            own = indices[(indices >= start) & (indices < start + block.rows.num_rows)] - start
            start += block.rows.num_rows
            with _refusing():
                if len(own):
                    yield from read_stored(block.dataset, block.rows["id"].take(pa.array(own)).to_pylist())

    def _read_excerpts(
        self, snapshot: _Snapshot, indices: np.ndarray, rows: list[CatalogRow]
    ) -> dict[str, dict[str, str]]:
        """Return id -> the `prompt` and `answer` of a CatalogRow, if known or readable."""
        assert self.decoder is not None
        known = self._excerpts
        is_missing = np.array([row.id not in known for row in rows], dtype=bool)
        with suppress(ArchiveError):
            read = self._read(snapshot, indices[is_missing])
            excerpts = {each.trajectory.id: self.decoder.excerpts(each.trajectory) for each in read}
            found = {name: {"prompt": prompt, "answer": answer} for name, (prompt, answer) in excerpts.items()}
            # Another thread may read `known`.
            known = known | found
            self._excerpts = known if len(known) < _EXCERPTS_KEPT else found
        return known

    def _details(self, where: pc.Expression) -> list[TrajectoryDetail]:
        snapshot, details = self._snapshot, []
        describe_row = partial(describe, decoder=self.decoder, step_versions=snapshot.step_versions)
        for block in snapshot.blocks:
            rows = {row.id: row for row in to_records(block.rows.filter(where))}
            if not rows:
                continue
            folder, last_steps = self._source.run_folder, {row.id: row.last_step for row in rows.values()}
            recorded = read_steps(folder / FOLDER, last_steps) if folder else {}
            with _refusing():
                for each in read_stored(block.dataset, list(rows)):
                    name = each.trajectory.id
                    details.append(describe_row(rows[name], each, recorded=recorded.get(name, {})))
        return details

    def _indices(
        self, snapshot: _Snapshot, query: CatalogQuery, is_cancelled: Callable[[], bool] = lambda: False
    ) -> np.ndarray:
        if query.sort_by not in ("", *SORTABLE):
            raise ConfigError(f"sort_by must be one of {', '.join(SORTABLE)}, got {query.sort_by!r}.")
        text = query.where.text
        if text is None:
            return self._select(snapshot, query)
        if self.decoder is None:
            raise ConfigError("a condition on text needs a tokenizer to decode with, and none was found: name one.")
        # Separate from the fast conditions, so that another order does not search again.
        has_text = self._find_text(snapshot, text, self.decoder, is_cancelled)
        where = msgspec.structs.replace(query.where, text=None)
        chosen = self._select(snapshot, msgspec.structs.replace(query, where=where))
        return chosen[has_text[chosen]]

    def _find_text(
        self, snapshot: _Snapshot, text: str, decoder: TokenDecoder, is_cancelled: Callable[[], bool]
    ) -> np.ndarray:
        last, known = self._found
        # Cache the last matches per block, for other pages and orders.
        found = {id(block): known[id(block)] for block in snapshot.blocks if last == text and id(block) in known}
        if missing := [block for block in snapshot.blocks if id(block) not in found]:
            # Cache the array before the threads share it. Arrow releases the GIL.
            assert decoder.piece_array is not None
            search = partial(find_text, text=text, decoder=decoder, is_cancelled=is_cancelled)
            with _refusing(), ThreadPoolExecutor(_SEARCH_THREADS) as pool:
                masks = pool.map(search, [block.dataset for block in missing])
                found |= {id(block): (block, mask) for block, mask in zip(missing, masks, strict=True)}
            self._found = text, found
        return np.concatenate([np.empty(0, dtype=bool), *(found[id(block)][1] for block in snapshot.blocks)])


@contextmanager
def _refusing() -> Iterator[None]:
    """Map errors of files that have become unreadable."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ArchiveError(f"the files must stay where they were opened, but cannot be read: {reason}.") from None


def _select(snapshot: _Snapshot, query: CatalogQuery) -> np.ndarray:
    """Indices of rows that meet all conditions except on text, in order, int64[n]."""
    rows, where = snapshot.rows, query.where
    mask = np.ones(rows.num_rows, dtype=bool)
    for column, bounds in (("steps", where.steps), ("versions", where.versions)):
        if bounds is not None:
            mask &= has_value_within(rows[column], *bounds)
    if (expression := where.expression()) is not None:
        numbers = np.arange(rows.num_rows)
        met = rows.append_column("row", pa.array(numbers)).filter(expression)["row"]
        mask &= np.isin(numbers, met.to_numpy(), assume_unique=True)
    indices = np.flatnonzero(mask)
    if not query.sort_by:
        return indices[::-1] if query.is_descending else indices
    column = rows[query.sort_by] if len(indices) == rows.num_rows else rows[query.sort_by].take(pa.array(indices))
    direction = "descending" if query.is_descending else "ascending"
    order = pc.sort_indices(pa.table({"key": column}), sort_keys=[("key", direction)])
    return indices[order.to_numpy()]


@contextmanager
def open_catalog(
    where: str,
    *,
    run_name: str | None = None,
    runs_dir: Path = Path("runs"),
    tokenizer: Path | None = None,
    starts_server: bool = True,
) -> Iterator[Catalog]:
    """Open a catalog; `where` is as for `open_source`. Raises ConfigError, ReplayBufferError."""
    with open_source(where, run_name=run_name, runs_dir=runs_dir, starts_server=starts_server) as source:
        yield Catalog(source, decoder=decoder_of(source, tokenizer))
