"""Lua scripts of the Redis store: one file per operation, each appended to the shared `prelude.lua`."""

import re
from functools import cache
from importlib import resources


@cache
def load_script(name: str) -> str:
    """Text of `<name>.lua` after the prelude, as the server runs it.

    Comments become empty lines, because the server logs and replicates the text; line numbers in errors match.
    """
    folder = resources.files(__name__)
    text = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
    return re.sub(r"^ *--.*", "", text, flags=re.MULTILINE)
