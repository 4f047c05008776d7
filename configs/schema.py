"""The tree of settings: keys, groups with options, and suggestions for misspelled names.

A field of several tagged records is a group with the tags as options: `BufferConfig.store` becomes
`buffer/store=embedded | redis`. A generated option holds only the tag. YAML presets are more options
(`buffer/store=embedded_large`) or form their own groups (`recipe=dapo`).
"""

import ast
import inspect
import itertools
import re
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from msgspec.inspect import Field, ListType, NoneType, StructType, Type, UnionType, type_info
from omegaconf import DictConfig, OmegaConf

from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig

PRESETS = Path(__file__).resolve().parent / "presets"
"""Folder of the YAML presets; each subfolder is a group."""
_SIMILAR_KEY = 0.8
"""Minimum similarity of the last parts of two keys."""
_SIMILAR_SIBLING = 0.7
"""The same within one record or group."""


class Setting(NamedTuple):
    """One key of the tree, which can be a value, a record, or a group.

    Example: Setting(key="learner.engine.zero_stage", field=..., record=DeepSpeedEngineConfig,
    variant="learner/engine=deepspeed")
    """

    key: str
    """Dotted; entries of a list are `prepare[]`."""
    field: Field
    record: type
    """Record that declares the field."""
    variant: str
    """`group=option` that selects the record; empty outside groups."""

    @property
    def group(self) -> str:
        """Command line group at this key, if any."""
        return self.key.replace(".", "/")

    @property
    def name(self) -> str:
        """Left side of an override: the group, if it is one, otherwise the key."""
        return self.group if self.tags else self.key

    @property
    def meaning(self) -> str:
        """Docstring of the field as one paragraph; empty if missing."""
        return field_docstrings(self.record).get(self.field.name, "")

    @property
    def records(self) -> list[StructType]:
        """Records that the field or its list can hold."""
        return [found for found in _alternatives(self.field.type) if isinstance(found, StructType)]

    @property
    def takes_value(self) -> bool:
        """Whether it can be set directly; a record is set by its fields."""
        options = self.field.type.types if isinstance(self.field.type, UnionType) else (self.field.type,)
        return not all(isinstance(each, StructType | NoneType) for each in options)

    @property
    def tags(self) -> tuple[str, ...]:
        """Options, if the field is a group; otherwise empty."""
        in_list = isinstance(self.field.type, ListType)
        return () if in_list else tuple(str(found.tag) for found in self.records if found.tag is not None)


@cache
def settings() -> tuple[Setting, ...]:
    """Every key of every variant, in the order of the records."""
    root = type_info(RunConfig)
    assert isinstance(root, StructType)
    return tuple(_walk(root, prefix="", variant=""))


def _walk(record: StructType, *, prefix: str, variant: str) -> Iterator[Setting]:
    for field in record.fields:
        setting = Setting(prefix + field.encode_name, field, record.cls, variant)
        yield setting
        options = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        inner = f"{setting.key}[]." if any(isinstance(each, ListType) for each in options) else f"{setting.key}."
        for found in setting.records:
            option = f"{setting.group}={found.tag}" if found.tag is not None else variant
            yield from _walk(found, prefix=inner, variant=option)


def _alternatives(expected: Type) -> tuple[Type, ...]:
    if isinstance(expected, ListType):
        return _alternatives(expected.item_type)
    if isinstance(expected, UnionType):
        return tuple(found for option in expected.types for found in _alternatives(option))
    return (expected,)


@cache
def variants() -> dict[str, tuple[str, ...]]:
    """Group -> tags of its records."""
    return {setting.group: setting.tags for setting in settings() if setting.tags}


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """Field -> the string literal below it, including inherited fields."""
    found: dict[str, str] = {}
    for base in reversed([base for base in record.__mro__ if base.__module__.startswith("slipstream.")]):
        (declared,) = ast.parse(inspect.getsource(base)).body
        body = declared.body if isinstance(declared, ast.ClassDef) else []
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    found[name] = " ".join(text.split())
    return found


LOGGERS = "logging.backends"
"""The only setting that is a list of names or a mapping of names to their arguments."""


