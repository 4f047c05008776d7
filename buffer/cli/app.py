"""The command line: a function per command, its arguments, and nothing else."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.buffer.archive.trajectory_filter import GROUP_STATES, Decode, TrajectoryFilter
from slipstream.buffer.cli.show import (
    as_json,
    list_frames,
    list_groups,
    list_trajectories,
    make_console,
    show_facts,
    show_stretches,
    show_tokens,
)
from slipstream.buffer.cli.sources import ArchiveSource, StoreSource, find_decoder, open_source
from slipstream.buffer.cli.stats import Stats, tell_audit, tell_check
from slipstream.buffer.cli.transfer import export, import_rollouts
from slipstream.configs.base import ConfigError


# @@ The options that every command filters by.
def _outcome(value: str | None) -> str | None:
    if value not in (None, *GROUP_STATES):
        raise ConfigError(f"--outcome must be one of {', '.join(GROUP_STATES)}, got {value!r}.")
    return value


OPTIONS: dict[str, Any] = {
    "min_reward": Annotated[float | None, typer.Option(help="Least total reward.")],
    "max_reward": Annotated[float | None, typer.Option(help="Greatest total reward.")],
    "min_tokens": Annotated[int | None, typer.Option(help="Fewest tokens, prompt and response.")],
    "max_tokens": Annotated[int | None, typer.Option(help="Most tokens, prompt and response.")],
    "version": Annotated[int | None, typer.Option(help="Policy version that sampled some of it.")],
    "step": Annotated[int | None, typer.Option(help="Step that trained on it.")],
    "data_source": Annotated[str | None, typer.Option(help="Kind of task, whole name.")],
    "outcome": Annotated[str | None, typer.Option(help=f"{', '.join(GROUP_STATES)}.", callback=_outcome)],
    "text": Annotated[str | None, typer.Option(help="Part of the decoded text.")],
}
"""Field of TrajectoryFilter -> its option."""


def with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the filter options to a command; it gets them as one TrajectoryFilter, its argument `wanted`."""
    own = inspect.signature(command)

    def filtered(**arguments: Any) -> None:
        fields = {name: arguments.pop(name) for name in OPTIONS}
        command(**arguments, wanted=TrajectoryFilter(**fields))

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in OPTIONS.items()
    ]
    kept = [parameter for parameter in own.parameters.values() if parameter.name != "wanted"]
    filtered.__name__, filtered.__doc__ = command.__name__, command.__doc__
    filtered.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    filtered.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *options)}
    return filtered


_UNSOUND = 1
"""Exit code when something is wrong with what was looked into."""

Where = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A run's name or folder, an archive's folder, or a redis:// address."),
]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run, beside a redis:// address.")]
RunsDir = Annotated[Path, typer.Option(help="Where the runs' folders are.")]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="A tokenizer.json or its folder, instead of the run's own.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many trajectories.")]
Lines = Annotated[int, typer.Option(min=1, help="At most this many lines.")]

