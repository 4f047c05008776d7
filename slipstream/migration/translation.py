"""Translation of another trainer's settings to overrides, notes, and settings without an equivalent."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import msgspec
import yaml

from slipstream.configs.base import ConfigError, Record
from slipstream.configs.load import leaves

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_WORDS = ("null", "true", "false", "inf", "nan")
_LOGGERS = ("trackio", "wandb", "tensorboard")
_OPTIMIZERS = {
    "adamw": r"(paged_)?(fused)?adamw?(_hf|_torch|_apex|_anyprecision|_fused|_npu|_xla|_32bit)*",
    "adamw_8bit": r"(paged_)?adamw(_bnb|_torch)?_?8bit",
    "muon": r"(dist_)?muon",
}
"""Our optimizer -> its names elsewhere, in lower case."""
_OFF = "off, or a default that the file does not use"


class Imported(Record):
    """Result of an import.

    Example: Imported(overrides=["seed=1"], notes=["..."], untranslated=["trainer.x = 3"], decided=["...: trainer.y=1"])
    """

    overrides: list[str]
    notes: list[str]
    """Settings with a different meaning here, or that the user must decide."""
    untranslated: list[str]
    """`key = value` without an equivalent."""
    decided: list[str]
    """`reason: key=value, ...`: settings that need no equivalent."""


class Translation:
    """Source settings over the source's defaults, and the resulting overrides."""

    def __init__(self, given: dict[str, Any], tables: dict[str, Any]) -> None:
        self.tables = tables
        aliases, self._defaults = tables.get("aliases") or {}, tables["defaults"]
        self.given: dict[str, Any] = {}
        self.shown: dict[str, str] = {}
        """Name in this translation -> name in the file."""
        for key, value in given.items():
            name = next((new + key[len(old) :] for old, new in aliases.items() if f"{key}.".startswith(f"{old}.")), key)
            # A newer name with another value takes precedence over an older one.
            name = key if self.given.get(name, given.get(name, value)) != value else name
            self.given[name] = value
            self.shown.setdefault(name, key)
        self._taken: set[str] = set()
        self.ours: dict[str, str] = {}
        self.notes: list[str] = []
        self.decided: dict[str, list[str]] = {}

    def take(self, key: str) -> Any:
        """Return a setting or its default, and mark it as translated."""
        self._taken.add(key)
        value = self.given.get(key)
        return self._defaults.get(key) if value is None else value

    def put(self, key: str, value: Any) -> None:
        """Set a Slipstream setting unless `value` is None. Raises ValueError for an unset shell variable."""
        if value is not None:
            self.ours[key] = format_value(value)
            if "$" in self.ours[key]:
                raise ValueError

    def take_all(self, table: str, *names: str) -> list[Any]:
        return [self.take(f"{table}.{name}") for name in names]

    def put_all(self, table: str, **values: Any) -> None:
        for name, value in values.items():
            self.put(f"{table}.{name}", value)

    def same(self, theirs: str, ours: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        value = self.take(theirs)
        self.put(ours, None if value is None else convert(value))

    def same_all(self, table: str) -> None:
        """Translate a table of the trainer's file: their key -> ours, or [ours, conversion]."""
        for theirs, row in self.tables.get(table, {}).items():
            ours, conversion = row if isinstance(row, list) else (row, "as_is")
            self.same(theirs, ours, conversion.get if isinstance(conversion, dict) else _CONVERSIONS[conversion])

    def below(self, key: str) -> list[str]:
        """Return the given settings of a table, or an empty table."""
        return [name for name in self.given if f"{name}.".startswith(f"{key}.")]

    def note(self, key: str, sentence: str) -> None:
        """Add a note on each given setting of a table."""
        for name in self.below(key):
            if self.given[name] is not None:
                self._taken.add(name)
                self.notes.append(f"{self._described(name)}: {sentence}")

    def _described(self, key: str, *, sign: str = "=") -> str:
        return f"{self.shown[key]}{sign}{shorten(format_value(self.given[key]), 100, placeholder=' ...')}"

    def record(self, key: str) -> dict[str, Any]:
        """Take a record, possibly as JSON text, and all settings below it."""
        whole = self.take(key)
        found: dict[str, Any] = (yaml.safe_load(whole) if isinstance(whole, str) else whole) or {}
        return found | {name.removeprefix(f"{key}."): self.take(name) for name in self.below(key) if name != key}

    def put_columns(self, **keys: str) -> None:
        """Set `data.columns` from the settings that name a column."""
        names = {ours: self.take(theirs) for ours, theirs in keys.items()}
        self.put("data.columns", {ours: name for ours, name in names.items() if name not in (None, ours)} or None)

    def put_loggers(self, loggers: Any, *, options: dict[str, str]) -> None:
        """Set the supported loggers. `options`: argument of Weights & Biases -> their key."""
        names = [str(name) for name in _listed(loggers) if name]
        backends: dict[str, Any] = {name: {} for name in names if name in _LOGGERS}
        if "wandb" in backends:
            backends["wandb"] = {ours: value for ours, theirs in options.items() if (value := self.take(theirs))}
        self.put("logging.backends", (backends if any(backends.values()) else [*backends]) or None)
        if missing := [name for name in names if name not in (*_LOGGERS, "console", "file", "none")]:
            self.notes.append(
                f"loggers {', '.join(missing)}: there are {', '.join(_LOGGERS)}, and your own class as module:Class."
            )

    def put_reward_model(self, path: str) -> None:
        self.put_all("generators.reward", function="reward_model", arguments={"path": path})
        self.ours["generators.reward.max_memory_mib"] = "null"

    def put_shared_gpus(self, title: str, gpus: int, *, engine_gpus: int) -> None:
        """Divide GPUs that another trainer uses for training and generation in turn."""
        ranks = max(1, gpus // 2)
        self.put("learner.num_ranks", ranks)
        self.put("generators.count", max(1, (gpus - gpus // 2) // engine_gpus))
        self.notes.append(
            f"{gpus} GPUs: {title} takes turns on all of them; here {ranks} train while {gpus - gpus // 2} generate. "
            "Move the border with learner.num_ranks and generators.count; `slipstream plan` shows the memory."
        )

    def put_optimizer(self, key: str) -> None:
        """Set the optimizer and the ZeRO stage that it needs."""
        name = str(self.take(key) or "adamw")
        ours = next((ours for ours, names in _OPTIMIZERS.items() if re.fullmatch(names, name.lower())), None)
        if ours is None:
            self.note(key, f"there are {', '.join(_OPTIMIZERS)}; adamw stays.")
        elif ours != "adamw":
            self.put("learner.optimizer.name", ours)
            self.put("learner.engine.zero_stage", 0)
            self.ours.pop("learner.engine.offload_optimizer", None)
            self.notes.append(f"{key}={name}: {ours} needs learner.engine.zero_stage=0, its whole state on every rank.")

    def put_synchronous(self) -> None:
        self.put("staleness.max_lag", 0)
        self.notes.append(
            "staleness.max_lag=0 is the synchronous training of this file: raise it, with a correction, to let "
            "generation and training overlap."
        )

    def put_schedule(
        self, key: str, *, warmup_steps: int | None = None, warmup_ratio: str = "", total: Any = None
    ) -> None:
        """Set the schedule and its warm-up, in steps or as a fraction of `total` steps."""
        schedule, ratio = str(self.take(key)).removesuffix("_with_warmup"), self.take(warmup_ratio)
        ours = next((name for name in ("constant", "linear", "cosine") if schedule.startswith(name)), None)
        self.put("learner.optimizer.schedule", ours)
        if schedule != ours:
            self.notes.append(f"{key}={schedule}: there are constant, linear, and cosine, which end at 0.")
        steps = max(warmup_steps or 0, 0)
        if ratio and not steps:
            steps = int(ratio * total) if total and total > 0 else 0
            if not total:
                self.notes.append(f"{warmup_ratio}={ratio}: set learner.optimizer.warmup_steps, in steps.")
        self.put("learner.optimizer.warmup_steps", steps)

    def result(self) -> Imported:
        decided = self.decided | self.tables["decided"]
        reasons: dict[str, list[str]] = {}
        unequal = []
        for key, value in self.given.items():
            if key in self._taken or value in (None, "", [], {}) or key.endswith("_target_"):
                continue
            reason = next((why for why, starts in decided.items() if key.startswith(tuple(starts))), "")
            if reason or value in (False, 0, self._defaults.get(key)):
                reasons.setdefault(reason or _OFF, []).append(self._described(key))
            else:
                unequal.append(self._described(key, sign=" = "))
        lines = [f"{reason}: {', '.join(keys)}" for reason, keys in reasons.items()]
        return Imported([f"{key}={value}" for key, value in self.ours.items()], self.notes, unequal, lines)


class Trainer(NamedTuple):
    """Another trainer: a file of its settings, and translations of those that depend on others.

    The file has `starts` (beginnings of its keys), `aliases` (older names), `optimizer` (key of its name), `same`
    (table for `same_all`), `defaults`, `notes` (their key -> remedy if it differs from its default), `decided` (reason
    -> beginnings of keys that need no equivalent), and tables for `special`.
    """

    file: str
    special: tuple[Callable[[Translation], None], ...]

    @property
    def tables(self) -> dict[str, Any]:
        tables = yaml.safe_load((Path(__file__).parent / self.file).read_text(encoding="utf-8"))
        return tables | {name: dict(leaves(tables[name])) for name in ("same", "defaults", "notes")}

    def translate(self, given: dict[str, Any]) -> Imported:
        """Translate the settings of a file. Raises ConfigError for the file of another program."""
        tables = self.tables
        if not any(key.startswith(tuple(tables["starts"])) for key in given):
            raise ConfigError(
                f"FILE must hold settings of {tables['title']}, such as {tables['example']}, got none of them."
            )
        config = Translation(given, tables)
        config.same_all("same")
        config.put("learner.device", "cuda")
        config.put("algorithm.masks", [])
        for special in self.special:
            special(config)
        config.put_optimizer(tables["optimizer"])
        for key, sentence in tables["notes"].items():
            usual, names = tables["defaults"].get(key), config.below(key)
            if any(config.given[name] != usual if key in tables["defaults"] else config.given[name] for name in names):
                config.note(key, sentence)
            elif usual is not None:
                config.take(key)
        if "model.path" not in config.ours:
            config.notes.insert(0, "the file names no model: add model.path=FOLDER_OR_HUB_NAME.")
        return config.result()


def format_value(value: Any) -> str:
    """Format a value for Slipstream's command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if is_plain else "'" + value.replace("'", "\\'") + "'"
    return msgspec.json.encode(value).decode()


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def train_files(value: Any) -> str | list[dict[str, str]]:
    """Return one or several files in the format of `data.train`."""
    names = list(map(str, _listed(value)))
    return names[0] if len(names) == 1 else [{"path": name} for name in names]


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)


def eval_sets(value: Any, **settings: Any) -> list[dict[str, Any]]:
    """Return a set per file, named after its path."""
    sets = []
    for number, path in enumerate(map(str, _listed(value))):
        name = _as_name("_".join(Path(path).with_suffix("").parts[-2:])).strip("_.-") or "heldout"
        sets.append({"name": name[:44] + (f"_{number}" if number else ""), "path": path} | settings)
    return sets


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "as_is": lambda value: value,
    "files": train_files,
    "rows": lambda number: int(number) if 0 < number < 1e8 else None,
    "or_0": lambda number: max(number, 0),
    "or_all": lambda number: number or -1,
    "if_positive": lambda number: int(number) if number >= 1 else None,
    "above_1": lambda number: number > 1,
    "name": lambda text: _as_name(str(text)).lstrip(".")[:80],
}
"""Conversions for rows of tables; None leaves our setting unchanged."""
