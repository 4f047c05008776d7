"""Settings of runs as tables: every value with its origin and meaning, and where runs differ."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.configs.load import leaves
from slipstream.configs.schema import settings
from slipstream.runtime.run_folder import ORIGINS


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
