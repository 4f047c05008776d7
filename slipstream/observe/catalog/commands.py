"""`slipstream data`: one function per command, and their shared options."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from slipstream.buffer.archive.trajectory_filter import NAMES, TrajectoryFilter, parse_conditions
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog.sources import FileSource, Source, StoreSource, decoder_of, open_source
from slipstream.observe.catalog.tables import (
    as_json,
    describe_audit,
    describe_check,
    describe_totals,
    list_frames,
    list_groups,
    list_trajectories,
    show_facts,
    show_segments,
    show_tokens,
)
from slipstream.observe.catalog.token_decoder import TokenDecoder
from slipstream.observe.catalog.transfer import export, fetch_archive, import_rollouts
from slipstream.runtime.command_line import RunName, RunsDir, SourceWord, TokenizerPath, make_app, make_console

_UNSOUND = 1
"""Exit code when a defect was found."""

app = make_app("Inspect a run's store or an archive of it.")


Limit = Annotated[int | None, typer.Option(min=1, help="Most trajectories.")]
Lines = Annotated[int, typer.Option(min=1, help="Most lines.")]
_ALL_HOLD = f"All must hold, such as \"reward>=0.5 step<=40 outcome=retired text='the answer'\"; of {', '.join(NAMES)}."
Conditions = Annotated[str, typer.Option("--where", metavar="CONDITIONS", help=_ALL_HOLD)]


@app.command("ls")
def ls(
    where: SourceWord,
    conditions: Conditions = "",
    trajectories: Annotated[bool, typer.Option("--trajectories", "-t", help="A line each, not one per group.")] = False,
    limit: Lines = 50,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """List groups, or trajectories, newest first."""
    selected = parse_conditions(conditions)
    with _open(where, run, runs_dir) as source:
        decoder = _decoder(source, tokenizer, selected, is_optional=False)
        found = source.read(selected, decode=decoder, is_newest_first=True)
        table, count = (list_trajectories if trajectories else list_groups)(found, limit=limit, decoder=decoder)
        make_console().print(table if count else "nothing matches")
        if count == limit:
            print(f"the newest {limit}; more with --limit")


@app.command()
def show(
    where: SourceWord,
    trajectory_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the trajectory, from `ls -t`.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="A line for each token.")] = False,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show one trajectory: origin, reward, version of every token."""
    with _open(where, run, runs_dir) as source:
        stored = next(source.read(TrajectoryFilter(id=trajectory_id), decode=None), None)
        if stored is None:
            raise ConfigError(f"ID must be a trajectory in {where}, got {trajectory_id!r}: `ls -t` lists the ids.")
        parts = (show_tokens if tokens else show_segments)(stored.trajectory, decode=decoder_of(source, tokenizer))
        console = make_console()
        console.print(show_facts(stored, step_versions=source.step_versions()))
        console.print()
        console.print(parts)


@app.command()
def stats(
    where: SourceWord,
    conditions: Conditions = "",
    limit: Limit = None,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show counts by outcome, and how rewards, lengths and lags spread."""
    selected = parse_conditions(conditions)
    with _open(where, run, runs_dir) as source:
        found = source.read(selected, decode=_decoder(source, tokenizer, selected))
        tables = describe_totals(islice(found, limit), step_versions=source.step_versions())
        console = make_console()
        if not tables:
            console.print("nothing matches")
        for table in tables:
            console.print(table)
            console.print()


@app.command("export")
def export_file(
    where: SourceWord,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to create: .parquet or .jsonl.")],
    conditions: Conditions = "",
    limit: Limit = None,
    tokenizer: TokenizerPath = None,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write trajectories to one Parquet or JSON-lines file."""
    selected = parse_conditions(conditions)
    with _open(where, run, runs_dir) as source:
        if isinstance(source, FileSource) and source.is_verl:
            raise ConfigError(f"SOURCE must hold tokens to be exported, got {where}: verl's rollouts are texts alone.")
        decode = _decoder(source, tokenizer, selected, is_optional=False)
        count = export(islice(source.read(selected, decode=decode), limit), out, decode=decode)
        print(f"{count} trajectories in {out}")


@app.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="As `export` writes them: .jsonl, .parquet.")],
    into: Annotated[str, typer.Option("--into", metavar="ARCHIVE", help="Folder of the archive to create.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Make an archive of rollouts in files: of all of them, or none."""
    imported = import_rollouts(files, into, runs_dir=runs_dir)
    print(f"{imported.groups} groups, {imported.trajectories} trajectories in {into}")


@app.command()
def fetch(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Archive in `storage.uri`: s3://BUCKET/RUNS/NAME/archive.")],
    into: Annotated[Path, typer.Option("--into", metavar="FOLDER", help="Folder of the copy.")],
) -> None:
    """Copy an archive from an object store, skipping files that the folder already has."""
    fetched = fetch_archive(uri, into)
    print(f"{fetched.groups} groups, {fetched.trajectories} trajectories in {into}")


@app.command()
def refused(
    where: SourceWord,
    is_json: Annotated[bool, typer.Option("--json", help="A JSON object each, with all stored bytes.")] = False,
    limit: Lines = 50,
    run: RunName = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the newest frames that the broker rejected, with the reason."""
    with _open(where, run, runs_dir) as source:
        if not isinstance(source, StoreSource):
            raise ConfigError(f"SOURCE must be a run or a server, got {where}: only a store has rejected frames.")
        source.store.run_state()  # raises for an unknown run
        frames = source.store.quarantined_frames()
    if is_json:
        print("".join(f"{line}\n" for line in as_json(frames[:limit])), end="")
        return
    make_console().print(list_frames(frames[:limit]) if frames else "nothing was refused")
    if len(frames) > limit:
        print(f"the newest {limit}; more with --limit")


@app.command()
def verify(where: SourceWord, run: RunName = None, runs_dir: RunsDir = Path("runs")) -> None:
    """Recompute the accounting of a store, and check the archive byte by byte.

    Exit codes: 0, 1 if anything is lost, duplicated or damaged.
    """
    with _open(where, run, runs_dir) as source:
        if isinstance(source, FileSource):
            raise ConfigError(f"SOURCE must be a run, a server or an archive, got {where}: a file has no accounts.")
        lines, is_sound = [], True
        if isinstance(source, StoreSource):
            # A remote server's archive is on its machine.
            missing = list if source.run_folder else None
            audit = source.store.audit(archived=source.archive.steps if source.archive else missing)
            lines, is_sound = describe_audit(audit), audit.is_sound
        if source.archive:
            check = source.archive.check()
            lines, is_sound = lines + describe_check(check), is_sound and check.is_sound
        print("\n".join(lines))
    if not is_sound:
        raise typer.Exit(_UNSOUND)


@contextmanager
def _open(where: str, run_name: str | None, runs_dir: Path) -> Iterator[Source]:
    """Open a source; exit with 1 if part of it is unreadable."""
    with open_source(where, run_name=run_name, runs_dir=runs_dir) as source:
        if notes := source.notes:
            print(f"warning: {' '.join(notes)}", file=sys.stderr)
        yield source
    if notes or source.num_unreadable:
        raise typer.Exit(_UNSOUND)


def _decoder(
    source: Source, tokenizer: Path | None, selected: TrajectoryFilter, *, is_optional: bool = True
) -> TokenDecoder | None:
    decode = None if is_optional and selected.text is None else decoder_of(source, tokenizer)
    if selected.text is not None and decode is None:
        raise ConfigError(
            "a condition on text needs a tokenizer to decode with, and none was found: --tokenizer names one."
        )
    return decode
