"""Which file, override or default set each value of a run."""

from collections.abc import Iterator
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import OverrideType
from hydra.types import RunMode
from omegaconf import OmegaConf

from configs.load import FOLDER, PRIMARY, groups, hydra_arguments, load, parse, to_plain


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
