"""The command `slipstream import-config`."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.migration.translation import Imported
from slipstream.migration.trl import import_trl
from slipstream.migration.verl import import_verl

_LARGEST_BYTES = 1 << 20
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e6, which only PyYAML reads as text."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def read_settings(path: Path) -> dict[str, Any]:
    """Return dotted key -> value; the last value of a key wins. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"FILE must exist, got {path}.")
    if path.stat().st_size > _LARGEST_BYTES:
        raise ConfigError(f"FILE must be a file of settings of at most 1 MiB, got {path}.")
    try:
        text = path.read_text(encoding="utf-8")
        found = _from_script(text) if path.suffix in (".sh", ".bash") else _from_document(path, text)
    except (UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"FILE must be YAML, JSON or a shell script, got {path}: {reason}.") from None
    if not found:
        raise ConfigError(f"FILE must hold settings, got none in {path}.")
    return {
        key: float(each) if isinstance(each, str) and _NUMBER.fullmatch(each) else each for key, each in found.items()
    }


def _from_document(path: Path, text: str) -> dict[str, Any]:
    document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if isinstance(document, list) and all(isinstance(line, str) for line in document):
        # Hydra's overrides.yaml
        return _overrides(document)
    if not isinstance(document, dict):
        raise ValueError("it must be a record of settings, or a list of overrides.")
    return dict(_leaves(document, ""))


def _from_script(text: str) -> dict[str, Any]:
    """Return `key=value` and `--key value` arguments, with the script's own variables expanded."""
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
    # A key without a dot is a shell variable.
    return options | {
        key: value for key, value in _overrides([word.lstrip("-") for word in filled]).items() if "." in key
    }


def _filled_in(text: str, variables: dict[str, str]) -> str:
    """Expand the script's variables and $HOME; other environment variables may be secrets."""
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


_IMPORTERS = {"verl": import_verl, "trl": import_trl}


def import_config(trainer: str, file: Path) -> None:
    """Print the equivalent command, notes on different meanings, and settings without an equivalent."""
    imported = import_settings(trainer, file)
    settings = [shlex.quote(override) for override in imported.overrides]
    print(" \\\n  ".join(["slipstream run", *settings]))
    for title, lines in (("Notes", imported.notes), ("Without equivalent", imported.untranslated)):
        if lines:
            print(f"\n{title}:", *(f"  {line}" for line in lines), sep="\n")


def import_settings(trainer: str, file: Path) -> Imported:
    """Translate a file; invalid combinations become a note. Raises ConfigError."""
    given = read_settings(file)
    try:
        imported = _IMPORTERS[trainer](given)
    except ConfigError:
        raise
    # Text instead of a number, such as an environment variable, which is not expanded.
    except (TypeError, ValueError) as error:
        unset = [f"{key}={value}" for key, value in given.items() if isinstance(value, str) and "$" in value]
        raise ConfigError(
            f"FILE must contain plain values, got {file} with {', '.join(unset) or error}: replace variables that it "
            "does not set by numbers."
        ) from None
    try:
        load(imported.overrides)
    except ConfigError as error:
        problems = " ".join(str(error).splitlines())
        return Imported(imported.overrides, [*imported.notes, f"to resolve first: {problems}"], imported.untranslated)
    return imported
