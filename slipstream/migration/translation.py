"""Translation: maps another trainer's settings to overrides, notes, and untranslated settings."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from slipstream.configs.base import Record

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_OFF: tuple[Any, ...] = (None, False, "", [], {})
_WORDS = ("null", "true", "false", "inf", "nan")


class Imported(Record):
    """Result of an import. Example: Imported(overrides=["seed=1"], notes=["..."], untranslated=["trainer.x = 3"])."""

    overrides: list[str]
    notes: list[str]
    """Settings with a different meaning here, or that the user must decide."""
    untranslated: list[str]
    """`key = value` without an equivalent."""


class Translation:
    """Source settings over the source's defaults, and the resulting overrides."""

    def __init__(self, given: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.given = given
        self._defaults = defaults
        self._taken: set[str] = set()
        self._ours: dict[str, str] = {}
        self.notes: list[str] = []

    def take(self, key: str) -> Any:
        """Return a setting, given or default, and mark it as translated."""
        self._taken.add(key)
        value = self.given.get(key)
        return self._defaults.get(key) if value is None else value

    def put(self, key: str, value: Any) -> None:
        """Set a Slipstream setting; None leaves it unchanged."""
        if value is not None:
            self._ours[key] = format_value(value)

    def same(self, theirs: str, ours: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        value = self.take(theirs)
        self.put(ours, None if value is None else convert(value))

    def note(self, key: str, sentence: str) -> None:
        if self.given.get(key) is not None:
            self._taken.add(key)
            self.notes.append(f"{key}={format_value(self.given[key])}: {sentence}")

    def result(self, *, decided_here: tuple[str, ...]) -> Imported:
        """Keys with a prefix in `decided_here` need no equivalent."""
        left = {key: value for key, value in self.given.items() if key not in self._taken and value not in _OFF}
        unequal = [f"{key} = {format_value(value)}" for key, value in left.items() if not key.startswith(decided_here)]
        return Imported([f"{key}={value}" for key, value in self._ours.items()], self.notes, unequal)


def format_value(value: Any) -> str:
    """Format a value for Slipstream's command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if is_plain else "'" + value.replace("'", "\\'") + "'"
    return msgspec.json.encode(value).decode()


def each_file(value: Any) -> Iterator[str]:
    """Yield the names of one file or a list of files."""
    yield from map(str, value if isinstance(value, list | tuple) else [value])
