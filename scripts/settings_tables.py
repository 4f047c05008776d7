"""Tables of all settings for docs/settings.md, generated from the records and the presets."""

import json
import re
from collections.abc import Iterator
from typing import Any

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

from slipstream.configs.schema import PRESETS, Setting, groups, settings, variants


def list_settings() -> str:
    """One section per record and per group of variants: options, then keys with default, allowed values and meaning."""
    top_level = [setting for setting in settings() if "." not in setting.key]
    sections = [["## The run", "", *_key_table(top_level)]]
    sections += [[f"## `{group}`", "", *_option_table(group)] for group in ("experiment", "recipe")]
    sections += [[*_section(setting)] for setting in settings() if setting.records]
    # Several variants may hold the same records under the same key.
    return "\n\n".join(dict.fromkeys("\n".join(section).strip() for section in sections))


def _section(setting: Setting) -> Iterator[str]:
    """Heading, meaning, options and keys of a field that holds a record, one of several, or a list of them."""
    is_choice = len(setting.records) > 1
    yield from (f"{'###' if '.' in setting.key else '##'} `{setting.name}`", "")
    yield from (setting.meaning if is_choice else _docstring(setting.records[0].cls), "")
    if setting.group in groups():
        yield from (*_option_table(setting.group), "")
    for record in setting.records:
        below = {found.key: found for found in settings() if found.record is record.cls}.values()
        fields = [found for found in below if found.key.rpartition(".")[0].removesuffix("[]") == setting.key]
        if fields and is_choice:
            yield from (f"`{setting.name}={record.tag}`:" if setting.tags else f"`kind: {record.tag}`:", "")
        yield from ([*_key_table(fields), ""] if fields else [])


def _option_table(group: str) -> Iterator[str]:
    """The meaning of a generated option is the docstring of its record, that of a preset its comment."""
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
    """A row for each value, group, list and optional record; a record that is always there has a section instead."""
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
    """`0 < number <= 1`."""
    name = "integer" if isinstance(expected, IntType) else "number"
    low = f"{expected.ge} ≤ " if expected.ge is not None else f"{expected.gt} < " if expected.gt is not None else ""
    high = f" ≤ {expected.le}" if expected.le is not None else f" < {expected.lt}" if expected.lt is not None else ""
    if low and not high:
        return f"{name} {'≥' if expected.ge is not None else '>'} {low.split()[0]}"
    return f"{low}{name}{high}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
