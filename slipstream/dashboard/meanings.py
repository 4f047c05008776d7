"""Meanings of the metrics, from the tables of docs/metrics.md."""

import re
from functools import cache
from pathlib import Path

from slipstream.buffer.trajectory import Record

_PAGE = Path(__file__).with_name("metrics.md")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class Meaning(Record):
    """One row of a table.

    Example: Meaning("lag/max", section="Rows", meaning="largest lag of a model-written token", unit="versions")
    """

    key: str
    """`<...>` stands for any text, such as a lag or a data source."""
    section: str
    meaning: str
    unit: str = ""
    healthy: str = ""


@cache
def read_meanings() -> list[Meaning]:
    """Return the metrics of a row in the order of the page."""
    found, section, columns = [], "", list[str]()
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section, columns = line.lstrip("# "), []
        elif line.startswith("| key"):
            columns = [name.strip() for name in line.strip("|").split("|")]
        elif line.startswith("| `") and columns and section != "summary.json":
            cells = [_plain(cell) for cell in line.strip("|").split("|")]
            found.append(_meaning(dict(zip(columns, cells, strict=False)), section))
    return found


def _meaning(cells: dict[str, str], section: str) -> Meaning:
    unit, _, healthy = cells.get("unit, healthy range", cells.get("unit", "")).partition("; ")
    return Meaning(cells["key"], section, cells["meaning"], unit, cells.get("healthy", healthy))


def _plain(cell: str) -> str:
    return _LINK.sub(r"\1", cell).replace("`", "").strip()
