"""The command line: `slipstream COMMAND`, one function per command.

Each command imports its own modules, because torch takes seconds to load and would delay `slipstream --help`.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import slipstream
from slipstream.broker.errors import BrokerError
from slipstream.buffer.errors import ReplayBufferError
from slipstream.cluster.role_process import RoleDiedError
from slipstream.configs.base import ConfigError
from slipstream.generators.errors import GeneratorError
from slipstream.learner.errors import LearnerError
from slipstream.runtime.command_line import (
    WITH_OVERRIDES,
    Overrides,
    RunName,
    RunsDir,
    SourceWord,
    Texts,
    TokenizerPath,
    fail_cleanly,
    make_app,
    run_app,
    with_command,
)

app = make_app(
    """Asynchronous actor-learner reinforcement learning for language models.

    \b
    slipstream run                                   train the default experiment on this machine
    slipstream run learner.max_steps=50 name=short   change any setting: key=value
    slipstream COMMAND --help                        usage and common settings of a command

    docs/settings.md lists all settings; `slipstream config` prints their values.
    """
)

_FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_RUNS = "Names or folders of runs (default: all); runs_dir=FOLDER is where runs are stored."
_RUN = "Name or folder of a run (default: the newest); runs_dir=FOLDER is where runs are stored."
RunWords = Annotated[Texts, typer.Argument(metavar="RUN", help=_RUN)]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"slipstream {slipstream.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command(**WITH_OVERRIDES, rich_help_panel="Train")
def run(
    ctx: typer.Context,
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Train one run after another for each of several values.")
    ] = False,
) -> None:
    """Train: run all roles, and report and plot the result.

    \b
    slipstream run                                    the default experiment on this machine
    slipstream run experiment=gsm8k_1gpu              another preset
    slipstream run learner.max_steps=50 name=short    any setting
    slipstream run experiment=digits_serial           all roles in one process, deterministic
    slipstream run experiment=digits_replay replay.path=runs/NAME/archive    train on stored trajectories
    slipstream run -m seed=1,2,3                      one run per seed, with means and ranges
    """
    from slipstream.launch.run import run_experiment
    from slipstream.launch.sweep import run_sweep

    train = run_sweep if multirun else run_experiment
    train(overrides or [], program=ctx.find_root().info_name or "slipstream")


@app.command(**WITH_OVERRIDES, rich_help_panel="Train")
def sft(overrides: Overrides = None) -> None:
    """Train on demonstrations (supervised fine-tuning).

    \b
    slipstream sft                                              the default task, experiment=digits_sft
    slipstream sft sft.train_path=FILE model.path=FOLDER        your own demonstrations, experiment=sft

    Runs only a learner. docs/sft.md describes the files.
    """
    from slipstream.launch.run import start_sft, with_sft_preset

    start_sft(with_sft_preset(overrides or []))


@app.command(**WITH_OVERRIDES, rich_help_panel="Train")
def config(
    overrides: Overrides = None,
    sources: Annotated[bool, typer.Option("--sources", help="Show the file or override that sets each value.")] = False,
) -> None:
    """Print the resolved configuration of a run."""
    from slipstream.configs.load import leaves, load, provenance, to_plain, to_yaml

    resolved = load(overrides or [])
    if not sources:
        print(to_yaml(resolved), end="")
        return
    origins = provenance(overrides or [], resolved)
    rows = {f"{key} = {value}": origins[key] for key, value in leaves(to_plain(resolved))}
    width = min(60, max(map(len, rows)))
    for name, origin in rows.items():
        print(f"{name:<{width}}  {origin}")


@app.command(**WITH_OVERRIDES, rich_help_panel="Train")
def prepare(overrides: Overrides = None) -> None:
    """Make missing data and models of a run, as `run` does."""
    from slipstream.configs.load import load
    from slipstream.launch.preflight import prepare as make_missing

    if make_missing(load(overrides or [])) == 0:
        print("prepare: nothing is missing")


@app.command(rich_help_panel="Train")
def check(
    kind: Annotated[
        Literal["advantage", "policy_loss"], typer.Argument(metavar="KIND", help="What the function computes.")
    ],
    function: Annotated[str, typer.Argument(metavar="module:function", help="Import path of the function.")],
    arguments: Annotated[Texts, typer.Argument(metavar="NAME=VALUE", help="Keyword arguments of the function.")] = None,
) -> None:
    """Check a custom advantage or policy loss.

    \b
    slipstream check policy_loss my_module:my_loss beta=0.1

    Runs the checks of the built-in functions; docs/algorithms.md describes arguments and result.

    Exit codes: 0, 1 if a required property does not hold, 2 if the function cannot be loaded or raises an error.
    """
    from slipstream.scripts.check_algorithm import print_findings

    print_findings(kind, function, arguments or [])


_SETTINGS = "YAML, TOML, JSON, or a shell script; a folder of TOML files for prime-rl."


@app.command("import-config", rich_help_panel="Train")
def import_config(
    trainer: Annotated[
        Literal["verl", "trl", "prime-rl", "openrlhf"],
        typer.Argument(metavar="TRAINER", help="Trainer of the settings: verl, trl, prime-rl, or openrlhf."),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_SETTINGS)],
) -> None:
    """Translate the settings of another trainer.

    \b
    slipstream import-config verl run_qwen2-7b.sh
    slipstream import-config trl grpo.yaml
    slipstream import-config prime-rl rl.toml
    slipstream import-config openrlhf train_ppo.sh

    Prints the equivalent command, notes on different meanings, and settings without an equivalent; docs/migration.md
    has a glossary.
    """
    from slipstream.migration.command import import_config as print_settings

    print_settings(trainer, file)


@app.command(rich_help_panel="Inspect")
def status(
    run: RunWords = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/status.md lists its keys.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show the state of a run on one screen.

    Reads only the store, so it works with any role dead.

    Exit codes: 0, 1 if the store does not answer, 2 if the run does not exist.
    """
    from slipstream.observe.terminal import show_status

    show_status(run or [], is_json=json, is_watching=watch)


