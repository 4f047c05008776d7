"""Check a custom training function: `slipstream check KIND module:function [name=value …]`.

Kinds: `advantage` and `policy_loss` (docs/algorithms.md). Properties that sound methods may lack are notes. Exit
codes: 0 if every required property holds, 1 if one does not, 2 if the function cannot be loaded or called.
"""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import yaml
from rich.table import Table
from torch import Tensor

from slipstream.configs.algorithm_terms import CustomAdvantageConfig, CustomPolicyLossConfig
from slipstream.configs.base import ConfigError
from slipstream.learner.algorithms.inputs import AdvantageInputs, LossInputs
from slipstream.learner.training.objective import load_formula
from slipstream.runtime.command_line import make_console

_TOLERANCE = 1e-5


class Finding(NamedTuple):
    """A property of the function."""

    name: str
    holds: bool
    is_required: bool


def print_findings(kind: str, path: str, words: list[str]) -> None:
    """Print a function's findings; exit with code 1 if a required property does not hold. Raises ConfigError."""
    try:
        arguments = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    except yaml.YAMLError:
        raise ConfigError(f"arguments must be NAME=VALUE with values in YAML, got {' '.join(words)}.") from None
    findings = check(kind, path, arguments)
    table = Table("property", "", title=f"{kind} {path}")
    for name, holds, is_required in findings:
        table.add_row(name, "yes" if holds else "NO" if is_required else "no (a note)")
    make_console().print(table)
    if any(finding.is_required and not finding.holds for finding in findings):
        raise SystemExit(1)


def check(kind: str, path: str, arguments: dict[str, Any]) -> list[Finding]:
    """Properties of the function at `module:function`. Raises ConfigError."""
    if kind == "advantage":
        return _check_advantage(load_formula(CustomAdvantageConfig(path, arguments), setting="algorithm.advantage"))
    return _check_loss(load_formula(CustomPolicyLossConfig(path, arguments), setting="algorithm.policy_loss"))


def _advantage_inputs(rewards: Tensor, groups: Tensor) -> AdvantageInputs:
    """Two tokens per trajectory."""
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

    found = _computed(lambda: call(rewards, groups), setting="algorithm.advantage")
    if found.shape != rewards.shape:
        return [Finding("one number per trajectory", False, True)]
    order = torch.randperm(9)
    shuffled = call(rewards[order], groups[order])
    others = torch.where(groups == 2, rewards + 5, rewards)
    each = (groups == group for group in groups.unique())
    is_monotone = all(bool((found[own][rewards[own].argsort()].diff() >= -_TOLERANCE).all()) for own in each)
    return [
        Finding("one number per trajectory", True, True),
        Finding("finite", bool(found.isfinite().all()), True),
        Finding("any order of trajectories gives the same", _close(shuffled, found[order]), True),
        Finding("a larger reward in a group has no smaller advantage", is_monotone, False),
        Finding("equal rewards give exactly 0", bool((call(torch.full_like(rewards, 0.3), groups) == 0).all()), False),
        Finding("groups do not see each other", _close(call(others, groups)[:7], found[:7]), False),
    ]


def _check_loss(function: Callable[[LossInputs], Tensor]) -> list[Finding]:
    torch.manual_seed(0)
    sequences = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    advantages = torch.randn(3)[sequences]
    inputs = LossInputs(0.5 * torch.randn(9), advantages, -torch.rand(9), sequences, num_sequences=3)
    if _computed(lambda: function(inputs), setting="algorithm.policy_loss").shape != advantages.shape:
        return [Finding("one number per token", False, True)]
    losses, gradient = _differentiated(function, inputs)
    parts = [function(inputs.take(sequences == number)) for number in range(3)]
    _, at_one = _differentiated(function, dataclasses.replace(inputs, log_ratio=torch.zeros(9)))
    _, far = _differentiated(function, dataclasses.replace(inputs, log_ratio=torch.tensor([20.0, -20.0, 0.0] * 3)))
    _, without = _differentiated(function, dataclasses.replace(inputs, advantages=torch.zeros(9)))
    return [
        Finding("one number per token", True, True),
        Finding("finite", bool(losses.isfinite().all()), True),
        Finding("finite gradient", bool(gradient.isfinite().all()), True),
        Finding("finite gradient at log-ratios of +-20", bool(far.isfinite().all()), True),
        Finding("trajectories do not see each other", _close(torch.cat(parts), losses), True),
        Finding("the gradient at ratio 1 is that of REINFORCE", _close(at_one, -advantages), False),
        Finding("without an advantage there is no gradient", bool((without == 0).all()), False),
    ]


def _differentiated(function: Callable[[LossInputs], Tensor], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    leaf = inputs.log_ratio.clone().requires_grad_()
    losses = function(dataclasses.replace(inputs, log_ratio=leaf))
    if not losses.requires_grad:
        raise ConfigError("algorithm.policy_loss must depend on log_ratio, got losses without a gradient.")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def _computed(call: Callable[[], Any], *, setting: str) -> Tensor:
    try:
        found = call()
    # User code may raise anything.
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{type(error).__name__} at {place.filename}:{place.lineno}"
        raise ConfigError(f"{setting} must not raise, got {got}: {error}.") from error
    if not isinstance(found, Tensor):
        raise ConfigError(f"{setting} must return a tensor, got {type(found).__name__}.")
    return found


def _close(first: Tensor, second: Tensor) -> bool:
    return bool(torch.allclose(first.double(), second.double(), atol=_TOLERANCE))
