"""Conditions as one line of text, such as `reward>=0.5 step<=40 outcome=retired text='the answer'`."""

import re
import shlex
from difflib import get_close_matches

import msgspec

from slipstream.buffer.archive.trajectory_filter import GROUP_STATES, TrajectoryFilter
from slipstream.configs.base import ConfigError

_RANGES = ("reward", "tokens", "version", "step")
_EQUALS = {
    "id": "id",
    "group": "group_id",
    "prompt": "prompt_uid",
    "generator": "generator_id",
    "source": "data_source",
    "outcome": "outcome",
    "status": "reward_status",
    "stop": "stop_reason",
    "text": "text",
}
"""Word in a condition -> field of TrajectoryFilter."""
NAMES = (*_RANGES, *_EQUALS)
_CONDITION = re.compile(r"(\w+)(>=|<=|=)(.+)", re.DOTALL)


def parse_conditions(line: str) -> TrajectoryFilter:
    """Read conditions that must all hold: `NAME=VALUE`, and `>=`, `<=` for numbers. Raises ConfigError."""
    fields: dict[str, str] = {}
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"conditions must have their quotes closed, got {line!r}: {error}.") from None
    for word in words:
        fields |= _fields(word)
    try:
        found = msgspec.convert(fields, TrajectoryFilter, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a condition must have a value that fits, got {line!r}: {error}.") from None
    if found.outcome not in (None, *GROUP_STATES):
        raise ConfigError(f"outcome must be one of {', '.join(GROUP_STATES)}, got {found.outcome!r}.")
    return found


def format_conditions(where: TrajectoryFilter) -> str:
    """Return the line that `parse_conditions` reads as this filter."""
    values = {name: value for name, value in msgspec.structs.asdict(where).items() if value is not None}
    words = [f"{word}={shlex.quote(values[field])}" for word, field in _EQUALS.items() if field in values]
    for word in _RANGES:
        low, high = values.get(f"min_{word}"), values.get(f"max_{word}")
        words += [f"{word}={values[word]}"] if word in values else []
        if low is not None and low == high:
            words.append(f"{word}={low}")
            continue
        words += [f"{word}>={low}"] if low is not None else []
        words += [f"{word}<={high}"] if high is not None else []
    return " ".join(words)


def _fields(word: str) -> dict[str, str]:
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise ConfigError(f"a condition must read NAME=VALUE, NAME>=VALUE or NAME<=VALUE, got {word!r}.")
    name, relation, value = match.groups()
    if name in _EQUALS and relation == "=":
        return {_EQUALS[name]: value}
    if name in _RANGES:
        sides = {"=": ("min_", "max_"), ">=": ("min_",), "<=": ("max_",)}[relation]
        return {f"{side}{name}": value for side in sides}
    if name in _EQUALS:
        raise ConfigError(f"{name} must be given with =, got {word!r}.")
    near = get_close_matches(name, NAMES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"a condition must begin with one of {', '.join(NAMES)}, got {word!r}.{hint}")
