"""Compose presets and overrides into a RunConfig, and render it."""

import hashlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from blake3 import blake3
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from msgspec.inspect import BoolType, DictType, ListType, LiteralType, NoneType, StructType, UnionType, type_info
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slipstream.configs.base import Config, ConfigError, require
from slipstream.configs.cluster import PLACE
from slipstream.configs.data import EVAL_NAME_PATTERN
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.run import NAME_PATTERN, RunConfig
from slipstream.configs.schema import (
    LOGGERS,
    PRESETS,
    groups,
    nearest_key,
    peer_advice,
    preset_of_file,
    settings,
    siblings,
    unknown_key,
    unknown_option,
)

OmegaConf.register_new_resolver("cache", lambda name: str(cache_folder(name)))
PRIMARY = "config"
"""Preset with the defaults list of all groups."""
C = TypeVar("C", bound=Config)
_TYPE_NAMES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "a record", "null": "null",
}  # fmt: skip


def load(overrides: list[str]) -> RunConfig:
    """Compose the presets with `overrides` (`a.b=c`, `group=option`). Raises ConfigError.

    A recipe replaces the experiment's algorithm and filter. `learner.max_steps` in `overrides` replaces a preset's
    `learner.epochs`. A GGUF file in `model.path` becomes a folder in the cache, which `prepare` converts it into.
    """
    groups()  # registers the generated options before Hydra looks them up
    data = _compose(overrides)
    if alone := _without_experiment(overrides):
        chosen = _compose(alone)
        data["algorithm"] = chosen["algorithm"]
        if isinstance(data["buffer"], dict):
            data["buffer"]["filter"] = chosen["buffer"]["filter"]
    given, learner = {each.key_or_group for each in parse(overrides)}, data["learner"]
    if isinstance(learner, dict) and learner.get("epochs") is not None and "learner.max_steps" in given:
        must, why = "not be set with learner.epochs, which determines it", "remove one, or set learner.epochs=null"
        require("learner.epochs" not in given, "learner.max_steps", must, got="both", why=why)
        learner["epochs"] = None
    model = data["model"]
    if isinstance(model, dict) and (step := gguf_step(str(model.get("path")))):
        model["path"] = step["creates"]
        data["prepare"] = [step, *(data.get("prepare") or [])]
    _derive(data)
    return convert(data, RunConfig)


def _compose(overrides: list[str]) -> Any:
    values = [each.value() for each in parse(overrides) if each.key_or_group == LOGGERS]
    chosen = values[-1] if values and isinstance(values[-1], list) else None
    others = [text for text in overrides if chosen is None or parse([text])[0].key_or_group != LOGGERS]
    try:
        with initialize_config_dir(str(PRESETS), version_base=None):
            data: Any = OmegaConf.to_container(compose(PRIMARY, overrides=hydra_arguments(others)), resolve=True)
            if chosen is not None:
                # Chooses among the loggers of a file, which keep their arguments.
                data["logging"] = own = data.get("logging") or {}
                given = own.get("backends")
                own["backends"] = {str(name): given.get(name, {}) if isinstance(given, dict) else {} for name in chosen}
            return data
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"the config cannot be composed: {str(error).strip().splitlines()[0]}") from None


_RECIPE_PREFIXES = ("algorithm.", "buffer.filter.")


def _without_experiment(overrides: list[str]) -> list[str]:
    """With a recipe and an experiment: overrides without the experiment, which does not fit it; else empty."""
    others = [text for text in overrides if not text.startswith("experiment=")]
    has_recipe = any(text.startswith("recipe=") and text != "recipe=none" for text in overrides)
    return others if has_recipe and others != overrides else []


