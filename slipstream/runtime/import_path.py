"""Import user functions named as `module:function` or `file.py:function`."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.configs.base import ConfigError


def load_function(path: str, *, setting: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Import a function of one positional argument and keyword `arguments`. Raises ConfigError.

    `setting`: key of the record that has both.
    """
    function = find_function(path, setting=f"{setting}.function")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"{setting}.arguments must fit {path!r}, got {arguments}: {error}.") from error
    return function


def find_function(path: str, *, setting: str) -> Callable[..., Any]:
    """Import the function or class at `path`, the value of `setting`. Raises ConfigError."""
    module_name, separator, name = path.rpartition(":")
    if not (module_name and separator and name):
        raise ConfigError(f"{setting} must look like `module:function`, got {path!r}.")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        must = f"{setting} must name a module that can be imported"
        raise ConfigError(f"{must}, got {path!r}: there is no module {error.name!r}.") from error
    # A script without `if __name__ == "__main__"` may end the process.
    except (Exception, SystemExit) as error:
        failure = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{setting}={path!r}: {failure}.") from error
    function = getattr(module, name, None)
    if function is None:
        nearest = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("_")], n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{setting}={path!r}: {module_name} has no {name!r}.{hint}")
    if not callable(function):
        raise ConfigError(f"{setting} must name a function, got {path!r}: it is a {type(function).__name__}.")
    found: Callable[..., Any] = function
    return found


def _import_file(file: Path) -> ModuleType:
    # The full path separates files of the same name, also from installed modules.
    name = f"slipstream_user.{file.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