@app.command(rich_help_panel="Inspect")
def watch(
    runs: Annotated[Texts, typer.Argument(metavar="RUN", help=_RUNS)] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port (default: 8420, or a free one).")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[Texts, typer.Option(metavar="NAME", help="Another name of this machine; repeatable.")] = None,
) -> None:
    """Show live and finished runs in a web browser.

    \b
    slipstream watch                          all runs in runs/
    slipstream watch mine --port 9000         one of them

    Prints the address to open. Reads only stores and run folders, so it works with any role dead.
    """
    from slipstream.observe.dashboard.app import watch as serve

    serve(runs or [], host=host, port=port, names=allow_host or [])


@app.command(rich_help_panel="Inspect")
def explain(
    kind: Annotated[
        Literal["start", "slow", "reward", "health", "step", "version"],
        typer.Argument(metavar="KIND", help="start | slow | reward | health | step N | version N."),
    ],
    words: Annotated[Texts, typer.Argument(metavar="[N] [RUN]", help="A number, then a run as for `status`.")] = None,
) -> None:
    """Explain the start of a run, a slow run, a fall of the reward, or one step.

    Uses the records of a live or finished run: metrics, step ledger, events, store, and archive.

    \b
    slipstream explain slow
    slipstream explain step 12 runs/digits_cpu
    """
    from slipstream.observe.explain import explain as explain_run

    explain_run(kind, words or [])


@app.command(rich_help_panel="Inspect")
def plot(run: RunWords = None) -> None:
    """Draw the curves of a run as curve.png in its folder."""
    from slipstream.observe.plot import plot_run
    from slipstream.runtime.run_folder import find_run

    print(plot_run(find_run(run or [], command="plot")))


@app.command(rich_help_panel="Control")
def pause(
    run: RunWords = None, off: Annotated[bool, typer.Option("--off", help="Resume a paused run.")] = False
) -> None:
    """Pause training until `slipstream pause --off`.

    Generators continue as far as staleness allows.

    Exit codes: 0, 1 if the store does not answer, 2 if the run does not train.
    """
    from slipstream.launch.commands import pause as pause_run

    pause_run(run or [], is_off=off)


