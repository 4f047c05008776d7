"""`slipstream data`: one function per command, their shared options, and tables of trajectories."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.table import Table

from slipstream.buffer.accounting import Audit
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.archive.trajectory_filter import (
    GROUP_STATES,
    NAMES,
    Decode,
    StoredTrajectory,
    TrajectoryFilter,
    parse_conditions,
)
from slipstream.buffer.records import FRAME_BYTES_KEPT
from slipstream.buffer.trajectory import Trajectory, lag_histogram
from slipstream.configs.base import ConfigError
from slipstream.observe.catalog.sources import FileSource, Source, StoreSource, decoder_of, open_source
from slipstream.observe.catalog.token_decoder import TokenDecoder
from slipstream.observe.catalog.transfer import export, fetch_archive, import_rollouts
from slipstream.runtime.command_line import (
    RunName,
    RunsDir,
    SourceWord,
    TokenizerPath,
    add_row,
    make_app,
    make_console,
    make_table,
)

_COMMON = ("outcome", "tokens", "versions", "steps", "data source", "reason")
_TEXTS = ("prompt", "answer")
_NUMBERS = ("members", "reward", "tokens", "index")
_UNSOUND = 1
"""Exit code when a defect was found."""

app = make_app("Inspect a run's store or an archive of it.")


Limit = Annotated[int | None, typer.Option(min=1, help="Most trajectories.")]
Lines = Annotated[int, typer.Option(min=1, help="Most lines.")]
_ALL_HOLD = f"All must hold, such as \"reward>=0.5 step<=40 outcome=retired text='the answer'\"; of {', '.join(NAMES)}."
Conditions = Annotated[str, typer.Option("--where", metavar="CONDITIONS", help=_ALL_HOLD)]


def list_groups(found: Iterable[StoredTrajectory], *, limit: int, decoder: TokenDecoder | None) -> tuple[Table, int]:
    """Return (table with a line per group of selected members, number of lines). The text is of one member."""
    table = make_table("group", "members", "reward", *_TEXTS[: 2 * (decoder is not None)], *_COMMON, numbers=_NUMBERS)
    groups = (list(members) for _, members in groupby(found, key=lambda stored: stored.trajectory.group_id))
    for group in islice(groups, limit):
        rewards = sum(member.trajectory.reward.total for member in group) / len(group)
        tokens = sum(member.trajectory.num_tokens for member in group) / len(group)
        versions = sorted({version for member in group for version in member.versions})
        first = group[-1]
        texts = decoder.excerpts(first.trajectory) if decoder else ()
        mean = f"{rewards:.3f}"
        _add(table, first, first.trajectory.group_id, len(group), mean, *texts, tokens=tokens, versions=versions)
    return table, table.row_count


def list_trajectories(
    found: Iterable[StoredTrajectory], *, limit: int, decoder: TokenDecoder | None
) -> tuple[Table, int]:
    """Return (table with a line per trajectory, number of lines)."""
    table = make_table("id", "reward", *_TEXTS[: 2 * (decoder is not None)], *_COMMON, numbers=_NUMBERS)
    for stored in islice(found, limit):
        trajectory = stored.trajectory
        reward = f"{trajectory.reward.total:.3f}" if trajectory.reward.status == "ok" else trajectory.reward.status
        texts = decoder.excerpts(trajectory) if decoder else ()
        _add(table, stored, trajectory.id, reward, *texts, tokens=trajectory.num_tokens, versions=stored.versions)
    return table, table.row_count


def _add(table: Table, stored: StoredTrajectory, *cells: object, tokens: float, versions: list[int]) -> None:
    steps = ",".join(map(str, stored.steps))
    # Such as `3-5`, or `3` for a single version.
    span = "-".join(map(str, dict.fromkeys((*versions[:1], *versions[-1:]))))
    add_row(table, *cells, stored.state, f"{tokens:g}", span, steps, stored.trajectory.data_source, stored.reason)


_HEX_BYTES = 16
_TEXT_BYTES = 64
"""First bytes shown in a line, as hex and as text."""


def list_frames(frames: Iterable[tuple[str, bytes]]) -> Table:
    """Table with a line per (reason, first bytes)."""
    table = make_table("reason", "bytes", "begins with", "as text", numbers=("bytes",))
    for reason, kept in frames:
        size = f"{len(kept)}+" if len(kept) >= FRAME_BYTES_KEPT else len(kept)
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in kept[:_TEXT_BYTES])
        add_row(table, reason, size, kept[:_HEX_BYTES].hex(" "), text)
    return table


def as_json(frames: Iterable[tuple[str, bytes]]) -> Iterator[str]:
    """Yield a JSON line per (reason, first bytes)."""
    for reason, kept in frames:
        is_cut = len(kept) >= FRAME_BYTES_KEPT
        frame = {"reason": reason, "num_bytes": len(kept), "is_cut": is_cut, "hex": kept.hex()}
        yield msgspec.json.encode(frame).decode()


def show_facts(stored: StoredTrajectory, *, step_versions: dict[int, int]) -> Table:
    """Table of a trajectory's origin, reward, and use."""
    table = make_table("", "")
    for row in _facts(stored, step_versions):
        add_row(table, *row)
    return table


