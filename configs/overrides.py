"""Overrides of the command line, checked and turned into Hydra's arguments."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from slipstream.configs.base import ConfigError
from slipstream.configs.convert import nearest
from slipstream.configs.groups import groups
from slipstream.configs.run import RunConfig


def hydra_arguments(overrides: list[str]) -> list[str]:
    """`overrides` as Hydra shall see them. Raises ConfigError.

    Keys are always forced in: the records, not the YAML files, know which keys exist, so a value that
    no file mentions needs no `+`, and a misspelt one gets its hint from the conversion.
    """
    return [_hydra_argument(text, override) for text, override in zip(overrides, parse(overrides), strict=True)]


def parse(overrides: list[str]) -> list[Override]:
    """Hydra's own reading of a command line. Raises ConfigError."""
    parser = OverridesParser.create()
    return [_parse_one(parser, text) for text in overrides]


def _parse_one(parser: OverridesParser, text: str) -> Override:
    try:
        override: Override = parser.parse_override(text)
        is_whole = bool(override.key_or_group)
    except HydraException:
        is_whole = False
    if not is_whole:
        raise ConfigError(
            f"an override must read key=value, got `{text}`: put quotes round a value with special characters, "
            "as in 'key=\"value\"'."
        )
    if override.is_sweep_override():
        raise ConfigError(f"an override must have one value, got `{text}`: write a list as key=[a,b].")
    return override


def _hydra_argument(text: str, override: Override) -> str:
    key = override.key_or_group
    bare = text.lstrip("+")
    if override.type is OverrideType.DEL or key.startswith("hydra."):
        return text
    if key in groups():
        return _group_argument(bare, override)
    if "/" in key:
        raise ConfigError(f"{key}: unknown group `{key}`{nearest(key, list(groups()))}")
    _refuse_whole_node(text, key)
    if "." not in key and key not in RunConfig.__struct_fields__:
        raise ConfigError(f"{key}: unknown key `{key}`{nearest(key, [*RunConfig.__struct_fields__, *groups()])}")
    return f"++{bare}"


def _group_argument(bare: str, override: Override) -> str:
    group = override.key_or_group
    options = groups()[group]
    option = override.value()
    if option not in options:
        raise ConfigError(f"{group}: must be one of {', '.join(options)}, got {option!r}.")
    return bare


def _refuse_whole_node(text: str, key: str) -> None:
    """A variant is chosen by its file: setting its `kind` alone would leave the fields of the old one behind."""
    node = key.removesuffix(".kind").replace(".", "/")
    if node in groups():
        raise ConfigError(f"`{text}`: a variant is chosen as {node}=OPTION, with one of {', '.join(groups()[node])}.")
    below = [group for group in groups() if group.startswith(f"{node}/")]
    if below:
        raise ConfigError(
            f"`{text}`: {key} is a record, set its fields ({key}.FIELD=VALUE) or choose {', '.join(below)}."
        )
