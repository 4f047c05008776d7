"""Lua scripts of the Redis store: one file per operation, each run behind the shared `prelude.lua`."""

import re
from functools import cache
from importlib import resources


@cache
def load_script(name: str) -> str:
    """Return the text of `<name>.lua` after the prelude, as the server runs it.

    Comment lines are blanked, not removed: the server appends the text to its log and sends it to replicas, and line
    numbers in its error messages stay those of the files put together.
    """
    folder = resources.files(__name__)
    text = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
    return re.sub(r"^ *--.*", "", text, flags=re.MULTILINE)
