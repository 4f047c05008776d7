"""Slipstream: start, watch and stop the roles of one run.

python run_async.py                                  the default experiment, on this machine
python run_async.py experiment=gsm8k_1gpu            another preset
python run_async.py learner.max_steps=50 name=short  any setting, as Hydra overrides
python run_async.py experiment=digits_serial         all roles in one process, deterministic
python run_async.py experiment=digits_replay replay.path=runs/NAME/archive   train again on stored rollouts
python run_async.py --cfg job ...                    show the resolved configuration and stop
python run_async.py status name=short                how a run is now, from its store; --watch, --json
python run_async.py scale generators=4 name=short    keep that many generators from now on
"""

import itertools
import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.broker.errors import BrokerError
from slipstream.buffer.errors import ReplayBufferError
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load, to_yaml
from slipstream.configs.run import RunConfig
from slipstream.generators.errors import GeneratorError
from slipstream.launch.commands import drain, scale, show_status
from slipstream.launch.launcher import Launcher
from slipstream.launch.preflight import check_surroundings, prepare
from slipstream.learner.errors import LearnerError
from slipstream.runtime.exits import fail_cleanly
from slipstream.runtime.process import RoleDiedError
from slipstream.runtime.run_folder import RunFolder
from slipstream.scripts.plot_run import plot_run

console = Console()


@fail_cleanly(BrokerError, ReplayBufferError, GeneratorError, LearnerError, RoleDiedError)
def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    if arguments[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if arguments[:1] == ["status"]:
        show_status(arguments[1:])
        return
    if arguments[:1] == ["scale"]:
        scale(arguments[1:])
        return
    if arguments[:1] == ["drain"]:
        drain(arguments[1:])
        return
    if arguments[:1] == ["--cfg"]:
        print(to_yaml(load(arguments[2:])))
        return
    run = load(arguments)
    _refuse_supervised(run)
    run, arguments = _with_free_name(run, arguments)
    folder = RunFolder(run)
    folder.check_name()
    prepare(run)
    check_surroundings(run)
    folder.claim()
    if run.mode == "serial":
        # Imported only now: torch takes seconds to load, and a launcher does without.
        from slipstream.launch.serial import run_serial

        run_serial(run, folder)
    elif run.mode == "replay":
        from slipstream.launch.replay import run_replay

        run_replay(run, folder, overrides=arguments)
    else:
        Launcher(run, folder, overrides=arguments, console=console).launch()
    report(run, folder)


def _refuse_supervised(run: RunConfig) -> None:
    if run.mode == "sft":
        raise ConfigError(
            "mode=sft has one role and needs no launcher: start `python -m learner` with the same overrides, after "
            "`python -m slipstream.launch.preflight` with them has made what is missing."
        )


def _with_free_name(run: RunConfig, arguments: list[str]) -> tuple[RunConfig, list[str]]:
    """A name the user did not choose, and that is used, gets a number: the same command works again."""
    is_chosen = any(argument.startswith("name=") for argument in arguments)
    if is_chosen or run.resume:
        return run, arguments
    names = itertools.chain([run.name], (f"{run.name}-{number}" for number in itertools.count(2)))
    free = next(name for name in names if not (Path(run.runs_dir) / name).exists())
    return msgspec.structs.replace(run, name=free), [*arguments, f"name={free}"]


def report(run: RunConfig, folder: RunFolder) -> None:
    """The verdict, the plot, and what to try next."""
    summary = json.loads(folder.summary.read_text())
    curve = plot_run(folder.path)
    console.print(f"{run.name}: {verdict(run, summary)}", style="bold", highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None)
    for label, key in _REPORTED.items():
        value = summary[key]
        table.add_row(label, f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value))
    console.print(table)
    console.print(
        f"curve        {curve}\nfinal model  {folder.final_model}\nall figures  {folder.summary}\n", highlight=False
    )
    console.print(
        "Next:", *(f"  {command}" for command in _next_commands(run)), sep="\n", highlight=False, soft_wrap=True
    )


_REPORTED = {
    "accuracy before, sampled": "accuracy_before",
    "accuracy after, sampled": "accuracy_sampled",
    "accuracy after, greedy": "accuracy_greedy",
    "seconds to the goal": "seconds_to_goal",
    "seconds of training": "train_seconds",
    "steps": "steps",
    "tokens/s generated": "generated_tokens_per_s",
    "tokens/s learned": "learner_tokens_per_s",
    "lag mean": "lag_mean",
    "lag max": "lag_max",
    "largest log-prob difference": "logprob_diff_max",
}


def verdict(run: RunConfig, summary: dict[str, float]) -> str:
    """Whether the goal was reached; without a goal, how far it went."""
    sampled, greedy = summary["accuracy_sampled"], summary["accuracy_greedy"]
    goal_sampled, goal_greedy = run.evaluation.goal_sampled, run.evaluation.goal_greedy
    reached = sampled >= (goal_sampled or 0) and greedy >= (goal_greedy or 0)
    word = "done" if goal_sampled is None and goal_greedy is None else "learned" if reached else "NOT learned"
    return f"{word}: held-out accuracy {sampled:.3f} sampled, {greedy:.3f} greedy"


def _next_commands(run: RunConfig) -> list[str]:
    python = Path(sys.executable).name
    return [
        f"{python} run_async.py name={run.name}-sync buffer.staleness.max_lag=0   # the synchronous oracle",
        f"{python} run_async.py name={run.name}-two generators.count=2           # two generators",
        f"{python} scripts/print_config.py --arithmetic experiment=gsm8k_1gpu    # what a GPU run would be",
    ]


if __name__ == "__main__":
    # As `python -m` does for the roles: a reward function may lie in the folder where the user stands.
    sys.path.insert(0, str(Path.cwd()))
    main(sys.argv[1:])
