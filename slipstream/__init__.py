"""Asynchronous, decoupled actor-learner reinforcement learning for language models.

The names below are for scripts and notebooks (docs/notebook.md). Each is imported on first use.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_DOOR = {
    "Run": "slipstream.notebook",
    "Trainer": "slipstream.notebook",
    "load_run": "slipstream.notebook",
    "open_catalog": "slipstream.observe.catalog.catalog",
    "run": "slipstream.notebook",
}
__all__ = ["Run", "Trainer", "load_run", "open_catalog", "run"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("slipstream")
        except PackageNotFoundError:
            # A checkout on the path, without an installation.
            return "0+unknown"
    if name not in _DOOR:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_DOOR[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
