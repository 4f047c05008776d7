"""From presets and a command line to one RunConfig, and back to text."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.configs.base import ConfigError
from slipstream.configs.convert import convert
from slipstream.configs.overrides import hydra_arguments, parse
from slipstream.configs.run import RunConfig
from slipstream.configs.schema import PRESETS, groups

PRIMARY = "config"
"""Preset whose defaults list names all groups."""
_NOT_HASHED = ("resume", "runs_dir")


def load(overrides: list[str]) -> RunConfig:
    """Compose the presets with `overrides` (`a.b=c`, `group=option`) and convert the result to records.

    Raises ConfigError.
    """
    arguments = hydra_arguments(overrides)
    groups()  # registers the options that the records define, before Hydra looks for them
    try:
        with initialize_config_dir(str(PRESETS), version_base=None):
            data = OmegaConf.to_container(compose(PRIMARY, overrides=arguments), resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the config cannot be composed: {str(error).strip().splitlines()[0]}") from None
    return convert(data, RunConfig)


def to_yaml(config: RunConfig) -> str:
    """Every value of the run as YAML, defaults included."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Every value of the run as dicts, lists, strings and numbers, defaults included."""
    return msgspec.json.decode(msgspec.json.encode(config))


def config_hash(config: RunConfig) -> str:
    """Hash of the settings that determine the results, 16 hex digits; equal for a run and its resumption."""
    plain = {key: value for key, value in to_plain(config).items() if key not in _NOT_HASHED}
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:16]


def provenance(overrides: list[str]) -> dict[str, str]:
    """Dotted key -> preset file, `command line a.b=c` or `default`, for every leaf of the resolved config.

    Raises ConfigError.
    """
    origins: dict[str, str] = {}
    for origin, values in [*_preset_layers(overrides), *_command_line_layers(overrides)]:
        origins.update(dict.fromkeys((key for key, _ in leaves(values)), origin))
    return {key: origins.get(key, "default") for key, _ in leaves(to_plain(load(overrides)))}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not itself a non-empty dict; a list is one leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _preset_layers(overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, values) of the chosen options in the order in which Hydra merges them."""
    with initialize_config_dir(str(PRESETS), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list(PRIMARY, hydra_arguments(overrides), RunMode.RUN)
    for default in chosen.defaults:
        path = default.config_path
        if path is None or path.startswith("hydra/"):
            continue
        file = _file(path)
        if file.exists():
            values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            values.pop("defaults", None)
            origin = _preset_file(path)
        else:
            group, _, option = path.rpartition("/")
            values = {"kind": option}
            override = chosen.overrides.override_metadata.get(group)
            by_command_line = override is not None and override.external_override
            chooser = override.containing_config_path if override else default.parent
            origin = f"command line {group}={option}" if by_command_line else _preset_file(str(chooser))
        yield origin, _nest(default.package or "", values)


def _file(path: str) -> Path:
    """File of a preset, or of the user's own (`preset_of_file`)."""
    group, _, option = path.rpartition("/")
    return Path(option.replace("|", "/")) if option.endswith(".yaml") else PRESETS / group / f"{option}.yaml"


def _preset_file(path: str) -> str:
    file = _file(path)
    return f"configs/presets/{file.relative_to(PRESETS)}" if file.is_relative_to(PRESETS) else str(file)


def _command_line_layers(overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for text, override in zip(overrides, parse(overrides), strict=True):
        if override.type is not OverrideType.DEL and override.key_or_group not in groups():
            yield f"command line {text}", _nest(override.key_or_group, override.value())


def _nest(package: str, value: Any) -> dict[str, Any]:
    for name in reversed(package.split(".") if package else []):
        value = {name: value}
    return value