def _derive(data: dict[str, Any]) -> None:
    """Fill in defaults that depend on other settings. `convert` reports wrong types."""
    flat, defaults = dict(leaves(data)), {setting.key: setting.field.default for setting in settings()}

    def value(key: str) -> Any:
        given, default = flat.get(key), defaults[key]
        return given if isinstance(given, int | float | str) and type(given) in (type(default), int) else default

    def put(key: str, derived: object) -> None:
        if flat.get(key) is None:
            flat[key] = derived
            *parents, name = key.split(".")
            record: Any = data
            for parent in parents:
                record = record.setdefault(parent, {}) if isinstance(record, dict) else None
            if isinstance(record, dict):
                record[name] = derived

    put("model.max_length", value("data.max_prompt_tokens") + value("generators.sampling.max_tokens"))
    put("learner.tokens_per_microbatch", max(value("learner.tokens_per_microbatch"), value("model.max_length")))
    if isinstance(data["model"], dict) and data["model"].get("lora") is not None:
        put("learner.optimizer.learning_rate", _LORA_LEARNING_RATE)
    if value("model.dtype") != "float32":
        put("weights.max_probe_diff", _HALF_PRECISION_DIFF)
    answer_s = value("generators.answer_timeout_s") + value("generators.reward.timeout_s")
    put("learner.stall.timeout_s", max(value("learner.stall.timeout_s"), answer_s))


_LORA_LEARNING_RATE = 1e-5
_HALF_PRECISION_DIFF = 0.05
"""Kernels differ in the third digit of a log-probability."""
_WITHOUT_GOALS = ("evaluation.stop=null", "evaluation.goals=[]", "learner.checkpoint.best=null")
"""Training settings that would be refused with another `data.eval`."""
NO_MODEL_PATH = "set-below"


def load_with_models(words: list[str], *, is_optional: bool = False) -> tuple[list[str], RunConfig]:
    """Models named among the overrides, and the settings with the first of them.

    A run folder means its final model. Without an experiment, the settings are those of the first run that contains a
    model. `is_optional`: without a model, `model.path` is that of the overrides, else NO_MODEL_PATH.

    Raises ConfigError.
    """
    models = [word for word in words if "=" not in word and not word.startswith(("-", "~"))]
    if not models and not is_optional:
        raise ConfigError("MODEL must be a folder in transformers format or a name on the hub, got none.")
    overrides = [word for word in words if word not in models]
    local = [Path(model) for model in models if Path(model).is_dir()]
    folders = [folder for model in local for folder in (model, *model.parents[:2])]
    # Every run folder has both files, whoever started its roles.
    runs = [each for each in folders if (each / "config.yaml").is_file() and (each / "versions.json").is_file()]
    if runs and not any(text.startswith("experiment=") for text in overrides):
        overrides = [f"experiment={runs[0]}/config.yaml", *overrides]
    models = [f"{model}/final_model" if Path(model) in runs else model for model in models]
    # A path may have characters that Hydra doesn't read.
    settings = load([*_WITHOUT_GOALS, f"model.path={NO_MODEL_PATH}", *overrides])
    model = msgspec.structs.replace(settings.model, path=[*models, settings.model.path][0], lora=None)
    return models, msgspec.structs.replace(settings, model=model)


def merge_overrides(earlier: list[str], later: list[str]) -> list[str]:
    """Append `later` to `earlier`, without the keys and variants that `later` replaces."""
    keys = {each.key_or_group for each in parse(later)}
    # One of them determines the other.
    keys |= {"learner.max_steps", "learner.epochs"} if keys & {"learner.max_steps", "learner.epochs"} else set()
    replaced = tuple(key.replace("/", ".") + "." for key in keys if key in groups())
    known = zip(earlier, (each.key_or_group for each in parse(earlier)), strict=True)
    kept = [text for text, key in known if key not in keys and not key.startswith(replaced)]
    return [*kept, *later]


def to_yaml(config: RunConfig) -> str:
    """Render all values as YAML, including defaults."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Convert to dicts, lists, strings, and numbers, including defaults."""
    return msgspec.json.decode(msgspec.json.encode(config))


