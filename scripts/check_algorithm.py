"""Checks a function to train with: `slipstream check KIND module:function [name=value …]`.

Kinds: `advantage` and `policy_loss`, see docs/algorithms.md. Runs the checks that the built-in functions pass; a
property that some sound methods lack is shown as a note. Exit codes: 0 when every required property holds, 1 when one
does not, 2 for a function that cannot be loaded.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from rich.table import Table
from torch import Tensor

from slipstream.configs.advantages import CustomAdvantageConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.policy_losses import CustomPolicyLossConfig
from slipstream.learner.algorithms.inputs import AdvantageInputs, LossInputs
from slipstream.learner.objective.formulas import load_formula
from slipstream.runtime.console import make_console

_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Finding:
    """One property. Example: Finding("finite", holds=True, is_required=True)."""

    name: str
    """Name of the property, as shown."""
    holds: bool
    """Whether the function has it."""
    is_required: bool
    """Whether training needs the property."""


def print_findings(kind: str, path: str, words: list[str]) -> None:
    """Check a function with arguments as words `name=value`, and print the findings.

    Raises ConfigError; SystemExit with code 1 when a required property does not hold.
    """
    arguments = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    findings = check(kind, path, arguments)
    _show(findings, title=f"{kind} {path}")
    if any(finding.is_required and not finding.holds for finding in findings):
        raise SystemExit(1)


def check(kind: str, path: str, arguments: dict[str, Any]) -> list[Finding]:
    """Properties of the function at `module:function`. Raises ConfigError."""
    if kind == "advantage":
        return _check_advantage(load_formula(CustomAdvantageConfig(path, arguments), setting="algorithm.advantage"))
    return _check_loss(load_formula(CustomPolicyLossConfig(path, arguments), setting="algorithm.policy_loss"))


def _advantage_inputs(rewards: Tensor, groups: Tensor) -> AdvantageInputs:
    """Trajectories of two tokens each."""
    count = len(rewards)
    sequences, positions = torch.arange(count).repeat_interleave(2), torch.arange(2).repeat(count)
    lengths = torch.full((count,), 2)
    return AdvantageInputs(
        rewards=rewards,
        groups=groups,
        lengths=lengths,
        num_trained=lengths,
        is_correct=rewards > 0.5,
        greedy_rewards=torch.full_like(rewards, 0.5),
        parts={"total": rewards},
        sources=["check"] * count,
        sequences=sequences,
        turns=torch.zeros_like(sequences),
        positions=positions,
        positions_in_turn=positions,
        token_rewards=torch.where(positions == 1, rewards[sequences], 0.0),
        generator_logprobs=torch.full((2 * count,), -1.0),
        learner_logprobs=torch.full((2 * count,), -1.1),
    )


def _check_advantage(function: Callable[[AdvantageInputs], Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    rewards = torch.rand(9, dtype=torch.float64)

    def call(rewards: Tensor, groups: Tensor) -> Tensor:
        return function(_advantage_inputs(rewards, groups))

    found = call(rewards, groups)
    _require_tensor(found, setting="algorithm.advantage")
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


def _check_loss(function: Callable[[LossInputs], Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    sequences = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    advantages = torch.randn(3)[sequences]
    inputs = LossInputs(0.5 * torch.randn(9), advantages, -torch.rand(9), sequences, num_sequences=3)
    losses, gradient = _differentiated(function, inputs)
    parts = [function(inputs.take(sequences == number)) for number in range(3)]
    _, at_one = _differentiated(function, inputs.with_log_ratio(torch.zeros(9)))
    _, far = _differentiated(function, inputs.with_log_ratio(torch.tensor([20.0, -20.0, 0.0] * 3)))
    _, without = _differentiated(function, dataclasses.replace(inputs, advantages=torch.zeros(9)))
    return [
        Finding("one number per token", _is_shaped(losses, advantages), True),
        Finding("finite", bool(losses.isfinite().all()), True),
        Finding("finite gradient", bool(gradient.isfinite().all()), True),
        Finding("finite gradient at log-ratios of +-20", bool(far.isfinite().all()), True),
        Finding("trajectories do not see each other", _close(torch.cat(parts), losses), True),
        Finding("the gradient at ratio 1 is that of REINFORCE", _close(at_one, -advantages), False),
        Finding("without an advantage there is no gradient", bool((without == 0).all()), False),
    ]


def _differentiated(function: Callable[[LossInputs], Tensor], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum by the log-ratio."""
    leaf = inputs.log_ratio.clone().requires_grad_()
    losses = function(inputs.with_log_ratio(leaf))
    _require_tensor(losses, setting="algorithm.policy_loss")
    if not losses.requires_grad:
        raise ConfigError("algorithm.policy_loss must depend on log_ratio, got losses without a gradient.")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def _require_tensor(found: Any, *, setting: str) -> None:
    """Raise ConfigError for a result on which no property can be checked."""
    if not isinstance(found, Tensor):
        raise ConfigError(f"{setting} must return a tensor, got {type(found).__name__}.")


def _is_shaped(found: Tensor, like: Tensor) -> bool:
    return found.shape == like.shape


def _close(first: Tensor, second: Tensor) -> bool:
    return bool(torch.allclose(first.double(), second.double(), atol=_TOLERANCE))


def _is_monotone(found: Tensor, rewards: Tensor, groups: Tensor) -> bool:
    each = (groups == group for group in groups.unique())
    return all(bool((found[own][rewards[own].argsort()].diff() >= -_TOLERANCE).all()) for own in each)


def _show(findings: list[Finding], *, title: str) -> None:
    table = Table("property", "", title=title)
    words = {(True, True): "yes", (True, False): "yes", (False, True): "NO", (False, False): "no (a note)"}
    for finding in findings:
        table.add_row(finding.name, words[finding.holds, finding.is_required])
    make_console().print(table)
