"""From Hydra's files and a command line to one RunConfig, and back to text."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.configs.base import ConfigError
from slipstream.configs.convert import convert, nearest
from slipstream.configs.run import RunConfig

FOLDER = Path(__file__).resolve().parent
"""Where the YAML files lie."""
PRIMARY = "config"
"""The file whose defaults list names all groups."""
_NOT_HASHED = ("resume", "runs_dir")


def load(overrides: list[str]) -> RunConfig:
    """Compose the YAML files with `overrides` (`a.b=c`, `+a.b=c`, `group=option`) and convert the result once.

    Raises ConfigError.
    """
    arguments = hydra_arguments(overrides)
    try:
        with initialize_config_dir(str(FOLDER), version_base=None):
            data = OmegaConf.to_container(compose(PRIMARY, overrides=arguments), resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the config cannot be composed: {str(error).strip().splitlines()[0]}") from None
    return convert(data, RunConfig)


def to_yaml(config: RunConfig) -> str:
    """Every value of the run, defaults included."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Every value of the run as dicts, lists, strings and numbers."""
    return msgspec.json.decode(msgspec.json.encode(config))


def config_hash(config: RunConfig) -> str:
    """16 hex digits of what the run computes: equal for a run and its resumption, whatever folder it lies in."""
    plain = {key: value for key, value in to_plain(config).items() if key not in _NOT_HASHED}
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:16]


def groups() -> dict[str, list[str]]:
    """Group -> its options: the folders under `configs` and the YAML files in them."""
    options: dict[str, list[str]] = {}
    for file in sorted(FOLDER.rglob("*/*.yaml")):
        options.setdefault(file.parent.relative_to(FOLDER).as_posix(), []).append(file.stem)
    return options


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


# @@ Which file, override or default set each value of a run.
def sources(overrides: list[str]) -> dict[str, str]:
    """Dotted key -> `configs/x.yaml`, `override a.b=c` or `default`, for every leaf of the resolved config.

    Raises ConfigError.
    """
    origins: dict[str, str] = {}
    for name, values in [*_file_layers(overrides), *_override_layers(overrides)]:
        origins.update(dict.fromkeys((key for key, _ in leaves(values)), name))
    return {key: origins.get(key, "default") for key, _ in leaves(to_plain(load(overrides)))}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not itself a filled dict; a list is one leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _file_layers(overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The chosen YAML files in the order in which they are merged."""
    with initialize_config_dir(str(FOLDER), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list(PRIMARY, hydra_arguments(overrides), RunMode.RUN).defaults
    for default in chosen:
        if default.config_path and not default.config_path.startswith("hydra/"):
            file = f"{default.config_path}.yaml"
            values: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / file), resolve=False)
            values.pop("defaults", None)
            yield f"configs/{file}", _nest(default.package or "", values)


def _override_layers(overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for text, override in zip(overrides, parse(overrides), strict=True):
        if override.type is not OverrideType.DEL and override.key_or_group not in groups():
            yield f"override {text}", _nest(override.key_or_group, override.value())


def _nest(package: str, value: Any) -> dict[str, Any]:
    for name in reversed(package.split(".") if package else []):
        value = {name: value}
    return value
