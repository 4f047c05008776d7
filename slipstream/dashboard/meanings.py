"""Meanings of metrics, from the tables of docs/metrics.md, and of the settings of a run, from their records."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.configs.load import leaves
from slipstream.configs.schema import settings
from slipstream.runtime.run_folder import ORIGINS

_PAGE = Path(__file__).with_name("metrics.md")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


# --- metrics ----------------------------------------------------------------------------------------------------------
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


# --- settings ---------------------------------------------------------------------------------------------------------
class SettingRow(Record):
    """A setting of a run.

    Example: SettingRow("learner.max_steps", value=80, origin="configs/presets/config.yaml", meaning="Steps of the ...")
    """

    key: str
    value: Any
    origin: str
    """Preset file, `command line a.b=c` or `default`; empty where it was not recorded."""
    meaning: str


def read_settings(folder: Path) -> list[SettingRow]:
    """Return every setting of the run in this folder, also one that this version of Slipstream does not know.

    Raises ConfigError if config.yaml cannot be read.
    """
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
    """Return key -> meaning, from the records' sources."""
    return {setting.key: setting.meaning for setting in settings()}