@app.command(rich_help_panel="Control")
def scale(
    words: Annotated[
        list[str], typer.Argument(metavar="generators=N [RUN]", help="Number of generators to keep, and the run.")
    ],
) -> None:
    """Change the number of generators of a run.

    The run's launcher starts or drains the difference. The default run is the newest.

    Exit codes: 0, 1 if launcher or store do not answer, 2 for an invalid number or run.
    """
    from slipstream.launch.commands import scale as scale_run

    scale_run(words)


@app.command(rich_help_panel="Control")
def drain(
    generator: Annotated[str, typer.Argument(metavar="GENERATOR", help="Id, such as generator-1.")],
    run: RunWords = None,
) -> None:
    """Make one generator return its prompts and leave.

    Works on any machine.

    Exit codes: 0, 1 if it does not leave in time, 2 if the generator or the run does not exist.
    """
    from slipstream.launch.commands import drain as drain_generator

    drain_generator(generator, run or [])


@app.command(rich_help_panel="Control")
def profile(
    run: RunWords = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to record.")] = 3,
) -> None:
    """Record the next steps of a run on one timeline.

    \b
    slipstream profile name=mine --steps 5

    Writes profile/trace.json.gz into the run folder for ui.perfetto.dev; docs/profiling.md explains it.

    Exit codes: 0, 1 if the store does not answer, 2 if the run does not train or ends before these steps.
    """
    from slipstream.launch.commands import profile as profile_run

    profile_run(run or [], num_steps=steps)


@app.command(context_settings=_FORWARDED, rich_help_panel="Data")
def data(ctx: typer.Context) -> None:
    """List, show, export, import, and verify stored trajectories."""
    from slipstream.observe.catalog.commands import app as data_app

    run_app(data_app, ctx.args, program=ctx.command_path)


@app.command(rich_help_panel="Data")
def view(
    where: SourceWord, tokenizer: TokenizerPath = None, run: RunName = None, runs_dir: RunsDir = Path("runs")
) -> None:
    """Look through trajectories in the terminal; `?` lists the keys.

    Search, filter and sort; tokens colored by advantage or lag; a group side by side. Reads only, and works while
    roles of the run are dead.

    \b
    slipstream view runs/mine
    slipstream view good.parquet --tokenizer models/mine
    """
    from slipstream.observe.viewer.list_screen import view as open_viewer

    open_viewer(where, tokenizer=tokenizer, run=run, runs_dir=runs_dir)


_MODELS = "MODEL... [KEY=VALUE...]"
_MODELS_HELP = "Folders in transformers format, or model names on the hub."


@app.command(**WITH_OVERRIDES, rich_help_panel="Models")
def evaluate(
    words: Annotated[Texts, typer.Argument(metavar=_MODELS, help=_MODELS_HELP)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Store every answer; a repeated call only makes missing ones.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/evaluation.md has its keys.")
    ] = False,
    whole: Annotated[bool, typer.Option("--all", help="Use every row of the held-out files.")] = False,
    responses: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Score the responses in a file instead of generating any; repeatable."),
    ] = None,
) -> None:
    """Measure models on held-out sets.

    \b
    slipstream evaluate runs/digits_cpu/final_model
    slipstream evaluate models/base runs/mine/final_model         with their difference
    slipstream evaluate models/mine --all 'data.eval=[{name: aime, path: aime.parquet, samples: 16}]'
    slipstream evaluate --responses answers.jsonl generators.reward.function=math

    Prints mean reward, accuracy, pass@k, maj@k, best@k, and worst@k with 95 % intervals, on the prompts of a run's
    final evaluation.
    """
    from slipstream.launch.evaluate import show_evaluations

    show_evaluations(words or [], out=out, is_json=json, is_whole=whole, files=responses or [])


