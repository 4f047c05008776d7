"""Plain data -> typed records, every fault told as `dotted.key: what must hold, what was got`."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import ListType, LiteralType, NoneType, StructType, UnionType, type_info

from slipstream.configs.base import Config, ConfigError

C = TypeVar("C", bound=Config)


def convert(data: object, record: type[C]) -> C:
    """Check `data` against `record` and build it. Types are strict, but an integer may stand for a float.

    Raises ConfigError with one sentence per unknown key, missing key or unknown choice, or the first wrong value.
    """
    faults = list(_faults(type_info(record), data, ""))
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        return msgspec.convert(data, record)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(error, data)) from None


def nearest(word: str, names: list[str]) -> str:
    """`, did you mean ...?` for the name most like `word`, else the names there are."""
    close = get_close_matches(word, names, n=1)
    if close:
        return f", did you mean `{close[0]}`?"
    return f"; there are: {', '.join(sorted(set(names)))}." if names else "; there are none."


def _faults(expected: Any, value: object, path: str) -> Iterator[str]:
    """What msgspec would refuse without naming the alternatives."""
    if isinstance(expected, UnionType) and isinstance(value, dict):
        yield from _variant_faults(expected, value, path)
    elif isinstance(expected, StructType) and isinstance(value, dict):
        yield from _record_faults(expected, value, path)
    elif isinstance(expected, ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(expected.item_type, item, f"{path}[{index}]")
    elif isinstance(expected, LiteralType) and value not in expected.values:
        options = ", ".join(str(option) for option in expected.values)
        yield f"{path}: must be one of {options}, got {value!r}."


def _variant_faults(expected: UnionType, value: dict[str, Any], path: str) -> Iterator[str]:
    variants = [option for option in expected.types if not isinstance(option, NoneType)]
    kinds = {variant.tag: variant for variant in variants if isinstance(variant, StructType)}
    if None in kinds:
        yield from _faults(kinds[None], value, path)
    elif value.get("kind") in kinds:
        yield from _record_faults(kinds[value["kind"]], value, path)
    else:
        yield f"{path}.kind: must be one of {', '.join(map(str, kinds))}, got {value.get('kind', 'nothing')!r}."


def _record_faults(expected: StructType, value: dict[str, Any], path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in expected.fields}
    for key, item in value.items():
        here = f"{path}.{key}".lstrip(".")
        if key in fields:
            yield from _faults(fields[key].type, item, here)
        elif key != expected.tag_field:
            yield f"{_first_leaf(here, item)}: unknown key `{key}`{nearest(str(key), list(fields))}"
    for name in fields.keys() - value.keys():
        if fields[name].required:
            yield f"{path}.{name}".lstrip(".") + ": must be set, got nothing."


def _first_leaf(path: str, value: object) -> str:
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def _sentence(error: msgspec.ValidationError, data: object) -> str:
    """msgspec's message, turned round: where first, then what must hold, then what was got."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    message, _, place = str(error).partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    rule = (
        re.sub(r", got .*$", "", message).replace("`object`", "a record").replace("`object | null`", "a record or null")
    )
    got = _lookup(data, path)
    advice = f" Quote it: \"{path}='{got}'\"." if rule == "Expected `str`" and isinstance(got, int | float) else ""
    return f"{path or 'the config'}: {rule[0].lower()}{rule[1:]}, got {got!r}.{advice}"


def _lookup(data: Any, path: str) -> object:
    for step in re.findall(r"[^.\[\]]+", path):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data
