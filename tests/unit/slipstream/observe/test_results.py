"""Results of a finished run."""

import pytest
from rich.console import Console

from slipstream.configs.load import load
from slipstream.observe.results import draw_results, verdict

FINAL = "final evaluation on 512 prompts: accuracy"
GOALS, MISSED = {"sampled": 0.9, "greedy": 0.95}, "goal not reached after 30 steps"
NO_GREEDY = {"accuracy_greedy": None, "seconds_to_goal": None}
BEST = {"checkpoint": {"step": 3}, "metric": "m", "value": 0.5}


@pytest.mark.parametrize(
    ("goals", "sampled", "greedy", "expected"),
    [
        (GOALS, 0.91, 0.96, "learned"),
        (GOALS, 0.91, 0.94, f"{MISSED} (eval/accuracy_greedy is 0.94, the goal at least 0.95)"),
        ({"sampled": 0.9}, 0.91, 0.1, "learned"),
        ({}, 0.1, 0.1, "done after 30 steps"),
    ],
)
def test_the_verdict_compares_the_final_evaluation_with_the_goals_and_names_it(goals, sampled, greedy, expected):
    bounds = [f"{{metric: eval/accuracy_{name}, at_least: {goal}}}" for name, goal in goals.items()]
    run = load([f"evaluation.goals=[{', '.join(bounds)}]"])
    found = {"accuracy_sampled": sampled, "accuracy_greedy": greedy}
    summary = found | {"steps": 30, "num_final_prompts": {"sampled": 512, "greedy": 512}}
    summary["evaluation"] = {f"eval/{name}": value for name, value in found.items()}
    assert verdict(run, summary) == f"{expected}; {FINAL} {sampled:.3f} sampled, {greedy:.3f} greedy"


@pytest.mark.parametrize(
    ("experiment", "summary", "lines"),
    [
        ("digits_sft", {"steps": 9, "eval_loss": 0.5}, ["held-out loss  0.5", "steps          9"]),
        ("digits_cpu", {"steps": 4}, ["steps  4"]),
        ("digits_cpu", {"steps": 4, "best": BEST} | NO_GREEDY, ["steps  4", "best model: step 3, m 0.5"]),
    ],
)
def test_the_figures_that_a_summary_has_are_shown(experiment, summary, lines):
    console = Console(width=100)
    with console.capture() as printed:
        console.print(*draw_results(load([f"experiment={experiment}"]), summary), sep="\n")
    done = f"{experiment}: done after {summary['steps']} steps"
    assert [line.strip() for line in printed.get().splitlines()] == [done, *lines]