def config_hash(config: RunConfig) -> str:
    """Hash of the settings that determine the results, 16 hex digits."""
    return hashlib.sha256(msgspec.json.encode(identity(config), order="sorted")).hexdigest()[:16]


def identity(config: RunConfig) -> dict[str, Any]:
    """All values as plain data, without `PLACE`."""
    plain = to_plain(config)
    for key in PLACE:
        first, _, second = key.partition(".")
        del (plain[first] if second else plain)[second or first]
    return plain


def derived_sizes(run: RunConfig) -> dict[str, str]:
    """Numbers derived from the settings: name -> value and derivation."""
    learner, generators = run.learner, run.generators
    trajectories = learner.prompts_per_step * generators.group_size
    response = generators.sampling.max_tokens
    longest = run.data.max_prompt_tokens + response
    admitted = int(run.staleness.window * run.groups_per_version)
    gpus = generators.engine.num_workers if isinstance(generators.engine, VllmEngineConfig) else 1
    return {
        "trajectories per step": f"{trajectories} = {learner.prompts_per_step} groups x {generators.group_size}",
        "trajectories per optimizer update": f"{trajectories // run.algorithm.updates_per_step}",
        "generated tokens per step": f"<= {trajectories * response:,} = {trajectories} x {response}",
        "tokens per step": f"<= {trajectories * longest:,} = {trajectories} x {longest} (prompt and response)",
        "microbatches per step": f"<= {-(-trajectories * longest // learner.tokens_per_microbatch)} over all ranks",
        "groups per version": f"{run.groups_per_version}",
        "groups running or waiting": f"< {admitted} = (paced lag {run.staleness.window - 1:g} + 1) x "
        f"{run.groups_per_version}",
        "trajectories in flight": f"<= {generators.count * generators.max_concurrency} = {generators.count} generators "
        f"x {generators.max_concurrency}",
        "prompts of the whole run": f"{learner.epochs} x the rows of data.train"
        if learner.epochs
        else f"{learner.max_steps * learner.prompts_per_step:,} = {learner.max_steps} x {learner.prompts_per_step}",
        "devices of all generators": f"{generators.count * gpus}",
        "devices of the learner": f"{learner.num_ranks}",
        "config hash": config_hash(run),
    }


def provenance(overrides: list[str], run: RunConfig) -> dict[str, str]:
    """Leaf -> origin: preset file, `command line a.b=c`, or `default`."""
    origins = _origins(overrides)
    if alone := _without_experiment(overrides):
        origins = {key: origin for key, origin in origins.items() if not key.startswith(_RECIPE_PREFIXES)}
        origins |= {key: origin for key, origin in _origins(alone).items() if key.startswith(_RECIPE_PREFIXES)}
    return {key: origins.get(key, "default") for key, _ in leaves(to_plain(run))}


