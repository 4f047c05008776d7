"""The command line: `slipstream COMMAND`, one function per command.

Each command imports its own modules: torch takes seconds to load, and `slipstream --help` or `slipstream status` must
not wait for it.
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
from slipstream.launch.diagnose.command import diagnose
from slipstream.learner.errors import LearnerError
from slipstream.migration.command import import_config
from slipstream.observe.viewer.list_screen import data, view
from slipstream.runtime.command_line import WITH_OVERRIDES, Overrides, fail_cleanly, make_app, run_app, with_command

app = make_app(
    """Asynchronous actor-learner reinforcement learning for language models.

    \b
    slipstream run                                   train the default experiment on this machine
    slipstream run learner.max_steps=50 name=short   any setting: key=value
    slipstream COMMAND --help                        usage and most used settings of a command

    All settings: docs/settings.md; `slipstream config` prints them with their values.
    """
)

_FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN", help="Name or folder of a run, by default the newest; runs_dir=FOLDER says where runs are."
    ),
]


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


@app.command(**WITH_OVERRIDES)
def run(ctx: typer.Context, overrides: Overrides = None) -> None:
    """Train: start the roles, watch them, report and plot the result.

    \b
    slipstream run                                    the default experiment, on this machine
    slipstream run experiment=gsm8k_1gpu              another preset
    slipstream run learner.max_steps=50 name=short    any setting
    slipstream run experiment=digits_serial           all roles in one process, deterministic
    slipstream run experiment=digits_replay replay.path=runs/NAME/archive    train on stored trajectories
    """
    from slipstream.launch.run import run_experiment

    run_experiment(overrides or [], program=ctx.find_root().info_name or "slipstream")


@app.command(**WITH_OVERRIDES)
def sft(overrides: Overrides = None) -> None:
    """Train on demonstrations, with the learner alone.

    \b
    slipstream sft                                              the default task, experiment=digits_sft
    slipstream sft sft.train_path=FILE model.path=FOLDER        demonstrations of your own, experiment=sft

    docs/sft.md describes the files.
    """
    from slipstream.launch.run import start_sft, with_sft_preset

    start_sft(with_sft_preset(overrides or []))


@app.command(**WITH_OVERRIDES)
def prepare(overrides: Overrides = None) -> None:
    """Make the data and models that a run lacks, as `run` does."""
    from slipstream.configs.load import load
    from slipstream.launch.preflight import prepare as make_missing

    if make_missing(load(overrides or [])) == 0:
        print("prepare: everything is there")


@app.command(**WITH_OVERRIDES)
def config(
    overrides: Overrides = None,
    sources: Annotated[bool, typer.Option("--sources", help="Name the file or override that sets each value.")] = False,
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


@app.command(**WITH_OVERRIDES)
def plan(
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of the machine; by default those here.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="Memory of each.")] = None,
    host_gib: Annotated[float | None, typer.Option(help="Main memory.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the memory of a run by process and cause.

    Reads the model's config.json, no weights. Exit codes: 0, 1 when it cannot fit, 2 for settings that are not valid.
    """
    from slipstream.launch.plan import show_plan

    show_plan(overrides or [], gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, is_json=json)


