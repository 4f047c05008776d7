import pytest
import torch

from slipstream.configs.base import ConfigError
from slipstream.scripts.check_algorithm import check, print_findings

OWN = "tests.unit.learner.own_algorithm"


@pytest.mark.parametrize("kind", ["advantage", "policy_loss"])
def test_a_function_that_returns_no_tensor_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{kind} must return a tensor, got str"):
        check(kind, "builtins:repr", {})


def blind(inputs):
    """Forgets the ratio."""
    return inputs.advantages * 1.0


def leaking(inputs):
    """Every trajectory sees the others."""
    return -inputs.advantages * inputs.log_ratio * inputs.log_ratio.exp().mean()


def shuffled(inputs):
    """Depends on the order."""
    return inputs.rewards * torch.arange(len(inputs.rewards))


def averaged(inputs):
    """One number for all, as other trainers have it."""
    return (inputs.rewards if hasattr(inputs, "rewards") else inputs.log_ratio * inputs.advantages).mean()


def broken(inputs):
    return inputs.nosuch


def missing(findings) -> set[str]:
    return {finding.name for finding in findings if finding.is_required and not finding.holds}


def test_a_sound_loss_passes():
    findings = check("policy_loss", f"{OWN}:squashed", {"sharpness": 2.0})
    assert not missing(findings)
    assert all(finding.holds for finding in findings)


def test_a_sound_advantage_passes_and_its_own_baseline_is_a_note():
    findings = check("advantage", f"{OWN}:centered", {})
    assert not missing(findings)
    assert {finding.name for finding in findings if not finding.holds} >= {"groups do not see each other"}


@pytest.mark.parametrize(
    ("kind", "name", "property_"),
    [
        ("policy_loss", "leaking", "trajectories do not see each other"),
        ("advantage", "shuffled", "any order of trajectories gives the same"),
        ("policy_loss", "averaged", "one number per token"),
        ("advantage", "averaged", "one number per trajectory"),
    ],
)
def test_what_would_train_wrongly_is_named(kind, name, property_):
    assert property_ in missing(check(kind, f"{__name__}:{name}", {}))
    with pytest.raises(SystemExit, match="1"):
        print_findings(kind, f"{__name__}:{name}", [])


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(ConfigError, match="must depend on log_ratio"):
        check("policy_loss", f"{__name__}:blind", {})


def test_arguments_must_fit():
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.arguments must fit"):
        check("policy_loss", f"{OWN}:squashed", {"blunt": 1})


@pytest.mark.parametrize("kind", ["advantage", "policy_loss"])
def test_a_function_that_raises_is_refused_with_the_place(kind):
    with pytest.raises(ConfigError, match=rf"algorithm\.{kind} must not raise, got AttributeError at .*\.py:\d+: "):
        check(kind, f"{__name__}:broken", {})
    with pytest.raises(ConfigError, match=r"must be NAME=VALUE with values in YAML, got a=\["):
        print_findings(kind, f"{__name__}:broken", ["a=["])
