"""Lua scripts of the Redis store: one file per operation, each run behind the shared `prelude.lua`."""

from functools import cache
from importlib import resources


@cache
def load_script(name: str) -> str:
    """Return the text of `<name>.lua` after the prelude, as the server runs it."""
    folder = resources.files(__name__)
    return "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
