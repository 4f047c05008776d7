"""Formulas: from a config record to the function it names, with the record's settings bound."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from slipstream.configs.advantages import CustomAdvantageConfig
from slipstream.configs.base import Formula
from slipstream.configs.policy_losses import CustomPolicyLossConfig
from slipstream.runtime.import_path import load_function


def load_formula(record: Formula, *, setting: str) -> Callable[[Any], Any]:
    """The function that a record chooses, called with its input record alone.

    `setting` is the record's key in the config. Raises ConfigError for a user's function that cannot be loaded.
    """
    if isinstance(record, CustomAdvantageConfig | CustomPolicyLossConfig):
        function = load_function(record.function, setting=setting, num_values=1, arguments=record.arguments)
        return partial(function, **record.arguments)
    return bind(record.formula(), record)


def bind(name: str, record: Formula) -> Callable[[Any], Any]:
    """The function `name` (`module.function` of learner/algorithms) with the fields of the record that it takes."""
    function = find(name)
    # By signature: a record with a selector holds the settings of two functions, and each takes its own.
    taken = inspect.signature(function).parameters
    return partial(function, **{field: getattr(record, field) for field in record.__struct_fields__ if field in taken})


def find(name: str) -> Callable[..., Any]:
    """The function `module.function` of learner/algorithms."""
    module, _, attribute = name.partition(".")
    function: Callable[..., Any] = getattr(import_module(f"slipstream.learner.algorithms.{module}"), attribute)
    return function
