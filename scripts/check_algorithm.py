"""`python -m slipstream.scripts.check_algorithm policy_loss my_module:my_loss [beta=0.1 ...]`: is it fit to train with?

Kinds: `advantage` and `policy_loss`, see docs/algorithms.md. Runs what the built-in ones are held to; a property that
some sound methods lack is shown as a note. Exit codes: 0 when all that must hold does, 1 when something does not, 2 for
a function that cannot be called so.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from rich.table import Table
from torch import Tensor

from slipstream.buffer.cli.show import make_console
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.import_path import load_function

_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Finding:
    """One property. Example: Finding("finite", holds=True, is_required=True)."""

    name: str
    """What was looked at."""
    holds: bool
    """Whether it is so."""
    is_required: bool
    """Whether training needs it."""


def main(arguments: list[str]) -> None:
    """Check and show. Raises ConfigError."""
    asked = _parse(arguments)
    settings = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in asked.argument)}
    findings = check(asked.kind, asked.function, settings)
    _show(findings, title=f"{asked.kind} {asked.function}")
    if any(finding.is_required and not finding.holds for finding in findings):
        raise SystemExit(1)


def check(kind: str, path: str, arguments: dict[str, Any]) -> list[Finding]:
    """What holds of the function at `module:function`. Raises ConfigError."""
    num_values = {"advantage": 2, "policy_loss": 3}[kind]
    function = load_function(path, setting=f"algorithm.{kind}", num_values=num_values, arguments=arguments)

    def call(*tensors: Tensor) -> Tensor:
        found: Tensor = function(*tensors, **arguments)
        return found

    return _check_advantage(call) if kind == "advantage" else _check_loss(call)


def _check_advantage(call: Callable[..., Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    rewards = torch.rand(9, dtype=torch.float64)
    found = call(rewards, groups)
    order = torch.randperm(9)
    others = torch.where(groups == 2, rewards + 5, rewards)
    return [
        Finding("one number per trajectory", _is_shaped(found, rewards), True),
        Finding("finite", bool(found.isfinite().all()), True),
        Finding(
            "any order of trajectories gives the same", _close(call(rewards[order], groups[order]), found[order]), True
        ),
        Finding("a larger reward in a group has no smaller advantage", _is_monotone(found, rewards, groups), False),
        Finding("equal rewards give exactly 0", bool((call(torch.full_like(rewards, 0.3), groups) == 0).all()), False),
        Finding("groups do not see each other", _close(call(others, groups)[:7], found[:7]), False),
    ]


def _check_loss(call: Callable[..., Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    sequences = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    advantages = torch.randn(3)[sequences]
    log_ratio = 0.5 * torch.randn(9)
    losses, gradient = _differentiated(call, log_ratio, advantages, sequences)
    parts = [call(log_ratio[own], advantages[own], torch.zeros_like(sequences[own])) for own in _each(sequences)]
    _, at_one = _differentiated(call, torch.zeros(9), advantages, sequences)
    _, far = _differentiated(call, torch.tensor([20.0, -20.0, 0.0] * 3), advantages, sequences)
    return [
        Finding("one number per token", _is_shaped(losses, log_ratio), True),
        Finding("finite", bool(losses.isfinite().all()), True),
        Finding("finite gradient", bool(gradient.isfinite().all()), True),
        Finding("finite gradient at log-ratios of +-20", bool(far.isfinite().all()), True),
        Finding("trajectories do not see each other", _close(torch.cat(parts), losses), True),
        Finding("the gradient at ratio 1 is that of REINFORCE", _close(at_one, -advantages), False),
        Finding("without an advantage there is no gradient", _is_still(call, log_ratio, sequences), False),
    ]


def _differentiated(call: Callable[..., Tensor], log_ratio: Tensor, *beside: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum."""
    leaf = log_ratio.clone().requires_grad_()
    losses = call(leaf, *beside)
    if not losses.requires_grad:
        raise ConfigError("algorithm.policy_loss must depend on log_ratio, got losses without a gradient.")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def _is_still(call: Callable[..., Tensor], log_ratio: Tensor, sequences: Tensor) -> bool:
    _, gradient = _differentiated(call, log_ratio, torch.zeros_like(log_ratio), sequences)
    return bool((gradient == 0).all())


def _each(sequences: Tensor) -> list[Tensor]:
    return [sequences == number for number in sequences.unique()]


def _is_shaped(found: Any, like: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == like.shape


def _close(first: Tensor, second: Tensor) -> bool:
    return bool(torch.allclose(first.double(), second.double(), atol=_TOLERANCE))


def _is_monotone(found: Tensor, rewards: Tensor, groups: Tensor) -> bool:
    return all(bool((found[own][rewards[own].argsort()].diff() >= -_TOLERANCE).all()) for own in _each(groups))


def _show(findings: list[Finding], *, title: str) -> None:
    table = Table("property", "", title=title)
    words = {(True, True): "yes", (True, False): "yes", (False, True): "NO", (False, False): "no (a note)"}
    for finding in findings:
        table.add_row(finding.name, words[finding.holds, finding.is_required])
    make_console().print(table)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slipstream.scripts.check_algorithm")
    parser.add_argument("kind", choices=("advantage", "policy_loss"))
    parser.add_argument("function", help="module:function")
    parser.add_argument("argument", nargs="*", help="name=value, passed by keyword")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    import sys

    with fail_cleanly():
        main(sys.argv[1:])
