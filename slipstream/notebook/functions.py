"""Functions of a notebook as the settings name them: roles are processes of their own, and import them from a file."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.configs.base import ConfigError

Function = str | Callable[..., Any]
"""`module:function`, `FILE.py:function`, or the function itself."""


def path_of(function: Function, *, folder: Path) -> str:
    """Return the path by which a role finds a function.

    A function of the notebook or script itself is written into `folder`, from its source alone: it must import what it
    needs in its body. Raises ConfigError for one without a source or a name.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"a function must be defined by `def` at the top level of a cell or module, got {function!r}."
        )
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(
            f"the source of {name} must be known to hand it to the roles, but Python has none: put it into a file, and "
            f"name it as FILE.py:{name}."
        ) from None
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = folder / f"{name}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""{name}, as a notebook defined it."""\n\n{source}', encoding="utf-8")
    return f"{path.resolve()}:{name}"
