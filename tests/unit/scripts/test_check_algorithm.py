import pytest
import torch

from slipstream.configs.base import ConfigError
from slipstream.scripts.check_algorithm import check, print_findings
from tests.cases import cases

OWN = "tests.unit.learner.own_algorithm"
RAISES = r"must not raise, got AttributeError at .*\.py:\d+: "


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


@cases(
    "kind, name, property_",
    ("policy_loss", "leaking", "trajectories do not see each other"),
    ("advantage", "shuffled", "any order of trajectories gives the same"),
    ("policy_loss", "averaged", "one number per token"),
    ("advantage", "averaged", "one number per trajectory"),
)
def test_what_would_train_wrongly_is_named(kind, name, property_):
    assert property_ in missing(check(kind, f"{__name__}:{name}", {}))
    with pytest.raises(SystemExit, match="1"):
        print_findings(kind, f"{__name__}:{name}", [])


def test_a_sound_algorithm_passes_and_a_baseline_of_its_own_is_a_note():
    assert all(finding.holds for finding in check("policy_loss", f"{OWN}:squashed", {"sharpness": 2.0}))
    findings = check("advantage", f"{OWN}:centered", {})
    assert not missing(findings)
    assert {finding.name for finding in findings if not finding.holds} >= {"groups do not see each other"}


@cases(
    "kind, function, arguments, words",
    ("advantage", "builtins:repr", {}, r"algorithm\.advantage must return a tensor, got str"),
    ("policy_loss", "builtins:repr", {}, r"algorithm\.policy_loss must return a tensor, got str"),
    ("policy_loss", f"{__name__}:blind", {}, "must depend on log_ratio"),
    ("policy_loss", f"{OWN}:squashed", {"blunt": 1}, r"algorithm\.policy_loss\.arguments must fit"),
    ("advantage", f"{__name__}:broken", {}, rf"algorithm\.advantage {RAISES}"),
    ("policy_loss", f"{__name__}:broken", {}, rf"algorithm\.policy_loss {RAISES}"),
)
def test_a_function_that_cannot_be_used_is_refused_with_the_reason(kind, function, arguments, words):
    with pytest.raises(ConfigError, match=words):
        check(kind, function, arguments)
    with pytest.raises(ConfigError, match=r"must be NAME=VALUE with values in YAML, got a=\["):
        print_findings(kind, function, ["a=["])
