"""The tree of settings: every key of RunConfig with its field, its record and the variant it belongs to."""

import ast
import inspect
import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from msgspec.inspect import Field, ListType, StructType, Type, UnionType, type_info

from slipstream.configs.run import RunConfig


class Setting(NamedTuple):
    """One key of the tree; a record and a group of variants are keys too.

    Example: Setting(key="learner.engine.zero_stage", field=..., record=DeepSpeedEngineConfig,
    variant="learner/engine=deepspeed")
    """

    key: str
    """Dotted; an entry of a list is written `prepare[]`."""
    field: Field
    record: type
    """Record that declares the field."""
    variant: str
    """`group=option` whose record it is; empty outside groups."""

    @property
    def meaning(self) -> str:
        """Docstring of the field as one paragraph; empty where it has none."""
        return field_docstrings(self.record).get(self.field.name, "")

    @property
    def records(self) -> list[StructType]:
        """Records the field may hold, those in a list included; empty for a plain value."""
        return [found for found in _alternatives(self.field.type) if isinstance(found, StructType)]

    @property
    def tags(self) -> tuple[str, ...]:
        """Options of the group that the field is; empty for any other field."""
        in_list = isinstance(self.field.type, ListType)
        return () if in_list else tuple(str(found.tag) for found in self.records if found.tag is not None)


@cache
def settings() -> tuple[Setting, ...]:
    """Every key of every variant, in the order of the records; a key that several variants have comes once for each."""
    root = type_info(RunConfig)
    assert isinstance(root, StructType)
    return tuple(_walk(root, prefix="", variant=""))


def _walk(record: StructType, *, prefix: str, variant: str) -> Iterator[Setting]:
    for field in record.fields:
        setting = Setting(prefix + field.encode_name, field, record.cls, variant)
        yield setting
        inner = f"{setting.key}[]." if isinstance(field.type, ListType) else f"{setting.key}."
        for found in setting.records:
            option = f"{setting.key.replace('.', '/')}={found.tag}" if found.tag is not None else variant
            yield from _walk(found, prefix=inner, variant=option)


def _alternatives(expected: Type) -> tuple[Type, ...]:
    """Members of a union, of a list's entries too; any other type alone."""
    if isinstance(expected, ListType):
        return _alternatives(expected.item_type)
    return expected.types if isinstance(expected, UnionType) else (expected,)


@cache
def variants() -> dict[str, tuple[str, ...]]:
    """Group -> tags of its records, for every field that holds one of several tagged records."""
    return {setting.key.replace(".", "/"): setting.tags for setting in settings() if setting.tags}


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """Field -> the string literal below it in the source, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed([base for base in record.__mro__ if base.__module__.startswith("slipstream.")]):
        (declared,) = ast.parse(inspect.getsource(base)).body
        body = declared.body if isinstance(declared, ast.ClassDef) else []
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    found[name] = " ".join(text.split())
    return found
