"""Settings files of other trainers: YAML, JSON, a list of overrides, or the shell script that starts them."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from slipstream.configs.base import ConfigError

_LARGEST_BYTES = 1 << 20
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Number without a point or a sign of its exponent: text to PyYAML, a number to Hydra and argparse."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def read_settings(path: Path) -> dict[str, Any]:
    """Return dotted key -> value of all settings in a file; the last of a key counts. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"FILE must exist, got {path}.")
    if path.stat().st_size > _LARGEST_BYTES:
        raise ConfigError(f"FILE must be a file of settings of at most 1 MiB, got {path}.")
    try:
        text = path.read_text(encoding="utf-8")
        found = _from_script(text) if path.suffix in (".sh", ".bash") else _from_document(path, text)
    except (UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"FILE must be YAML, JSON or a shell script, got {path}: {_first_line(error)}") from None
    if not found:
        raise ConfigError(f"FILE must hold settings, got none in {path}.")
    return {
        key: float(each) if isinstance(each, str) and _NUMBER.fullmatch(each) else each for key, each in found.items()
    }


def _from_document(path: Path, text: str) -> dict[str, Any]:
    document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if isinstance(document, list) and all(isinstance(line, str) for line in document):
        # Hydra keeps the overrides of a run in such a list.
        return _overrides(document)
    if not isinstance(document, dict):
        raise ValueError("it must be a record of settings, or a list of overrides.")
    return dict(_leaves(document, ""))


def _from_script(text: str) -> dict[str, Any]:
    """Return the words `key=value` and `--key value` of all commands; `$NAME` is replaced where the script sets it."""
    words = [word for line in text.replace("\\\n", " ").splitlines() for word in shlex.split(line, comments=True)]
    variables: dict[str, str] = {}
    for word in words:
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            variables[match[1]] = _filled_in(match[2], variables)
    filled = [_filled_in(word, variables) for word in words]
    options = {
        word[2:].replace("-", "_"): _value(following)
        for word, following in zip(filled, [*filled[1:], ""], strict=True)
        if word.startswith("--") and "=" not in word and not following.startswith("-")
    }
    # A key without a dot is a variable of the script.
    return options | {
        key: value for key, value in _overrides([word.lstrip("-") for word in filled]).items() if "." in key
    }


def _filled_in(text: str, variables: dict[str, str]) -> str:
    """Replace variables of the script and the home folder; other variables of the environment may be secrets."""
    known = {"HOME": str(Path.home())} | variables
    return re.sub(r"\$\{?(\w+)(?::?-([^}]*))?\}?", lambda match: known.get(match[1], match[2] or match[0]), text)


def _overrides(words: list[str]) -> dict[str, Any]:
    found = [match for word in words if (match := _OVERRIDE.fullmatch(word))]
    return {match[1]: _value(match[2]) for match in found}


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _leaves(document: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        found += _leaves(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") + "."