def _origins(overrides: list[str]) -> dict[str, str]:
    origins: dict[str, str] = {}
    layers = [*_preset_layers(overrides)]
    for text, override in zip(overrides, parse(overrides), strict=True):
        if override.type is not OverrideType.DEL and override.key_or_group not in groups():
            layers.append((f"command line {text}", _nest(override.key_or_group, override.value())))
    for origin, values in layers:
        origins.update(dict.fromkeys((key for key, _ in leaves(values)), origin))
    return origins


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all leaves; a list is one leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _preset_layers(overrides: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (origin, values) of the chosen options, in merge order."""
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
    """File of a preset, or a user's (`preset_of_file`)."""
    group, _, option = path.rpartition("/")
    return Path(option.replace("|", "/")) if option.endswith((".yaml", ".yml")) else PRESETS / group / f"{option}.yaml"


def _preset_file(path: str) -> str:
    file = _file(path)
    return f"configs/presets/{file.relative_to(PRESETS)}" if file.is_relative_to(PRESETS) else str(file)


def _nest(package: str, value: Any) -> dict[str, Any]:
    for name in reversed(package.split(".") if package else []):
        value = {name: value}
    return value


_DEMO = "digits_cpu"
_TASK = {"experiment", "model", "model.path", "data", "data.train", "sft.train_path"}
"""Overrides that choose a task; without any, it is `_DEMO`."""


# --- command line overrides, checked and converted to Hydra arguments ------------------------------------------------
def hydra_arguments(overrides: list[str]) -> list[str]:
    """Convert `overrides` to the form that Hydra accepts. Raises ConfigError.

    Keys are forced in with `++`: the records, not the YAML files, know which exist, and `convert` reports others.
    """
    if not {each.key_or_group for each in parse(overrides)} & _TASK:
        overrides = [*overrides, f"experiment={_DEMO}"]
    parsed = parse(overrides)
    chosen = {each.key_or_group for each in parsed if each.key_or_group in groups()}
    return [_hydra_argument(text, each, chosen=chosen) for text, each in zip(overrides, parsed, strict=True)]


def parse(overrides: list[str], *, can_sweep: bool = False) -> list[Override]:
    """Parse overrides with Hydra. `can_sweep`: whether one may have several values. Raises ConfigError."""
    parser = OverridesParser.create()
    parsed = []
    for index, text in enumerate(overrides):
        try:
            override: Override = parser.parse_override(text)
        except HydraException:
            raise ConfigError(_advice(overrides, index)) from None
        if not override.key_or_group or text.startswith("-"):
            raise ConfigError(_advice(overrides, index))
        why = "write a list as key=[a,b], or train one run per value with `slipstream run -m`"
        is_fit = can_sweep or not override.is_sweep_override()
        require(is_fit, "a setting", "have one value", got=f"`{text}`", why=why)
        parsed.append(override)
    return parsed


def _advice(texts: list[str], index: int) -> str:
    """Error message for the argument at `index`, with the override probably meant."""
    text, previous = texts[index], texts[index - 1] if index else ""
    wrong = f"a setting must read key=value, got `{text}`"
    if Path(text).exists():
        return f"{wrong}: write {'model.path' if Path(text).is_dir() else 'data.train'}={text}."
    if "=" in text and not text.startswith("-"):
        return f"{wrong}: put quotes around special characters, as in 'key=\"value\"'."
    if previous.endswith("="):
        return f"a setting must read key=value, got `{previous} {text}`: leave no space around the =."
    name, _, value = text.lstrip("-").rstrip(":").partition("=")
    if not value:
        # Written as two or three words: `max_steps 5`, `max_steps = 5`, `--max-steps 5`.
        value = next((word.lstrip("=") for word in texts[index + 1 :] if word != "="), "")
    plain = name.replace("-", "_")
    is_known = plain in groups() or any(setting.key == plain for setting in settings())
    if not is_known and (peer := peer_advice(plain)):
        return f"{wrong}: {peer}."
    if value and "=" not in value and (ours := plain if is_known else nearest_key(plain)):
        return f"{wrong}: write {ours}={value}."
    presets = [f"{group}={name}" for group, options in groups().items() if name in options]
    return f"{wrong}: write {presets[0]}." if len(presets) == 1 else f"{wrong}."


def _hydra_argument(text: str, override: Override, *, chosen: set[str]) -> str:
    key = override.key_or_group
    bare = text.lstrip("+")
    if override.type is OverrideType.DEL or key.startswith("hydra."):
        return text
    if key in groups():
        option = str(override.value())
        if option.endswith((".yaml", ".yml")):
            return f"{key}={preset_of_file(key, Path(option), chosen=chosen)}"
        if option not in groups()[key]:
            raise ConfigError(unknown_option(key, option))
        return bare
    # A value for a record, or for a variant's `kind`, would keep the old fields.
    node = key.removesuffix(".kind").replace(".", "/")
    if node in groups():
        options, value = groups()[node], override.value()
        choice = f"{node}={value}" if value in options else f"{node}=OPTION, with one of {', '.join(options)}"
        raise ConfigError(f"a variant must be chosen with a slash, got `{text}`: write {choice}.")
    if below := [group for group in groups() if group.startswith(f"{node}/")]:
        advice = f"{siblings(f'{key}.')}; or choose an option of {', '.join(below)}"
        raise ConfigError(f"{key} is a record and must be set by its fields, got `{text}`: {advice}.")
    if "/" in key or ("." not in key and not any(setting.key == key for setting in settings())):
        raise ConfigError(unknown_key(key))
    return f"++{bare}"


# --- plain data to typed records; an error reads `key must …, got …` --------------------------------------------------
def convert(data: object, record: type[C]) -> C:
    """Build `record` from `data`. Types are strict, but an integer can stand for a float.

    Raises ConfigError with a sentence per unknown key, missing key, or unknown choice, else for the first wrong value.
    """
    if errors := [*_errors(type_info(record), data, ""), *_infinite(data, "")]:
        raise ConfigError("\n".join(errors))
    try:
        return msgspec.convert(data, record)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(error, data)) from None


