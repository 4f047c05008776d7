"""Trajectories of runs, as the dashboard lists and opens them: a catalog for each run that was asked about."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from slipstream.buffer.archive.manifest import is_archive
from slipstream.buffer.catalog.catalog import SORTABLE, Catalog, CatalogQuery, open_catalog
from slipstream.buffer.catalog.conditions import NAMES, parse_conditions
from slipstream.buffer.catalog.detail import TrajectoryDetail
from slipstream.buffer.catalog.rows import CatalogRow
from slipstream.buffer.trajectory import Record
from slipstream.dashboard.run_reader import RunReader
from slipstream.runtime.run_folder import is_held

PAGE_ROWS = 50
_IN_STORE = "the run has stopped: groups that are still in its store are not shown here, but by `slipstream view`."


class TrajectoryPage(Record):
    """One page of a list."""

    num_rows: int
    """Rows of the whole result."""
    num_stored: int
    """Trajectories of the run."""
    start: int
    rows: list[CatalogRow]
    notes: list[str]
    """One sentence on each source that cannot be read in full."""
    columns: list[str]
    """Columns by which a list may be sorted."""
    conditions: list[str]
    """Names with which a condition may begin."""


class _Opened(NamedTuple):
    catalog: Catalog
    was_live: bool
    stack: ExitStack


class Trajectories:
    """Opens catalogs and keeps them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}

    def page(
        self,
        reader: RunReader,
        *,
        conditions: str,
        sort_by: str,
        is_descending: bool,
        start: int,
        is_cancelled: Callable[[], bool],
    ) -> TrajectoryPage:
        """Return a page of those that meet the conditions. Raises ConfigError, ReplayBufferError."""
        query = CatalogQuery(parse_conditions(conditions), sort_by=sort_by, is_descending=is_descending)
        catalog = self._catalog(reader)
        catalog.refresh()
        page = catalog.page(query, start=start, size=PAGE_ROWS, is_cancelled=is_cancelled)
        return TrajectoryPage(
            page.num_rows,
            num_stored=catalog.rows.num_rows,
            start=start,
            rows=page.rows,
            notes=catalog.notes + ([] if is_held(reader.folder) or reader.summary else [_IN_STORE]),
            columns=list(SORTABLE),
            conditions=list(NAMES),
        )

    def group(self, reader: RunReader, group_id: str) -> list[TrajectoryDetail]:
        """Return the members of a group; none if there is no such group. Raises ConfigError, ReplayBufferError."""
        return self._catalog(reader).group(group_id)

    def _catalog(self, reader: RunReader) -> Catalog:
        is_live = is_held(reader.folder)
        with self._lock:
            known = self._opened.get(reader.id)
            # A run that ended has lost its store, one that was resumed has it again.
            if known and known.was_live == is_live:
                return known.catalog
            stack, archive = ExitStack(), reader.folder / "archive"
            # No server is started: of a run that is over, the archive has all that was trained on.
            where = reader.folder if is_live or not is_archive(archive) else archive
            catalog = stack.enter_context(open_catalog(str(where), starts_server=False))
            if known:
                known.stack.close()
            self._opened[reader.id] = _Opened(catalog, is_live, stack)
            return catalog

    def close(self) -> None:
        for opened in self._opened.values():
            opened.stack.close()
