"""The Lua scripts as text: documented, loaded, and each run by the store."""

import re
from importlib import resources
from pathlib import Path

import pytest

import slipstream.buffer.redis
from slipstream.buffer.redis.scripts import load_script

FOLDER = resources.files("slipstream.buffer.redis.scripts")
SOURCES = {Path(file.name).stem: file.read_text() for file in FOLDER.iterdir() if file.name.endswith(".lua")}
PRELUDE = SOURCES.pop("prelude")


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_script_documents_keys_arguments_result_and_why_it_is_atomic(name):
    header = SOURCES[name][: SOURCES[name].index("\nif " if name != "open_run" else "\nallow_when_full()")]
    assert all(line.startswith("-- ") for line in header.splitlines())
    for label in ("Keys: ", "Arguments: ", "Returns: ", "Atomic because "):
        assert f"\n-- {label}" in header, label


def test_the_store_runs_every_script_and_every_key_is_documented_in_the_prelude():
    modules = Path(slipstream.buffer.redis.__path__[0]).glob("*.py")
    calls = re.compile(r"_run(?:_as_chief)?\(\s*\"(\w+)\"")
    assert {name for module in modules for name in calls.findall(module.read_text())} == set(SOURCES)
    documented = set(re.findall(r"[a-z_]+", PRELUDE[: PRELUDE.index("local prefix")]))
    used = {name for text in [PRELUDE, *SOURCES.values()] for name in re.findall(r"key\('([a-z_]+)", text)}
    assert used <= documented


def test_a_script_is_loaded_behind_the_prelude_without_comments_and_line_by_line():
    written, loaded = (PRELUDE + SOURCES["claim"]).splitlines(), load_script("claim").splitlines()
    assert len(loaded) == len(written)
    assert all(line in (text, "") for line, text in zip(loaded, written, strict=True))
    assert [line for line in loaded if line] == [
        text for text in written if text and not text.lstrip().startswith("--")
    ]
