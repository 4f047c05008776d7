"""A run as a whole: its name, and its verdict."""

from pathlib import Path

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.run import start_sft, verdict, with_free_name


def test_a_default_name_in_use_gets_the_next_number(tmp_path: Path) -> None:
    overrides = [f"runs_dir={tmp_path}"]
    for name in ("digits_cpu", "digits_cpu-2"):
        run, arguments = with_free_name(load(overrides), overrides)
        assert (run.name, arguments[-1]) == (name, f"name={name}")
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("chosen", ["name=digits_cpu", "resume=true"])
def test_a_chosen_or_resumed_name_stays(tmp_path: Path, chosen: str) -> None:
    overrides = [f"runs_dir={tmp_path}", chosen]
    (tmp_path / "digits_cpu").mkdir()
    run, arguments = with_free_name(load(overrides), overrides)
    assert (run.name, arguments) == ("digits_cpu", overrides)


@pytest.mark.parametrize(
    ("goals", "sampled", "greedy", "word"),
    [
        (("0.9", "0.95"), 0.91, 0.96, "learned"),
        (("0.9", "0.95"), 0.91, 0.94, "NOT learned"),
        (("0.9", "null"), 0.91, 0.1, "learned"),
        (("null", "null"), 0.1, 0.1, "done"),
    ],
)
def test_the_verdict_compares_the_accuracies_with_the_goals(
    goals: tuple[str, str], sampled: float, greedy: float, word: str
) -> None:
    run = load([f"evaluation.goal_sampled={goals[0]}", f"evaluation.goal_greedy={goals[1]}"])
    summary = {"accuracy_sampled": sampled, "accuracy_greedy": greedy}
    assert verdict(run, summary) == f"{word}: held-out accuracy {sampled:.3f} sampled, {greedy:.3f} greedy"


def test_sft_needs_its_mode() -> None:
    with pytest.raises(ConfigError, match="mode must be sft, got async"):
        start_sft([])