@cache
def groups() -> dict[str, list[str]]:
    """Group -> options. The first call registers generated options with Hydra."""
    options: dict[str, set[str]] = {}
    for group, tags in variants().items():
        options[group] = set(tags)
        for tag in tags:
            ConfigStore.instance().store(group=group, name=tag, node={"kind": tag}, provider="slipstream")
    for file in PRESETS.rglob("*/*.yaml"):
        options.setdefault(file.parent.relative_to(PRESETS).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def preset_of_file(group: str, file: Path, *, chosen: Collection[str] = ()) -> str:
    """Register a user's YAML file, a preset or a run's configuration, as an option of the group; return its name.

    `chosen`: groups that the command line chooses instead of the file. Raises ConfigError.
    """
    try:
        node = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{group}={file} must be a readable YAML file: {' '.join(str(error).split())}.") from None
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={file} must contain settings as key: value, got a list.")
    if OmegaConf.is_list(listed := OmegaConf.select(node, LOGGERS)):
        # The command line can then add arguments, or other loggers.
        OmegaConf.update(node, LOGGERS, {str(name): {} for name in listed}, merge=False)
    is_resolved = {setting.key for setting in settings() if "." not in setting.key} <= set(node)
    for other in chosen:
        parent, _, name = other.replace("/", ".").rpartition(".")
        record = OmegaConf.select(node, parent) if parent else node
        if not record or name not in record:
            continue
        if is_resolved or (isinstance(record[name], DictConfig) and "kind" in record[name]):
            del record[name]
        if is_resolved and parent == "algorithm":
            # The file holds the policy that `auto` chose for its own variants.
            record.pop("proximal", None)
    is_record = any(setting.group == group for setting in settings())
    name = file.as_posix().replace("/", "|")
    ConfigStore.instance().store(
        group=group, name=name, node=node, package=None if is_record else "_global_", provider="slipstream"
    )
    return name


NO_SETTING = "no setting"
"""Group of `peer_names` with an answer instead of a key."""


@cache
def peer_names() -> dict[str, tuple[str, str]]:
    """Other trainers' names, as ends of dotted keys -> trainer, our key or group."""
    table = yaml.safe_load((PRESETS.parent / "peer_names.yaml").read_text())
    rows = [
        (name, trainer, ours)
        for trainer, keys in table.items()
        for ours, names in keys.items()
        for name in names.split()
    ]
    return {name: (trainer, ours) for name, trainer, ours in reversed(rows)}


def unknown_key(key: str) -> str:
    """Error message for `key`, with the key meant, or its siblings."""
    owners = {setting.variant for setting in settings() if setting.key == key}
    if owners:
        return f"unknown key {key}: it belongs to {' and '.join(sorted(owners))}."
    if advice := peer_advice(key):
        return f"unknown key {key}: {advice}."
    if found := nearest_key(key):
        return f"unknown key {key}; did you mean {found}?"
    return f"unknown key {key}; {siblings(key)}."


def peer_advice(key: str) -> str:
    """Translate another trainer's name, or say why it has no setting; empty for other names."""
    # slime's names have dashes.
    path = key.replace("-", "_").split(".")
    ends = [".".join(path[start:]) for start in range(len(path))]
    name = next((end for end in ends if end in peer_names()), "")
    # `policy_loss.beta` is nearer to our setting with that end.
    if not name or any(setting.key.endswith(f".{end}") for setting in settings() for end in ends[-2:-1]):
        return ""
    trainer, ours = peer_names()[name]
    return ours if trainer == NO_SETTING else f"{name} is the name in {trainer}; here it is {ours}"


_PATHS = {"model": ("a folder or hub name", "model.path"), "data": ("a file", "data.train")}


def unknown_option(group: str, option: object) -> str:
    """Error message for `group=option`, with the option meant, or all."""
    options = groups()[group]
    if group in _PATHS and (re.search(r"[/.]", str(option)) or Path(str(option)).exists()):
        what, key = _PATHS[group]
        return f"unknown option {group}={option}; {what} is set as {key}={option}."
    # A prefix within this group wins over a name in another: experiment=gsm8k does not mean data=gsm8k.
    meant = [f"{group}={name}" for name in options if name.startswith(f"{option}_")]
    elsewhere = [f"{other}={option}" for other in groups() if option in groups()[other]]
    if not meant and len(elsewhere) == 1:
        meant = elsewhere
    if not meant:
        scores = {f"{group}={name}": SequenceMatcher(None, str(option).lower(), name).ratio() for name in options}
        best = max(scores.values())
        meant = [choice for choice, score in scores.items() if score == best >= _SIMILAR_SIBLING]
    advice = f"did you mean {' or '.join(meant)}?" if meant else f"choose one of {', '.join(options)}."
    return f"unknown option {group}={option}; {advice}"


def nearest_key(wrong: str) -> str | None:
    """Key or group that `wrong` most likely means, or None.

    Candidates have a similar last part (`max_step`, `lr`); the path ranks them.
    """
    path = wrong.replace("/", ".")
    names = {name.replace("/", "."): name for name in groups()}
    # An entry of a list is not set on the command line.
    plain = [setting.key for setting in settings() if setting.takes_value]
    names = {key: key for key in plain if ("[" in key) == ("[" in wrong)} | names
    scores = {name: _similarity(path, key) for key, name in names.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0 else None


def _similarity(wrong: str, key: str) -> float:
    """0 to 2; 0 if the last parts differ too much."""
    wrong_parent, _, end = wrong.rpartition(".")
    parent, _, last = key.rpartition(".")
    if wrong_parent == parent and end.startswith(f"{last}_"):
        # Such as a unit added: nearer than the same name elsewhere.
        return 2.0
    similarity = max(_end_similarity(end, last), _end_similarity(end, f"{parent.rpartition('.')[2]}_{last}"))
    needed = _SIMILAR_SIBLING if wrong_parent == parent else _SIMILAR_KEY
    return similarity + SequenceMatcher(None, wrong, key).ratio() if similarity >= needed else 0.0


def _end_similarity(wrong: str, name: str) -> float:
    is_abbreviation = ("_" in name and wrong == "".join(word[:1] for word in name.split("_"))) or (
        len(wrong) >= 4 and name.startswith(wrong)
    )
    return 1.0 if is_abbreviation else SequenceMatcher(None, wrong, name).ratio()


def siblings(key: str) -> str:
    """List the fields of the nearest record around `key`."""
    parent = key
    while parent:
        parent = parent.rpartition(".")[0]
        names = [setting.key for setting in settings() if setting.key.rpartition(".")[0] == parent]
        if names:
            inner = dict.fromkeys(name.rpartition(".")[2] for name in names)
            return f"{parent or 'the config'} has {', '.join(inner)}"
    raise AssertionError("the root record has keys")
