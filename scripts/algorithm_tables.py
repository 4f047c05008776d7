"""Tables of advantages, policy losses and token masks for docs/algorithms.md, from the records and their functions."""

import inspect
import re
from collections.abc import Sequence
from typing import Any, get_args

from slipstream.configs.advantages import AdvantageConfig
from slipstream.configs.base import Formula
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig
from slipstream.learner.objective.formulas import find

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
_SOURCE = re.compile(r"^Source: (.*?)(?=\n\n|\nDiffers:|\Z)", re.DOTALL | re.MULTILINE)


def list_advantages() -> str:
    """Table of the options of `algorithm/advantage`; + marks those whose baseline lies outside the group."""
    return _table(get_args(AdvantageConfig), mark=lambda record: " +" if record.has_own_baseline else "")


def list_policy_losses() -> str:
    """Table of the options of `algorithm/policy_loss`."""
    return _table(get_args(PolicyLossConfig))


def list_masks() -> str:
    """Table of the kinds of `algorithm.masks`."""
    return _table(get_args(MaskConfig))


def _table(records: Sequence[type[Formula]], *, mark: Any = lambda record: "") -> str:
    rows = [_row(record, mark(record)) for record in records if record.formula]
    return "\n".join(["| option | meaning | function | source |", "|---|---|---|---|", *rows])


def _row(record: type[Formula], mark: str) -> str:
    meaning = " ".join((inspect.getdoc(record) or "").split())
    names = [name for name in (record.formula, getattr(record, "selector", "")) if name]
    functions = ", ".join(f"`{name}`" for name in names)
    return f"| `{record.__struct_config__.tag}`{mark} | {meaning} | {functions} | {_source(record.formula)} |"


def _source(name: str) -> str:
    """The `Source:` of a function's docstring, arXiv numbers as links."""
    found = _SOURCE.search(inspect.getdoc(find(name)) or "")
    text = " ".join(found[1].split()).rstrip(".") if found else ""
    return _ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", text).replace("|", r"\|")
