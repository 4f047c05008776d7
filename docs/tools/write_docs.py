"""Write the generated blocks and files of the documentation: `python -m docs.tools.write_docs [--check]`."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
)

from docs.tools.monitoring_files import alerts, dashboard
from slipstream.configs.algorithm_terms import AdvantageConfig, MaskConfig, PolicyLossConfig
from slipstream.configs.base import Formula
from slipstream.configs.generators import RewardConfig, RewardFunctionConfig
from slipstream.configs.schema import PRESETS, Setting, groups, settings, variants
from slipstream.learner.algorithms import find
from slipstream.runtime.healthy_ranges import RANGES

OFTEN_CHANGED = (
    "name", "model.path", "model.lora", "data.train", "data.eval", "data.max_prompt_tokens",
    "generators.sampling.max_tokens", "generators.sampling.temperature", "generators.group_size",
    "generators.reward.function", "generators.agent", "generators.count", "generators.engine.tensor_parallel_size",
    "learner.num_ranks", "learner.engine.zero_stage", "learner.tokens_per_microbatch", "learner.prompts_per_step",
    "learner.max_steps", "learner.epochs", "learner.optimizer.learning_rate", "learner.checkpoint.every_steps",
    "evaluation.every_steps", "staleness.max_lag", "algorithm.kl.coef", "logging.backends",
)  # fmt: skip


def list_settings() -> str:
    """Render a section per record and group of variants: options, then keys with default, range, and meaning."""
    top_level = [setting for setting in settings() if "." not in setting.key]
    keys = {setting.key: setting for setting in reversed(settings())}
    often = [keys[key] for key in OFTEN_CHANGED]
    sections = [[f"## The {len(often)} settings that most runs change", "", *_key_table(often)]]
    sections += [["## The run", "", *_key_table(top_level)]]
    sections += [[f"## `{group}`", "", *_option_table(group)] for group in ("experiment", "recipe")]
    shown: dict[type, str] = {RewardConfig: "generators.reward", RewardFunctionConfig: "generators.reward.functions"}
    sections += [[*_section(setting, shown)] for setting in settings() if setting.records]
    # Several variants may hold the same records under the same key.
    return "\n\n".join(dict.fromkeys("\n".join(section).strip() for section in sections))


def _section(setting: Setting, shown: dict[type, str]) -> Iterator[str]:
    """Render heading, meaning, options, and keys of a field that holds one record, a choice of records, or a list.

    `shown`: records with their fields above -> name; updated. They are not repeated.
    """
    is_choice = len(setting.records) > 1
    yield from (f"{'###' if '.' in setting.key else '##'} `{setting.name}`", "")
    yield from (setting.meaning if is_choice else _docstring(setting.records[0].cls), "")
    if setting.group in groups():
        yield from (*_option_table(setting.group), "")
    for record in setting.records:
        below = {found.key: found for found in settings() if found.record is record.cls}.values()
        fields = [found for found in below if found.key.rpartition(".")[0].removesuffix("[]") == setting.key]
        name = f"{setting.name}={record.tag}" if setting.tags else setting.name
        same, base = shown.setdefault(record.cls, name), shown.get(record.cls.__mro__[1], "")
        if fields and is_choice:
            yield from (f"`{setting.name}={record.tag}`:" if setting.tags else f"`kind: {record.tag}`:", "")
        if fields and same != name:
            yield from (f"Fields as in `{same}`.", "")
        elif base:
            yield from (f"Like `{base}`, except for:", "")
            yield from (*_key_table([each for each in fields if each.field.name in record.cls.__annotations__]), "")
        elif fields:
            yield from (*_key_table(fields), "")


def _option_table(group: str) -> Iterator[str]:
    """Take the meaning of an option from the docstring of its record, or from the comment of its preset."""
    yield from ("| option | meaning |", "|---|---|")
    records = {record.tag: record.cls for found in settings() if found.group == group for record in found.records}
    for option in groups()[group]:
        is_generated = option in variants().get(group, ())
        meaning = _docstring(records[option]) if is_generated else _comment(f"{group}/{option}")
        yield f"| `{option}` | {_cell(meaning)} |"


def _docstring(record: type) -> str:
    """Return the first paragraph of a record's docstring."""
    return " ".join((record.__doc__ or "").partition("\n\n")[0].split())


def _comment(preset: str) -> str:
    lines = (PRESETS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comments)


def _key_table(members: list[Setting]) -> Iterator[str]:
    """Render one row per value, group, list, and optional record. A required record has its own section instead."""
    yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
    for setting in members:
        if not isinstance(setting.field.type, StructType):
            allowed, meaning = _cell(_allowed(setting)), _cell(setting.meaning)
            yield f"| `{setting.name}` | {_default(setting)} | {allowed} | {meaning} |"


def _default(setting: Setting) -> str:
    field = setting.field
    if field.required:
        return "required"
    value: Any = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    tag = value.__struct_config__.tag if isinstance(value, msgspec.Struct) else None
    return f"`{tag or json.dumps(msgspec.to_builtins(value))}`"


def _allowed(setting: Setting) -> str:
    if setting.tags:
        anchor = re.sub(r"[^\w-]", "", setting.name)
        return f"[{len(groups()[setting.group])} options](#{anchor})"
    return _describe(setting.field.type)