def _errors(expected: Any, value: object, path: str) -> Iterator[str]:
    """Errors that msgspec would report without the alternatives."""
    if isinstance(expected, UnionType) and isinstance(value, dict):
        if not any(isinstance(option, DictType) for option in expected.types):
            yield from _variant_errors(expected, value, path)
    elif isinstance(expected, StructType) and isinstance(value, dict):
        yield from _record_errors(expected, value, path)
    elif isinstance(expected, UnionType) and {type(each) for each in expected.types} == {BoolType, LiteralType}:
        words = [word for each in expected.types if isinstance(each, LiteralType) for word in each.values]
        if not isinstance(value, bool) and value not in words:
            yield f"{path} must be one of true, false, {', '.join(map(str, words))}, got {value!r}."
    elif isinstance(expected, UnionType) and isinstance(value, list):
        for option in expected.types:
            if isinstance(option, ListType):
                yield from _errors(option, value, path)
    elif isinstance(expected, ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _errors(expected.item_type, item, f"{path}[{index}]")
    elif isinstance(expected, LiteralType) and value not in expected.values:
        yield f"{path} must be one of {', '.join(map(str, expected.values))}, got {value!r}."


def _infinite(value: object, path: str) -> Iterator[str]:
    """Errors of numbers that JSON would turn into null."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path} must be a finite number, got {value}."
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _infinite(item, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip("."))


def _variant_errors(expected: UnionType, value: dict[str, Any], path: str) -> Iterator[str]:
    variants = [option for option in expected.types if not isinstance(option, NoneType)]
    kinds = {variant.tag: variant for variant in variants if isinstance(variant, StructType)}
    if None in kinds:
        yield from _errors(kinds[None], value, path)
    elif value.get("kind") in kinds:
        yield from _record_errors(kinds[value["kind"]], value, path)
    elif not kinds:
        yield f"{path} must be one value, got a record with {', '.join(value)}."
    else:
        yield f"{path}.kind must be one of {', '.join(map(str, kinds))}, got {value.get('kind', 'nothing')!r}."


def _record_errors(expected: StructType, value: dict[str, Any], path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in expected.fields}
    for key, item in value.items():
        here = f"{path}.{key}".lstrip(".")
        if key in fields:
            yield from _errors(fields[key].type, item, here)
        elif key != expected.tag_field:
            while isinstance(item, dict) and item:
                inner, item = next(iter(item.items()))
                here = f"{here}.{inner}"
            yield unknown_key(here)
    for name, field in fields.items():
        if field.required and name not in value:
            yield f"{path}.{name}".lstrip(".") + " must be set, got nothing."


_PATTERNS = {
    NAME_PATTERN: "1 to 80 letters, digits, ., _ and -, and not start with a dot, because it names a folder",
    EVAL_NAME_PATTERN: "1 to 48 letters, digits, ., _ and -, and start with a letter or digit",
}


def _sentence(error: msgspec.ValidationError, data: object) -> str:
    """Turn `Expected `int` >= 1, got `str` - at `$.a.b`` into `a.b must be an integer >= 1, got 'x'.`."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    message, _, place = str(error).partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    rule = re.sub(r", got .*$", "", message).removeprefix("Expected ")
    types = re.search(r"`([^`]*)`", rule)
    # msgspec quotes a pattern as Python does.
    expected = next((words for pattern, words in _PATTERNS.items() if repr(pattern) in rule), rule)
    if types and expected == rule:
        named = " or ".join(_TYPE_NAMES.get(name, name) for name in types[1].split(" | "))
        expected = rule.replace(types[0], named, 1)
    got: Any = data
    for step in re.findall(r"[^.\[\]]+", path):
        got = got[int(step)] if isinstance(got, list) else got[step]
    shown = "null" if got is None else repr(got)
    return f"{path or 'the config'} must be {expected}, got {shown}.{_form(path, expected, got)}"


def _form(path: str, expected: str, got: Any) -> str:
    """Describe how to write a value of the expected type."""
    if expected.startswith("a string") and isinstance(got, int | float):
        return f" Quote it: \"{path}='{got}'\"."
    if "a list" in expected and isinstance(got, str):
        return f" Write {path}=[{got}]."
    meaning = next((setting.meaning for setting in settings() if setting.key == path), "")
    if got is None and (zero := re.search(r"\b0 = ([^.;,]*)", meaning)):
        return f" {path}=0 means: {zero[1]}."
    fields = [setting.key for setting in settings() if setting.key.rpartition(".")[0] == path]
    return f" Set its fields, such as {fields[0]}." if expected.startswith("a record") and fields else ""


_OWN_SETTINGS = (
    "experiment=", "broker.", "weights.transport=", "name=", "runs_dir=", "model.path=", "model.trust_remote_code=",
    "generators.reward.function=", "generators.reward.functions=", "generators/agent=", "generators.agent.",
    "generators.agents",
)  # fmt: skip
"""Settings from a generator's own command line, such as code to execute. The broker sends all others."""
_LOCAL_SETTINGS = ("broker.address=", "broker.token_file=", "name=", "runs_dir=", "weights.transport=")


def own_settings(overrides: list[str]) -> list[str]:
    """Overrides that a generator needs on any machine."""
    return [text for text in overrides if text.startswith(_OWN_SETTINGS) and not text.startswith(_LOCAL_SETTINGS)]


# --- models converted from GGUF files --------------------------------------------------------------------------------
_DIGITS = 16


def cache_folder(name: str) -> Path:
    """`$SLIPSTREAM_CACHE/NAME`, by default `~/.cache/slipstream/NAME`."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SLIPSTREAM_CACHE") or user / "slipstream").absolute() / name


def gguf_step(path: str) -> dict[str, Any] | None:
    """Preparation step that converts a GGUF file; None for other models. Raises ConfigError if the file is missing.

    The folder's name has a hash of the file, so that changes are converted.

    Example: gguf_step("gguf:models/tiny.gguf") -> {"creates": "CACHE/tiny-0a55b7e139f2c61d", "module":
        "slipstream.scripts.convert_gguf", "args": ["FOLDER/models/tiny.gguf", "--out=CACHE/tiny-0a55b7e139f2c61d"]}
    """
    file = Path(path.removeprefix("gguf:")).expanduser()
    if not path.startswith("gguf:") and file.suffix != ".gguf":
        return None
    if not file.is_file():
        raise ConfigError(f"model.path must be an existing GGUF file, got {path!r}: correct the path.")
    digest = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()[:_DIGITS]
    folder = cache_folder(f"{file.stem}-{digest}")
    return {
        "creates": str(folder),
        "module": "slipstream.scripts.convert_gguf",
        "args": [str(file.absolute()), f"--out={folder}"],
    }
