"""One run from overrides to report."""

import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from slipstream.broker.dataset import with_epochs
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.cluster.observers import observed
from slipstream.cluster.seat import Places
from slipstream.configs.base import ConfigError, require
from slipstream.configs.load import load, merge_overrides, provenance
from slipstream.configs.run import RunConfig, read_config
from slipstream.launch.launcher import Launcher
from slipstream.launch.preflight import (
    check_models,
    check_surroundings,
    describe_doubts,
    make_inputs,
    missing_steps,
    prepare,
)
from slipstream.observe.terminal import draw_results
from slipstream.runtime.command_line import make_console
from slipstream.runtime.row_files import require_demonstrations
from slipstream.runtime.run_folder import OVERRIDES, RunFolder, is_held

_MAX_OVERRIDES = 60
"""Characters of overrides in a suggested command; more are replaced by a file."""

console = make_console()


def run_experiment(overrides: list[str], *, program: str) -> None:
    """Train and report the result. `program`: name in the suggested commands.

    Raises ConfigError and the errors of every role.
    """
    overrides = with_stored_overrides(overrides)
    run = load(overrides)
    if run.mode == "sft":
        start_sft(overrides)
    if run.learner.epochs:
        # The rows are counted.
        prepare(run)
        run = with_epochs(run)
    run, overrides = with_free_name(run, overrides)
    folder = RunFolder(run)
    if run.resume and (done := describe_finished(run, folder)):
        console.print(done, soft_wrap=True)
        return
    folder.check_name()
    check_surroundings(run)
    # Generators load libraries during preparation. Check all else first, so that a rejected run leaves no trace.
    is_to_prepare = run.has_roles and bool(missing_steps(run))
    if not is_to_prepare:
        make_inputs(run)
    with _open_places(run) as places:
        try:
            folder.claim()
            folder.record_process(LAUNCHER)
            folder.record_stage(LAUNCHER, "settings checked")
            # Otherwise an interrupted continuation would look finished.
            folder.summary.unlink(missing_ok=True)
            folder.write_origins(provenance(overrides, run), overrides=overrides)
            if run.has_roles:
                launcher = Launcher(run, folder, overrides=overrides, console=console, places=places)
                launcher.launch(prepare=(lambda: make_inputs(run)) if is_to_prepare else None)
            else:
                with observed(run, logs=folder.logs):
                    _run_here(run, folder, overrides=overrides)
        finally:
            folder.unlock()
    report(run, folder, overrides=overrides, program=program)
    folder.record_stage(LAUNCHER, "results printed")


def with_stored_overrides(overrides: list[str]) -> list[str]:
    """With `resume`, a run's name, and no experiment, add the overrides that started the run."""
    given = dict(text.partition("=")[::2] for text in overrides)
    if given.get("resume", "").lower() not in ("true", "auto") or "name" not in given or "experiment" in given:
        return overrides
    # Not config.yaml: roles on other machines get only overrides.
    file = Path(given.get("runs_dir", "runs")) / given["name"] / OVERRIDES
    return merge_overrides(json.loads(file.read_text()), overrides) if file.is_file() else overrides


def describe_finished(run: RunConfig, folder: RunFolder) -> str:
    """Describe a run with nothing left to train; empty otherwise."""
    if run.mode == "evaluate" or not folder.summary.is_file():
        return ""
    steps, stored = json.loads(folder.summary.read_text())["steps"], read_config(folder.path)
    has_stopped = (stored.evaluation.stop, stored.learner.max_steps) == (run.evaluation.stop, run.learner.max_steps)
    if steps < run.learner.max_steps and not has_stopped:
        return ""
    why = "" if steps >= run.learner.max_steps else ", because evaluation.stop was met"
    epochs, more = run.learner.epochs, f"set learner.max_steps above {steps}"
    more = f"raise learner.epochs above {epochs}" if epochs else more
    more += " or change evaluation.stop" if why else ""
    ended = f"it ended after {steps} of {run.learner.max_steps} steps{why}"
    return f"{run.name} is finished: {ended}. To continue it, {more}."


def _run_here(run: RunConfig, folder: RunFolder, *, overrides: list[str]) -> None:
    # Both load torch, which takes seconds.
    if run.mode == "serial":
        from slipstream.launch.serial import run_serial

        run_serial(run, folder)
    else:
        from slipstream.launch.replay import run_replay

        run_replay(run, folder, overrides=overrides)