def _describe(expected: Type) -> str:
    match expected:
        case UnionType(types=types):
            return " or ".join(
                dict.fromkeys(
                    _describe(option) for option in sorted(types, key=lambda option: isinstance(option, NoneType))
                )
            )
        case LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case IntType() | FloatType():
            return _describe_number(expected)
        case ListType(item_type=item):
            return f"list of {_describe(item).replace(' or ', 's or ')}s"
        case TupleType(item_types=items):
            return f"list of {len(items)}: {_describe(items[0])}"
        case StrType(pattern=pattern):
            return f"text matching `{pattern}`" if pattern else "text"
        case BoolType():
            return "`true`, `false`"
        case NoneType():
            return "`null`"
        case DictType(value_type=value):
            return f"mapping of names to {_describe(value).rstrip('s')}s"
        case StructType():
            return "record"
    return "any value"


def _describe_number(expected: IntType | FloatType) -> str:
    """Describe the bounds of a number: `0 < number <= 1`."""
    name = "integer" if isinstance(expected, IntType) else "number"
    low = f"{expected.ge} ≤ " if expected.ge is not None else f"{expected.gt} < " if expected.gt is not None else ""
    high = f" ≤ {expected.le}" if expected.le is not None else f" < {expected.lt}" if expected.lt is not None else ""
    if low and not high:
        return f"{name} {'≥' if expected.ge is not None else '>'} {low.split()[0]}"
    return f"{low}{name}{high}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


ROOT = Path(__file__).resolve().parents[2]

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\n|\nDiffers:|\Z)", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Generated part of a page, between `<!-- begin NAME ... -->` and `<!-- end NAME -->`.

    Example: Block("docs/settings.md", "settings", list_settings).
    """

    page: str
    """Path of the Markdown file, relative to the checkout."""
    name: str
    """Name in the two marker comments; unique within the page."""
    render: Callable[[], str]
    """Returns the Markdown between the markers."""


def list_warnings() -> str:
    """Table of watched metrics: healthy range, meaning of a value outside it, remedy. Equal meanings share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key, healthy in RANGES.items():
        rows.setdefault(healthy.plain(), []).append(f"`{key}` {healthy}")
    table = (f"| {'<br>'.join(keys)} | {meaning} | {advice} |" for (meaning, advice), keys in rows.items())
    return "\n".join(["| metric and healthy range | outside of it | what to try |", "|---|---|---|", *table])


def _formula_table(records: Sequence[type[Formula]]) -> str:
    """Table of the available functions; + marks advantages with a baseline outside the group."""
    rows = [_row(record) for record in records if record.formula()]
    return "\n".join(["| option | meaning | function | source |", "|---|---|---|---|", *rows])


def _row(record: type[Formula]) -> str:
    meaning = " ".join((inspect.getdoc(record) or "").split())
    names = [name for name in (record.formula(), getattr(record, "selector", "")) if name]
    functions = ", ".join(f"`{name}`" for name in names)
    mark = " +" if getattr(record, "has_own_baseline", False) else ""
    return f"| `{record.__struct_config__.tag}`{mark} | {meaning} | {functions} | {_source(record.formula())} |"


def _source(name: str) -> str:
    """Return the `Source:` of a function's docstring, with arXiv numbers as links."""
    found = _SOURCE.search(inspect.getdoc(find(name)) or "")
    text = " ".join(found[1].split()).rstrip(".") if found else ""
    return _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", text).replace("|", r"\|")


BLOCKS = [
    Block("docs/settings.md", "settings", list_settings),
    Block("docs/algorithms.md", "advantages", lambda: _formula_table(get_args(AdvantageConfig))),
    Block("docs/algorithms.md", "policy losses", lambda: _formula_table(get_args(PolicyLossConfig))),
    Block("docs/algorithms.md", "masks", lambda: _formula_table(get_args(MaskConfig))),
    Block("docs/explain.md", "warnings", list_warnings),
]
FILES: dict[str, Callable[[], str]] = {"docs/monitoring/grafana.json": dashboard, "docs/monitoring/alerts.yaml": alerts}
"""Files that are generated entirely."""


def filled(text: str, block: Block) -> str:
    """Replace the block in `text`, the content of its page. Raises ValueError without exactly one pair of markers."""
    markers = re.compile(rf"(<!-- begin {block.name}\b[^\n]*-->\n).*?(<!-- end {block.name} -->)", re.DOTALL)
    if len(markers.findall(text)) != 1:
        raise ValueError(
            f"{block.page} must contain `<!-- begin {block.name} -->` ... `<!-- end {block.name} -->` exactly once"
        )
    return markers.sub(lambda found: f"{found[1]}{block.render()}\n{found[2]}", text)


def stale_pages(*, write: bool = False) -> list[str]:
    """List the pages and files that are out of date; with `write`, also update them."""
    pages = sorted({block.page for block in BLOCKS})
    stale = []
    for page in pages:
        path = ROOT / page
        text = new = path.read_text(encoding="utf-8")
        for block in BLOCKS:
            new = filled(new, block) if block.page == page else new
        if new != text:
            stale.append(page)
            if write:
                path.write_text(new, encoding="utf-8")
    return stale + _stale_files(write=write)


def _stale_files(*, write: bool) -> list[str]:
    stale = []
    for name, render in FILES.items():
        path, content = ROOT / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(content, encoding="utf-8")
    return stale


def main(arguments: list[str]) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m docs.tools.write_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    is_check = parser.parse_args(arguments).check
    stale = stale_pages(write=not is_check)
    print("\n".join(f"{page}: {'out of date' if is_check else 'written'}" for page in stale) or "up to date")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
