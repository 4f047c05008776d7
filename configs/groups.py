"""Groups of the command line (`group=option`): variants of the records, and YAML presets beside them.

A field whose type is a union of tagged records is a group, and each tag an option of it: `BufferConfig.store` becomes
`buffer/store=embedded | redis | memory`. The option holds the tag alone; defaults stay in the records.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from msgspec.inspect import StructType, Type, UnionType, type_info

from slipstream.configs.run import RunConfig

PRESETS = Path(__file__).resolve().parent / "presets"
"""Folder of the YAML presets; a sub-folder is a group."""


@cache
def groups() -> dict[str, list[str]]:
    """Group -> its options, generated and YAML, sorted. The first call registers the generated ones with Hydra."""
    options: dict[str, set[str]] = {}
    for group, tags in variants().items():
        options[group] = set(tags)
        for tag in tags:
            ConfigStore.instance().store(group=group, name=tag, node={"kind": tag}, provider="slipstream")
    for file in PRESETS.rglob("*/*.yaml"):
        options.setdefault(file.parent.relative_to(PRESETS).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


@cache
def variants() -> dict[str, tuple[str, ...]]:
    """Group -> tags of its records, for every union of tagged records in RunConfig."""
    return dict(_unions(type_info(RunConfig), ""))


def _unions(record: Type, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for field in record.fields if isinstance(record, StructType) else ():
        here = f"{path}/{field.encode_name}".lstrip("/")
        records = [variant for variant in alternatives(field.type) if isinstance(variant, StructType)]
        if tags := tuple(str(variant.tag) for variant in records if variant.tag is not None):
            yield here, tags
        for variant in records:
            yield from _unions(variant, here)


def alternatives(expected: Any) -> tuple[Type, ...]:
    """Members of a union; any other type alone."""
    return expected.types if isinstance(expected, UnionType) else (expected,)