@app.command(**WITH_OVERRIDES, rich_help_panel="Models")
def generate(
    words: Annotated[list[str], typer.Argument(metavar=_MODELS, help=_MODELS_HELP)],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the answers; a repeated call only makes missing ones.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts (default: all).")] = None,
    unscored: Annotated[bool, typer.Option("--unscored", help="Compute no rewards.")] = False,
) -> None:
    """Answer the prompts of data.train with a model.

    \b
    slipstream generate runs/mine --out answers --samples 8
    slipstream generate models/mine --out answers data.train=prompts.jsonl generators.sampling.temperature=0.7
    slipstream data ls answers -t      slipstream data export answers right.parquet --where 'reward>=1'

    The folder is an archive of Parquet files. After an interruption, the same command resumes.
    """
    from slipstream.configs.load import load_with_models
    from slipstream.launch.generate import generate as make_answers

    models, settings = load_with_models(words)
    if len(models) != 1:
        raise ConfigError(f"generate must have one model, got {', '.join(models)}.")
    stored, made = make_answers(settings, out, samples=samples, num_prompts=prompts, is_scored=not unscored)
    print(f"{made} new answers, {len(stored)} existing: {out}")


@app.command(rich_help_panel="Models")
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint, model, adapter, or folder of shards.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New folder.")],
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest safetensors file.")] = "5GB",
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Default: that of most weights.")] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Base model of an adapter, or config for shards.")
    ] = None,
) -> None:
    """Write a checkpoint as a model in transformers format.

    slipstream convert runs/mine/checkpoints/step-00000050 models/mine --dtype bfloat16

    A run folder stands for its final model or newest checkpoint. Also reads adapters, verl's FSDP shards, and ZeRO
    checkpoints: see docs/weights.md.
    """
    from slipstream.launch.convert import convert as write_model

    print(write_model(source, target, base=base, dtype=dtype, max_shard_size=max_shard_size))


@app.command(**WITH_OVERRIDES, rich_help_panel="Machines")
def plan(
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Number of GPUs (default: those of this machine).")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="Memory per GPU.")] = None,
    host_gib: Annotated[float | None, typer.Option(help="Main memory.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the memory of a run, by process and cause.

    Reads the model's config.json, but no weights. Exit codes: 0, 1 if it does not fit, 2 for invalid settings.
    """
    from slipstream.launch.plan import show_plan

    show_plan(overrides or [], gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, is_json=json)


@app.command(**WITH_OVERRIDES, rich_help_panel="Machines")
def diagnose(
    words: Annotated[
        Texts,
        typer.Argument(
            metavar="[cluster] [RUN] [KEY=VALUE...]", help="Name or folder of a run (default: the newest); or settings."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/diagnose.md has its keys.")] = False,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Write a file for a bug report, without secrets.")
    ] = None,
) -> None:
    """Check installation, machine, run inputs, and the last run.

    \b
    slipstream diagnose                                            with the settings of the newest run
    slipstream diagnose experiment=gsm8k_1gpu                      with the settings of a new run
    slipstream diagnose --bundle report.tar.gz                     collect everything for a bug report
    slipstream diagnose cluster broker.address=tcp://HOST:PORT     a machine that will join that broker
    slipstream diagnose cluster cluster.interface=10.0.0.0/8       the same without a broker

    Each check has a verdict (ok, warn, fail, skipped) and a remedy. Changes nothing.

    Exit codes: 0, 1 if a check failed, 2 for invalid settings.
    """
    from slipstream.launch.diagnose.diagnosis import diagnose as diagnose_all

    diagnose_all(words or [], is_json=json, bundle=bundle)


@app.command(context_settings=_FORWARDED, rich_help_panel="Machines")
def launch(ctx: typer.Context) -> None:
    """Start a run on Slurm or Kubernetes, or print the job."""
    from slipstream.cluster.recipe_commands import app as recipes_app

    run_app(recipes_app, ctx.args, program=ctx.command_path)


@fail_cleanly(BrokerError, ReplayBufferError, GeneratorError, LearnerError, RoleDiedError)
def main(arguments: list[str] | None = None, *, program: str = "slipstream") -> None:
    """Parse the command line and dispatch."""
    # Like `python -m` for the roles, because a reward function may be in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    run_app(app, with_command(app, sys.argv[1:] if arguments is None else arguments), program=program)