def show_segments(trajectory: Trajectory, *, decode: Decode | None) -> Table:
    """Table of token ranges by sampling version."""
    table = make_table("tokens", "written by", "mean logprob", "text" if decode else "token ids", numbers=("tokens",))
    versions = trajectory.token_versions()
    borders = np.flatnonzero(np.diff(versions)) + 1
    for start, end in pairwise([0, *borders.tolist(), len(versions)]):
        tokens, version = trajectory.token_ids[start:end], int(versions[start])
        content = decode(tokens) if decode else " ".join(map(str, tokens))
        mean = f"{float(trajectory.generator_logprobs[start:end].mean()):.3f}" if version >= 0 else ""
        add_row(table, f"{start}-{end - 1}", _author(version), mean, content)
    return table


def show_tokens(trajectory: Trajectory, *, decode: Decode | None) -> Table:
    """Table with a line per token."""
    table = make_table("index", "id", "written by", "logprob", "text", numbers=("index", "id", "logprob"))
    columns = (trajectory.token_ids, trajectory.token_versions(), trajectory.generator_logprobs)
    for index, (token, version, logprob) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        text = decode(trajectory.token_ids[index : index + 1]) if decode else ""
        add_row(table, index, token, _author(version), f"{logprob:.4f}" if version >= 0 else "", repr(text)[1:-1])
    return table


def _facts(stored: StoredTrajectory, step_versions: dict[int, int]) -> Iterator[tuple[str, object]]:
    trajectory = stored.trajectory
    reward, sampling = trajectory.reward, trajectory.sampling
    yield "trajectory", trajectory.id
    yield "group", f"{trajectory.group_id}, member {trajectory.index}, attempt {trajectory.attempt}"
    yield "prompt", f"{trajectory.prompt_uid} of {trajectory.data_source}"
    yield "outcome", stored.state + (f": {stored.reason}" if stored.reason else "")
    for step in stored.steps:
        version = step_versions.get(step)
        lag = "" if version is None else f" at version {version}: lag {version - stored.oldest_version}"
        yield f"step {step}", f"trained on it{lag}"
    parts = "".join(f", {name} {value:g}" for name, value in reward.parts.items())
    yield "reward", f"{reward.total:g}{parts}, {'right' if reward.is_correct else 'not entirely right'}"
    if reward.status != "ok":
        yield "reward status", f"{reward.status}: {reward.detail}"
    elif reward.detail:
        yield "answer", reward.detail
    yield "tokens", f"{trajectory.num_tokens}, of which the model wrote {stored.response_tokens}"
    yield "ended by", f"{trajectory.stop_reason} after {trajectory.num_turns} turn(s)"
    yield "versions", ", ".join(map(str, stored.versions))
    filters = f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p or 0:g}"
    limits = f"at most {sampling.max_tokens} tokens, seed {sampling.seed}"
    yield "sampling", f"temperature {sampling.temperature:g}, {filters}, {limits}"
    seconds = trajectory.finished_at - trajectory.started_at
    yield "generator", f"{trajectory.generator_id}, {_moment(trajectory.started_at)}, {seconds:.2f} s"
    if stored.archived_at is not None:
        yield "archived", _moment(stored.archived_at)
    if trajectory.extras:
        yield "extras", trajectory.extras


def _author(version: int) -> str:
    return f"version {version}" if version >= 0 else ""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_ADDENDS = ("buffered", "claimed", "used", "retired", "rejected", "expired", "quarantined")


