"""Formulas as pure functions of tensors.

Shapes: B sequences, T tokens, G group members, N tokens of a packed row, V vocabulary.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def find(name: str) -> Callable[..., Any]:
    """Function `module.function` of this package."""
    module, _, attribute = name.partition(".")
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return function