app = typer.Typer(
    name="python -m buffer",
    help="Look into a run's store or an archive of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("ls")
@with_filters
def ls(
    where: Where,
    wanted: TrajectoryFilter,
    trajectories: Annotated[bool, typer.Option("--trajectories", "-t", help="A line each, not one per group.")] = False,
    limit: Lines = 50,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """List groups, or trajectories."""
    with _opened(where, run, runs_dir) as source:
        found = source.read(wanted, decode=_decoder(source, tokenizer, wanted))
        table, count = (list_trajectories if trajectories else list_groups)(found, limit=limit)
        make_console().print(table if count else "nothing matches")
        if count == limit:
            print(f"the first {limit}; more with --limit")


@app.command()
def show(
    where: Where,
    trajectory_id: Annotated[str, typer.Argument(metavar="ID", help="Of the trajectory, as `ls -t` tells it.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="A line for each token.")] = False,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show one trajectory: where it is from, what it got, every token's version."""
    with _opened(where, run, runs_dir) as source:
        stored = next(source.read(TrajectoryFilter(id=trajectory_id), decode=None), None)
        if stored is None:
            raise ConfigError(f"ID must be a trajectory's in {where}, got {trajectory_id!r}: `ls -t` tells them.")
        decode = find_decoder(tokenizer, candidates=source.model_paths())
        console = make_console()
        console.print(show_facts(stored, step_versions=source.step_versions()))
        console.print()
        console.print((show_tokens if tokens else show_stretches)(stored.trajectory, decode=decode))


@app.command()
@with_filters
def stats(
    where: Where,
    wanted: TrajectoryFilter,
    limit: Limit = None,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Count by outcome and data source; distributions of reward, length and lag."""
    with _opened(where, run, runs_dir) as source:
        found = source.read(wanted, decode=_decoder(source, tokenizer, wanted))
        told = Stats(islice(found, limit), step_versions=source.step_versions())
        console = make_console()
        if not told.all.tokens:
            console.print("nothing matches")
            return
        for table in told.tables():
            console.print(table)
            console.print()


@app.command("export")
@with_filters
def export_file(
    where: Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file to be made: .parquet or .jsonl.")],
    wanted: TrajectoryFilter,
    limit: Limit = None,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write trajectories to one Parquet or JSON-lines file."""
    with _opened(where, run, runs_dir) as source:
        decode = find_decoder(tokenizer, candidates=source.model_paths())
        _check_text(wanted, decode)
        count = export(islice(source.read(wanted, decode=decode), limit), out, decode=decode)
        print(f"{count} trajectories in {out}")


@app.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="As `export` writes them: .jsonl, .parquet.")],
    into: Annotated[str, typer.Option("--into", metavar="ARCHIVE", help="The archive's folder, to be made.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Make an archive of rollouts in files, all of them or none."""
    done = import_rollouts(files, into, runs_dir=runs_dir)
    print(f"{done.groups} groups, {done.trajectories} trajectories in {into}")


@app.command()
def refused(
    where: Where,
    is_json: Annotated[bool, typer.Option("--json", help="A JSON object each, with all bytes that are kept.")] = False,
    limit: Lines = 50,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the newest frames that the broker turned away: why, how large they are, how they begin."""
    with _opened(where, run, runs_dir) as source:
        if not isinstance(source, StoreSource):
            raise ConfigError(f"SOURCE must be a run or a server, got the archive {where}: a store alone keeps frames.")
        frames = source.refused_frames()
    if is_json:
        print("".join(f"{line}\n" for line in as_json(frames[:limit])), end="")
        return
    make_console().print(list_frames(frames[:limit]) if frames else "nothing was refused")
    if len(frames) > limit:
        print(f"the newest {limit}; more with --limit")


@app.command()
def verify(where: Where, run: RunName = None, runs_dir: RunsDir = Path("runs")) -> None:
    """Add everything up anew; exit 1 when anything is lost, doubled or damaged."""
    with _opened(where, run, runs_dir) as source:
        if isinstance(source, StoreSource):
            books = source.audit()
            lines, is_sound = tell_audit(books), books.is_sound
        else:
            check = source.archive.check()
            lines, is_sound = tell_check(check), check.is_sound
        print("\n".join(lines))
    if not is_sound:
        raise typer.Exit(_UNSOUND)


@contextmanager
def _opened(where: str, run_name: str | None, runs_dir: Path) -> Iterator[ArchiveSource | StoreSource]:
    """The source; ends with exit code 1 when a part of it could not be read."""
    with open_source(where, run_name=run_name, runs_dir=runs_dir) as source:
        yield source
    if isinstance(source, ArchiveSource) and source.num_refused:
        raise typer.Exit(_UNSOUND)


def _decoder(source: ArchiveSource | StoreSource, tokenizer: Path | None, wanted: TrajectoryFilter) -> Decode | None:
    """Needed for a filter on text alone."""
    if wanted.text is None:
        return None
    decode = find_decoder(tokenizer, candidates=source.model_paths())
    _check_text(wanted, decode)
    return decode


def _check_text(wanted: TrajectoryFilter, decode: Decode | None) -> None:
    if wanted.text is not None and decode is None:
        raise ConfigError("--text must have a tokenizer to decode with, and none was found: name one with --tokenizer.")