def describe_audit(audit: Audit) -> list[str]:
    """A store's totals and problems, one per line."""
    sums = " + ".join(f"{name} {getattr(audit, name)}" for name in _ADDENDS)
    total = sum(getattr(audit, name) for name in _ADDENDS)
    return [
        f"accepted = {' + '.join(_ADDENDS)}",
        f"{audit.accepted} {'=' if audit.accepted == total else 'is not'} {total} = {sums}",
        f"lost={audit.lost} duplicated={audit.duplicated} skipped_prompts={audit.skipped_prompts}",
        *audit.problems,
    ]


def describe_check(check: ArchiveCheck) -> list[str]:
    """An archive's totals and problems, one per line."""
    return [
        f"{check.shards} shards, {check.groups} groups, {check.trajectories} trajectories, {check.steps} steps",
        f"damaged={check.damaged} duplicated={check.duplicated} missing={check.missing}",
        *check.problems,
    ]


_POINTS = ("mean", "least", "10%", "median", "90%", "greatest")
_MEASURES = ("reward", "tokens", "response tokens", "lag of the oldest token")


class _Totals:
    """Totals of one kind of trajectory."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.num_sampled = self.num_correct = self.num_failed = 0
        self.values: dict[str, list[float]] = {name: [] for name in _MEASURES}
        """Lags are per step that trained on the trajectory."""
        self.lags_of_tokens = Counter[int]()
        """Lag -> model-written tokens, per step that trained on them."""

    def add(self, stored: StoredTrajectory, *, step_versions: dict[int, int]) -> None:
        # Exclude failed rewards and greedy baselines.
        trajectory = stored.trajectory
        self.groups.add(trajectory.group_id)
        is_ok, is_sampled = trajectory.reward.status == "ok", not trajectory.is_greedy
        self.num_failed += not is_ok
        self.num_sampled += is_sampled
        self.num_correct += is_sampled and is_ok and trajectory.reward.is_correct
        rewards = [trajectory.reward.total] if is_ok and is_sampled else []
        learner_versions = [step_versions[step] for step in stored.steps if step in step_versions]
        lags = [version - stored.oldest_version for version in learner_versions]
        found: tuple[Sequence[float], ...] = (rewards, [trajectory.num_tokens], [stored.response_tokens], lags)
        for name, values in zip(_MEASURES, found, strict=True):
            self.values[name] += values
        for version in learner_versions:
            self.lags_of_tokens.update(lag_histogram([trajectory], learner_version=version))


def describe_totals(found: Iterable[StoredTrajectory], *, step_versions: dict[int, int]) -> list[Table]:
    """Tables of totals by outcome, reason, and data source; none without trajectories."""
    everything = _Totals()
    kinds: dict[str, dict[str, _Totals]] = {"outcome": {}, "reason": {}, "data source": {}}
    for stored in found:
        names = {"outcome": stored.state, "data source": stored.trajectory.data_source}
        names |= {"reason": f"{stored.state}: {stored.reason}"} if stored.reason else {}
        for totals in (everything, *(kinds[kind].setdefault(name, _Totals()) for kind, name in names.items())):
            totals.add(stored, step_versions=step_versions)
    if not everything.groups:
        return []
    kinds["outcome"] = {state: kinds["outcome"][state] for state in GROUP_STATES if state in kinds["outcome"]}
    table = make_table("", *_POINTS, numbers=_POINTS)
    for name, values in everything.values.items():
        if values:
            points = (np.mean(values), *np.quantile(values, (0, 0.1, 0.5, 0.9, 1)))
            add_row(table, name, *(f"{point:.4g}" for point in points))
    return [*(_counts(title, totals) for title, totals in kinds.items() if totals), table]


def _counts(title: str, kinds: dict[str, _Totals]) -> Table:
    counts = ("groups", "trajectories", "mean reward", "right", "failed")
    numbers = (*counts, "mean tokens", "mean response", "mean lag of tokens")
    table = make_table(title, *numbers, numbers=numbers)
    for kind, totals in kinds.items():
        reward, tokens, response, _ = (f"{np.mean(each):.4g}" if each else "-" for each in totals.values.values())
        num_lags = totals.lags_of_tokens.total()
        lag = f"{sum(lag * n for lag, n in totals.lags_of_tokens.items()) / num_lags:.4g}" if num_lags else "-"
        right = f"{totals.num_correct / max(1, totals.num_sampled):.1%}"
        sizes = (len(totals.groups), len(totals.values["tokens"]))
        add_row(table, kind, *sizes, reward, right, totals.num_failed, tokens, response, lag)
    return table


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
