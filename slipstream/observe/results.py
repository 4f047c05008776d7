"""Results of a finished run, from its summary.json."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.buffer.role_reports import describe_times
from slipstream.configs.run import RunConfig

_REPORTED = {
    "seconds to the goal": "seconds_to_goal",
    "held-out loss before": "eval_loss_before",
    "held-out loss": "eval_loss",
    "held-out pair accuracy": "eval_pair_accuracy",
    "training loss": "train_loss",
    "seconds of training": "train_seconds",
    "steps": "steps",
    "tokens/s generated": "generated_tokens_per_s",
    "tokens/s learned": "learner_tokens_per_s",
    "lag mean": "lag_mean",
    "lag max": "lag_max",
    "largest log-prob difference": "logprob_diff_max",
}


def verdict(run: RunConfig, summary: dict[str, Any]) -> str:
    """Describe goals and the accuracies of the final evaluation."""
    evaluation, steps = summary.get("evaluation") or {}, summary["steps"]
    shown = []
    for goal in (goal for goal in run.evaluation.goals if evaluation and not goal.holds(evaluation)):
        bounds, value = {"least": goal.at_least, "most": goal.at_most}, evaluation.get(goal.metric)
        asked = " and ".join(f"at {word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        shown.append(f"{goal.metric} is {'unknown' if value is None else f'{value:.4g}'}, the goal {asked}")
    word = "learned" if run.evaluation.goals and evaluation else f"done after {steps} steps"
    if shown:
        word = f"goal not reached after {steps} steps ({'; '.join(shown)})"
    found = {each.name: summary.get(f"accuracy_{each.name}") for each in run.data.eval_sets}
    accuracies = [f"{value:.3f} {name}" for name, value in found.items() if value is not None]
    sizes = dict.fromkeys(summary.get("num_final_prompts", {}).values())
    where = f"final evaluation on {' or '.join(map(str, sizes))} prompts" if sizes else "final evaluation"
    return f"{word}; {where}: accuracy {', '.join(accuracies)}" if accuracies else word


def draw_results(run: RunConfig, summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the verdict, a table of figures, and the shares of the wall time."""
    yield Text(f"{run.name}: {verdict(run, summary)}", style="bold")
    sets = run.data.eval_sets
    labels = {f"accuracy before, {each.name}": each.before_key for each in sets}
    labels |= {f"accuracy after, {each.name}": f"accuracy_{each.name}" for each in sets}
    table = Table(show_header=False, box=None)
    for label, key in (labels | _REPORTED).items():
        # A value that was not measured is null.
        if (value := summary.get(key)) is not None:
            table.add_row(label, f"{value:,.4g}" if isinstance(value, float) else str(value))
    yield table
    if best := summary.get("best"):
        yield f"best model: step {best['checkpoint']['step']}, {best['metric']} {best['value']:.4g}"
    yield from describe_times(summary.get("times"))