@contextmanager
def _open_places(run: RunConfig) -> Iterator[Places | None]:
    """Join the run's cluster, if any."""
    if run.cluster.kind == "local":
        yield None
        return
    # Takes a second, and Ray is optional.
    try:
        from slipstream.cluster.ray_seats import join_cluster
    except ImportError as error:
        raise ConfigError(f"cluster.kind=ray needs Ray, got {error}: `pip install 'slipstream[ray]'`.") from None
    with join_cluster(run, log=RunFolder(run).logs / "ray.log") as places:
        yield places


def start_sft(overrides: list[str]) -> None:
    """Replace this process with the learner, the only role of mode=sft. Raises ConfigError."""
    run = load(overrides)
    why = "choose experiment=digits_sft, or set mode and sft.*"
    require(run.mode == "sft", "mode", "be sft", got=run.mode, why=why)
    _, overrides = with_free_name(run, overrides)
    prepare(run)
    check_models(run)
    for path in filter(None, (run.sft.train_path, run.sft.eval_path)):
        require_demonstrations(Path(path))
    for note in describe_doubts(run):
        print(f"note: {note}")
    # exec, because torch must load under the learner's environment variables.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "slipstream.learner", *overrides])


def with_sft_preset(overrides: list[str]) -> list[str]:
    """Add a default experiment: `sft` if the user gives a training file, else `digits_sft`."""
    keys = {override.partition("=")[0] for override in overrides}
    preset = "experiment=sft" if "sft.train_path" in keys else "experiment=digits_sft"
    return overrides if "experiment" in keys else [preset, *overrides]


def with_free_name(run: RunConfig, overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """Append a number to a default name in use."""
    if run.resume or any(override.startswith("name=") for override in overrides):
        return run, overrides
    names = itertools.chain([run.name], (f"{run.name}-{number}" for number in itertools.count(2)))
    for free in (msgspec.structs.replace(run, name=name) for name in names):
        folder = RunFolder(free)
        if not folder.path.exists() or (folder.is_untrained and not is_held(folder.path)):
            break
    return free, [*overrides, f"name={free.name}"]


def report(run: RunConfig, folder: RunFolder, *, overrides: list[str], program: str) -> None:
    """Print a finished run's results and draw its curve."""
    # matplotlib takes a second to load.
    from slipstream.observe.plot import plot_run

    summary = json.loads(folder.summary.read_text())
    try:
        curve: object = plot_run(folder.path) if summary["steps"] else "-"
    except OSError as error:
        # The run itself succeeded.
        curve = f"not drawn: {error}"
    lines = [*draw_results(run, summary), *([f"best model   {folder.best_model}"] if summary["best"] else [])]
    lines += [f"curve        {curve}", f"final model  {folder.final_model}", f"all figures  {folder.summary}"]
    next_commands = suggestions(run, folder, overrides=overrides, program=program)
    width = max(map(len, next_commands))
    lines += ["", "Next:", *(f"  {command:<{width}}   # {comment}" for command, comment in next_commands.items())]
    console.print(*lines, sep="\n", soft_wrap=True)


def suggestions(run: RunConfig, folder: RunFolder, *, overrides: list[str], program: str) -> dict[str, str]:
    """Command to try next -> comment."""
    own = [text for text in overrides if text.partition("=")[0] not in ("name", "resume")]
    if len(shlex.join(own)) > _MAX_OVERRIDES and run.cluster.kind == "local":
        # The same settings, as a file. Other machines don't have it.
        own = [f"experiment={folder.path}/config.yaml", *(["resume=false"] if run.resume else [])]
    again = shlex.join([*program.split(), "run", *own])
    commands: dict[str, str] = {}
    if run.has_roles:
        commands[f"{again} name={run.name}-sync staleness.max_lag=0"] = "the synchronous oracle"
        commands[f"{again} name={run.name}-two generators.count=2"] = "two generators"
    commands[shlex.join([*program.split(), "evaluate", str(folder.path)])] = "measure the final model again"
    commands[shlex.join([*program.split(), "plan", *own])] = "its memory, by process and cause"
    return commands
