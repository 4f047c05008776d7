"""Dashboard payloads: meanings of metrics and settings, and pages of trajectories."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.archive.trajectory_filter import NAMES
from slipstream.configs.base import ConfigError, Record
from slipstream.configs.load import leaves
from slipstream.configs.schema import settings
from slipstream.observe.catalog.catalog import SORTABLE, Catalog, CatalogQuery, open_catalog
from slipstream.observe.catalog.rows import CatalogRow, TrajectoryDetail
from slipstream.observe.dashboard.viewed_run import ViewedRun
from slipstream.runtime.run_folder import ORIGINS

_PAGE = Path(__file__).with_name("metrics.md")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class Meaning(Record):
    """One metric in metrics.md.

    Example: Meaning("lag/max", section="Rows", meaning="largest lag of a model-written token", unit="versions")
    """

    key: str
    """`<...>` stands for any text, such as a lag."""
    section: str
    meaning: str
    unit: str = ""
    healthy: str = ""


@cache
def read_meanings() -> list[Meaning]:
    """Return the metrics of a row, in page order."""
    found, section, columns = [], "", list[str]()
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section, columns = line.lstrip("# "), []
        elif line.startswith("| key"):
            columns = [name.strip() for name in line.strip("|").split("|")]
        elif line.startswith("| `") and columns and section != "summary.json":
            plain = (_LINK.sub(r"\1", cell).replace("`", "").strip() for cell in line.strip("|").split("|"))
            cells = dict(zip(columns, plain, strict=False))
            unit, _, healthy = cells.get("unit, healthy range", cells.get("unit", "")).partition("; ")
            found.append(Meaning(cells["key"], section, cells["meaning"], unit, cells.get("healthy", healthy)))
    return found


class SettingRow(Record):
    """A setting of a run.

    Example: SettingRow("learner.max_steps", value=80, origin="configs/presets/config.yaml", meaning="Steps of the ...")
    """

    key: str
    value: Any
    origin: str
    """Preset file, `command line a.b=c`, or `default`; empty if not recorded."""
    meaning: str


def read_settings(folder: Path) -> list[SettingRow]:
    """Return all settings, including unknown ones. Raises ConfigError."""
    path = folder / "config.yaml"
    try:
        values = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} must be the settings of a run, got {error}.") from None
    try:
        origins = json.loads((folder / ORIGINS).read_bytes())
    except (OSError, ValueError):
        origins = {}
    return [
        SettingRow(key, value, str(origins.get(key, "")), read_setting_meanings().get(key, ""))
        for key, value in leaves(values)
    ]


@cache
def read_setting_meanings() -> dict[str, str]:
    """Return key -> meaning, from the config records."""
    return {setting.key: setting.meaning for setting in settings()}


PAGE_ROWS = 50
_IN_STORE = "the run has stopped: groups that are still in its store are not shown here, but by `slipstream view`."


class TrajectoryPage(Record):
    """One page of a list."""

    num_rows: int
    num_stored: int
    start: int
    rows: list[CatalogRow]
    notes: list[str]
    """One sentence per unreadable source."""
    columns: list[str]
    conditions: list[str]
    """Names that a condition may start with."""


class _Opened(NamedTuple):
    catalog: Catalog
    was_live: bool
    stack: ExitStack


class Trajectories:
    """Opens one catalog per run and keeps it. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}

    def page(
        self, reader: ViewedRun, query: CatalogQuery, *, start: int, is_cancelled: Callable[[], bool]
    ) -> TrajectoryPage:
        """Return a page of trajectories. Raises ConfigError, ReplayBufferError."""
        catalog = self._catalog(reader)
        catalog.refresh()
        page = catalog.page(query, start=start, size=PAGE_ROWS, is_cancelled=is_cancelled)
        notes = catalog.notes + ([_IN_STORE] if reader.folder_phase == "stopped" else [])
        total = catalog.rows.num_rows
        return TrajectoryPage(page.num_rows, total, start, page.rows, notes, columns=[*SORTABLE], conditions=[*NAMES])

    def group(self, reader: ViewedRun, group_id: str) -> list[TrajectoryDetail]:
        """Members of a group. Raises ConfigError, ReplayBufferError."""
        return self._catalog(reader).group(group_id)

    def _catalog(self, reader: ViewedRun) -> Catalog:
        is_live = reader.is_live
        with self._lock:
            known = self._opened.get(reader.id)
            # Reopen when a run ends or is resumed.
            if known and known.was_live == is_live:
                return known.catalog
            stack, archive = ExitStack(), reader.folder / "archive"
            # Start no server: a finished run's archive is complete.
            where = reader.folder if is_live or not is_archive(archive) else archive
            catalog = stack.enter_context(open_catalog(str(where), starts_server=False))
            if known:
                known.stack.close()
            self._opened[reader.id] = _Opened(catalog, is_live, stack)
            return catalog

    def close(self) -> None:
        for opened in self._opened.values():
            opened.stack.close()
