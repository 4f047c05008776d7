"""Overrides of the command line, checked and turned into Hydra's arguments."""

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from slipstream.configs.base import ConfigError
from slipstream.configs.schema import groups, nearest_key, preset_of_file, settings, unknown_key, unknown_option


def hydra_arguments(overrides: list[str]) -> list[str]:
    """`overrides` in the form that Hydra accepts. Raises ConfigError.

    Keys are always forced in: the records, not the YAML files, know which keys exist, so a key that no preset mentions
    needs no `+`, and a misspelt one gets its hint from the conversion.
    """
    return [_hydra_argument(text, override) for text, override in zip(overrides, parse(overrides), strict=True)]


def parse(overrides: list[str]) -> list[Override]:
    """Overrides as Hydra parses them. Raises ConfigError."""
    parser = OverridesParser.create()
    parsed = []
    for index, text in enumerate(overrides):
        override = _parse_one(parser, text)
        if override is None:
            raise ConfigError(_advice(overrides, index))
        if override.is_sweep_override():
            raise ConfigError(f"a setting must have one value, got `{text}`: write a list as key=[a,b].")
        parsed.append(override)
    return parsed


def _parse_one(parser: OverridesParser, text: str) -> Override | None:
    """None for what does not read `key=value`, options with dashes included."""
    try:
        override: Override = parser.parse_override(text)
    except HydraException:
        return None
    return override if override.key_or_group and not text.startswith("-") else None


def _advice(texts: list[str], index: int) -> str:
    """Sentence for the argument at `index`, which is no override, with the one it may have been meant as."""
    text, previous = texts[index], texts[index - 1] if index else ""
    if "=" in text and not text.startswith("-"):
        return (
            f"a setting must read key=value, got `{text}`: put quotes round special characters, as in 'key=\"value\"'."
        )
    if previous.endswith("="):
        return f"a setting must read key=value, got `{previous} {text}`: leave no space beside the =."
    name, _, value = text.lstrip("-").rstrip(":").partition("=")
    if not value:
        # Written as two or three words: `max_steps 5`, `max_steps = 5`, `--max-steps 5`.
        value = next((word.lstrip("=") for word in texts[index + 1 :] if word != "="), "")
    if value and "=" not in value and (key := _key_of(name.replace("-", "_"))):
        return f"a setting must read key=value, got `{text}`: write {key}={value}."
    presets = [f"{group}={name}" for group, options in groups().items() if name in options]
    advice = f": write {presets[0]}." if len(presets) == 1 else "."
    return f"a setting must read key=value, got `{text}`{advice}"


def _key_of(name: str) -> str | None:
    is_known = name in groups() or any(setting.key == name for setting in settings())
    return name if is_known else nearest_key(name)


def _hydra_argument(text: str, override: Override) -> str:
    key = override.key_or_group
    bare = text.lstrip("+")
    if override.type is OverrideType.DEL or key.startswith("hydra."):
        return text
    if key in groups():
        option = str(override.value())
        if option.endswith(".yaml"):
            return f"{key}={preset_of_file(key, Path(option))}"
        if option not in groups()[key]:
            raise ConfigError(unknown_option(key, option))
        return bare
    _refuse_whole_record(text, key, override.value())
    if "/" in key or ("." not in key and not any(setting.key == key for setting in settings())):
        raise ConfigError(unknown_key(key))
    return f"++{bare}"


def _refuse_whole_record(text: str, key: str, value: object) -> None:
    """A variant is chosen as an option: setting its `kind` alone would leave the fields of the old one behind."""
    node = key.removesuffix(".kind").replace(".", "/")
    if node in groups():
        options = groups()[node]
        choice = f"{node}={value}" if value in options else f"{node}=OPTION, with one of {', '.join(options)}"
        raise ConfigError(f"a variant must be chosen with a slash, got `{text}`: write {choice}.")
    below = [group for group in groups() if group.startswith(f"{node}/")]
    if below:
        raise ConfigError(
            f"{key} is a record and must be set by its fields, got `{text}`: write {key}.FIELD=VALUE, or choose an "
            f"option of {', '.join(below)}."
        )