@app.command()
def status(
    run: RunWords = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/status.md lists its keys.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show a run on one screen.

    Reads the store alone: it works whichever role is dead, and changes nothing.

    Exit codes: 0, 1 when the store does not answer, 2 for a run that does not exist.
    """
    from slipstream.observe.terminal import show_status

    show_status(run or [], is_json=json, is_watching=watch)


@app.command()
def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Names or folders of runs, by default all; runs_dir=FOLDER says where runs are."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="By default 8420, or a free one.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of this machine; repeatable.")
    ] = None,
) -> None:
    """Show runs in a web browser, live and finished.

    \b
    slipstream watch                          all runs in runs/
    slipstream watch mine --port 9000         one of them

    Prints the address to open. Reads stores and run folders alone: it works whichever role is dead.
    """
    from slipstream.observe.dashboard.app import watch as serve

    serve(runs or [], host=host, port=port, names=allow_host or [])


@app.command()
def scale(
    words: Annotated[list[str], typer.Argument(metavar="generators=N [RUN]", help="Generators to keep, and the run.")],
) -> None:
    """Change the number of generators of a run.

    The launcher of the run starts or drains the difference; without a name it is the newest run.

    Exit codes: 0, 1 when no launcher or store answers, 2 for a number or a run that is not valid.
    """
    from slipstream.launch.commands import scale as scale_run

    scale_run(words)


@app.command()
def drain(
    generator: Annotated[str, typer.Argument(metavar="GENERATOR", help="Its id, such as generator-1.")],
    run: RunWords = None,
) -> None:
    """Have one generator return its prompts and leave, on any machine.

    Exit codes: 0, 1 when it does not leave in time, 2 for a generator or a run that does not exist.
    """
    from slipstream.launch.commands import drain as drain_generator

    drain_generator(generator, run or [])


@app.command()
def pause(
    run: RunWords = None, off: Annotated[bool, typer.Option("--off", help="Let a paused run go on.")] = False
) -> None:
    """Have a run train no further step until `slipstream pause --off`; its generators work as far as staleness allows.

    Exit codes: 0, 1 when the store does not answer, 2 for a run that does not train.
    """
    from slipstream.launch.commands import pause as pause_run

    pause_run(run or [], is_off=off)


@app.command()
def profile(
    run: RunWords = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to record.")] = 3,
) -> None:
    """Record the next steps of a run, with all roles on one time line.

    \b
    slipstream profile name=mine --steps 5

    Writes profile/trace.json.gz into the run folder, for ui.perfetto.dev; docs/profiling.md says how to read it.

    Exit codes: 0, 1 when the store does not answer, 2 for a run that does not train, or steps that it will not make.
    """
    from slipstream.launch.commands import profile as profile_run

    profile_run(run or [], num_steps=steps)


app.command(context_settings=_FORWARDED)(data)
app.command()(view)
app.command("import-config")(import_config)


@app.command()
def explain(
    kind: Annotated[
        Literal["slow", "reward", "health", "step", "version"],
        typer.Argument(metavar="KIND", help="slow | reward | health | step N | version N."),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[N] [RUN]", help="A number; then a run, as for status.")
    ] = None,
) -> None:
    """Say why a run is slow, why its reward fell, or what a step was trained on.

    From what it recorded, in progress or over: metrics, step ledger, events, store and archive.

    \b
    slipstream explain slow
    slipstream explain step 12 runs/digits_cpu
    """
    from slipstream.observe.explain import explain as explain_run

    explain_run(kind, words or [])


Words = Annotated[
    list[str],
    typer.Argument(metavar="MODEL... [KEY=VALUE...]", help="Folders in transformers format, or names on the hub."),
]


@app.command(**WITH_OVERRIDES)
def evaluate(
    words: Words,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep every answer there; repeated, it makes those it lacks.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; docs/evaluation.md has its keys.")
    ] = False,
    whole: Annotated[bool, typer.Option("--all", help="Every row of the held-out files.")] = False,
) -> None:
    """Measure models on the held-out sets of an experiment.

    \b
    slipstream evaluate runs/digits_cpu/final_model
    slipstream evaluate models/base runs/mine/final_model         with the difference between them
    slipstream evaluate models/mine --all 'data.heldout=[{name: aime, path: aime.parquet, samples: 16}]'

    Prints mean reward, accuracy, pass@k, maj@k, best@k and worst@k with 95 % intervals, of the prompts on which a run
    reports its final accuracy.
    """
    from slipstream.launch.evaluate import show_evaluations

    show_evaluations(words, out=out, is_json=json, is_whole=whole)


@app.command(**WITH_OVERRIDES)
def generate(
    words: Words,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the answers; repeated, it makes the rest.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    prompts: Annotated[int | None, typer.Option(min=1, help="The first so many; by default all.")] = None,
    unscored: Annotated[bool, typer.Option("--unscored", help="Ask for no rewards.")] = False,
) -> None:
    """Answer the prompts of data.train with a model, without training.

    \b
    slipstream generate models/mine --out answers --samples 8
    slipstream generate models/mine --out answers data.train=prompts.jsonl generators.sampling.temperature=0.7
    slipstream data ls answers -t      slipstream data export answers right.parquet --where 'reward>=1'

    The folder holds Parquet files in the form of an archive; killed and repeated, it goes on where it stopped.
    """
    from slipstream.configs.load import load_with_models
    from slipstream.launch.generate import generate as make_answers

    models, settings = load_with_models(words)
    if len(models) != 1:
        raise ConfigError(f"generate must have one model, got {', '.join(models)}.")
    stored, made = make_answers(settings, out, samples=samples, num_prompts=prompts, is_scored=not unscored)
    print(f"{made} answers made, {len(stored)} were there: {out}")


@app.command()
def check(
    kind: Annotated[Literal["advantage", "policy_loss"], typer.Argument(metavar="KIND", help="What it computes.")],
    function: Annotated[str, typer.Argument(metavar="module:function", help="Where it is.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Arguments that it takes by keyword.")
    ] = None,
) -> None:
    """Check an advantage or policy loss of your own.

    \b
    slipstream check policy_loss my_module:my_loss beta=0.1

    Runs the checks that the built-in functions pass; docs/algorithms.md describes its arguments and result.

    Exit codes: 0, 1 when a required property does not hold, 2 for a function that cannot be loaded.
    """
    from slipstream.scripts.check_algorithm import print_findings

    print_findings(kind, function, arguments or [])


@app.command()
def plot(run: RunWords = None) -> None:
    """Draw the curves of a run into its folder, as curve.png."""
    from slipstream.observe.plot import plot_run
    from slipstream.runtime.run_folder import find_run

    print(plot_run(find_run(run or [], command="plot")))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint, model, adapter, or folder of shards.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder to be made.")],
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest safetensors file.")] = "5GB",
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="By default that of most weights.")] = None,
    base: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Model of an adapter or of shards.")] = None,
) -> None:
    """Write a checkpoint as a model in transformers format.

    slipstream convert runs/mine/checkpoints/step-00000050 models/mine --dtype bfloat16

    docs/weights.md lists what is read: also adapters, verl's FSDP shards and ZeRO checkpoints.
    """
    from slipstream.launch.convert import convert as write_model

    print(write_model(source, target, base=base, dtype=dtype, max_shard_size=max_shard_size))


app.command(**WITH_OVERRIDES)(diagnose)


@app.command(context_settings=_FORWARDED)
def launch(ctx: typer.Context) -> None:
    """Start a run by Slurm or on Kubernetes, or print what would."""
    from slipstream.cluster.recipe_commands import app as recipes_app

    run_app(recipes_app, ctx.args, program=ctx.command_path)


@fail_cleanly(BrokerError, ReplayBufferError, GeneratorError, LearnerError, RoleDiedError)
def main(arguments: list[str] | None = None, *, program: str = "slipstream") -> None:
    """Parse the command line and dispatch."""
    # As `python -m` does for the roles: a reward function may be in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    run_app(app, with_command(app, sys.argv[1:] if arguments is None else arguments), program=program)
