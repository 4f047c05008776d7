"""Plain data to typed records; an error reads `key must …, got …`."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import ListType, LiteralType, NoneType, StructType, UnionType, type_info

from slipstream.configs.base import Config, ConfigError
from slipstream.configs.schema import unknown_key

C = TypeVar("C", bound=Config)
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a record",
    "null": "null",
}


def convert(data: object, record: type[C]) -> C:
    """Build `record` from `data`. Types are strict, but an integer may stand for a float.

    Raises ConfigError with one sentence for each unknown key, missing key and unknown choice, else for the first wrong
    value.
    """
    if errors := list(_errors(type_info(record), data, "")):
        raise ConfigError("\n".join(errors))
    try:
        return msgspec.convert(data, record)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(error, data)) from None


def _errors(expected: Any, value: object, path: str) -> Iterator[str]:
    """Errors for which msgspec would name no alternatives."""
    if isinstance(expected, UnionType) and isinstance(value, dict):
        yield from _variant_errors(expected, value, path)
    elif isinstance(expected, StructType) and isinstance(value, dict):
        yield from _record_errors(expected, value, path)
    elif isinstance(expected, UnionType) and isinstance(value, list):
        for option in expected.types:
            if isinstance(option, ListType):
                yield from _errors(option, value, path)
    elif isinstance(expected, ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _errors(expected.item_type, item, f"{path}[{index}]")
    elif isinstance(expected, LiteralType) and value not in expected.values:
        yield f"{path} must be one of {', '.join(map(str, expected.values))}, got {value!r}."


def _variant_errors(expected: UnionType, value: dict[str, Any], path: str) -> Iterator[str]:
    variants = [option for option in expected.types if not isinstance(option, NoneType)]
    kinds = {variant.tag: variant for variant in variants if isinstance(variant, StructType)}
    if None in kinds:
        yield from _errors(kinds[None], value, path)
    elif value.get("kind") in kinds:
        yield from _record_errors(kinds[value["kind"]], value, path)
    else:
        yield f"{path}.kind must be one of {', '.join(map(str, kinds))}, got {value.get('kind', 'nothing')!r}."


def _record_errors(expected: StructType, value: dict[str, Any], path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in expected.fields}
    for key, item in value.items():
        here = f"{path}.{key}".lstrip(".")
        if key in fields:
            yield from _errors(fields[key].type, item, here)
        elif key != expected.tag_field:
            yield unknown_key(_first_leaf(here, item))
    for name, field in fields.items():
        if field.required and name not in value:
            yield f"{path}.{name}".lstrip(".") + " must be set, got nothing."


def _first_leaf(path: str, value: object) -> str:
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def _sentence(error: msgspec.ValidationError, data: object) -> str:
    """msgspec's message (`Expected `int` >= 1, got `str` - at `$.a.b``) as `a.b must be an integer >= 1, got 'x'.`."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    message, _, place = str(error).partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    rule = re.sub(r", got .*$", "", message).removeprefix("Expected ")
    expected = re.sub(r"`([^`]*)`", lambda types: _describe(types[1]), rule, count=1)
    got = _lookup(data, path)
    advice = (
        f" Quote it: \"{path}='{got}'\"." if expected.startswith("a string") and isinstance(got, int | float) else ""
    )
    return f"{path or 'the config'} must be {expected}, got {got!r}.{advice}"


def _describe(types: str) -> str:
    return " or ".join(_TYPE_NAMES.get(name, name) for name in types.split(" | "))


def _lookup(data: Any, path: str) -> object:
    for step in re.findall(r"[^.\[\]]+", path):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data
