"""`python -m buffer show`: one trajectory, whole."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby, islice, pairwise
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.buffer.archive.trajectory_filter import Decode, StoredTrajectory
from slipstream.buffer.records import FRAME_BYTES_KEPT
from slipstream.buffer.trajectory import Trajectory

# @@ What the commands print with: tables that keep their columns in a pipe, and text that no model can break out of.
_PIPED_WIDTH = 180
"""Characters, where there is no terminal to ask."""


def make_console() -> Console:
    """For standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without lines; the columns named in `numbers` are flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: Any) -> None:
    """Plain text in every cell: nothing in it is markup."""
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def printable(text: str) -> str:
    """`text` with everything but letters and line ends spelt out: models write whatever moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def span(values: list[int]) -> str:
    """`3`, `3-5`, or nothing."""
    if not values:
        return ""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def distribution(values: list[float]) -> list[str]:
    """Mean, least, 10 %, median, 90 %, greatest."""
    points = np.quantile(values, (0, 0.1, 0.5, 0.9, 1))
    return [f"{value:.4g}" for value in (np.mean(values), *points)]


# @@ `python -m buffer ls`: a line for each group, or for each trajectory.
_COMMON = ("outcome", "tokens", "versions", "steps", "data source", "reason")
_NUMBERS = ("members", "reward", "tokens", "index")


def list_groups(found: Iterable[StoredTrajectory], *, limit: int) -> tuple[Table, int]:
    """(a line per group, number of lines): wanted members are counted, rewards and tokens are their means."""
    table = make_table("group", "members", "reward", *_COMMON, numbers=_NUMBERS)
    for group in islice(_groups(found), limit):
        rewards = sum(member.trajectory.reward.total for member in group) / len(group)
        tokens = sum(member.trajectory.num_tokens for member in group) / len(group)
        versions = sorted({version for member in group for version in member.versions})
        first = group[0]
        _add(table, first, first.trajectory.group_id, len(group), f"{rewards:.3f}", tokens=tokens, versions=versions)
    return table, table.row_count


def list_trajectories(found: Iterable[StoredTrajectory], *, limit: int) -> tuple[Table, int]:
    """(a line per trajectory, number of lines)."""
    table = make_table("id", "reward", *_COMMON, numbers=_NUMBERS)
    for stored in islice(found, limit):
        trajectory = stored.trajectory
        reward = f"{trajectory.reward.total:.3f}" if trajectory.reward.status == "ok" else trajectory.reward.status
        _add(table, stored, trajectory.id, reward, tokens=trajectory.num_tokens, versions=stored.versions)
    return table, table.row_count


def _groups(found: Iterable[StoredTrajectory]) -> Iterator[list[StoredTrajectory]]:
    for _, members in groupby(found, key=lambda stored: stored.trajectory.group_id):
        yield list(members)


def _add(table: Table, stored: StoredTrajectory, *cells: object, tokens: float, versions: list[int]) -> None:
    steps = ",".join(map(str, stored.steps))
    common = (stored.state, f"{tokens:g}", span(versions), steps, stored.trajectory.data_source, stored.reason)
    add_row(table, *cells, *common)


# @@ `python -m buffer refused`: what the broker turned away, as far as the store keeps it.
_HEX_BYTES = 16
_TEXT_BYTES = 64
"""First bytes that a line of the table shows, as numbers and as text."""


class RefusedFrame(msgspec.Struct, frozen=True):
    """Example: RefusedFrame(reason="malformed", num_bytes=4, is_cut=False, hex="6a756e6b")."""

    reason: str
    """Why, as the counter `refused` names it."""
    num_bytes: int
    """Bytes of it that are kept; 0 for a Hello, which may hold a token."""
    is_cut: bool
    """Whether it may have been longer."""
    hex: str
    """Those bytes, two digits each."""


def list_frames(frames: Iterable[tuple[str, bytes]]) -> Table:
    """A line for each (reason, first bytes)."""
    table = make_table("reason", "bytes", "begins with", "as text", numbers=("bytes",))
    for reason, kept in frames:
        size = f"{len(kept)}+" if _is_cut(kept) else len(kept)
        add_row(table, reason, size, kept[:_HEX_BYTES].hex(" "), _as_text(kept[:_TEXT_BYTES]))
    return table


def as_json(frames: Iterable[tuple[str, bytes]]) -> Iterator[str]:
    """A RefusedFrame as a line of JSON for each (reason, first bytes)."""
    for reason, kept in frames:
        yield msgspec.json.encode(RefusedFrame(reason, len(kept), _is_cut(kept), kept.hex())).decode()


def _is_cut(kept: bytes) -> bool:
    return len(kept) >= FRAME_BYTES_KEPT


def _as_text(kept: bytes) -> str:
    """ASCII, with a dot for whatever is none."""
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in kept)


def show_facts(stored: StoredTrajectory, *, step_versions: dict[int, int]) -> Table:
    """Where it came from, what it got, what became of it."""
    table = make_table("", "")
    for name, value in _facts(stored, step_versions):
        add_row(table, name, value)
    return table


def show_stretches(trajectory: Trajectory, *, decode: Decode | None) -> Table:
    """Its tokens in stretches that one version wrote, or nobody: places, version, mean log-probability, content."""
    table = make_table("tokens", "written by", "mean logprob", "text" if decode else "token ids", numbers=("tokens",))
    for start, end, version in _stretches(trajectory):
        tokens = trajectory.token_ids[start:end]
        content = decode(tokens) if decode else " ".join(map(str, tokens))
        mean = f"{float(trajectory.generator_logprobs[start:end].mean()):.3f}" if version >= 0 else ""
        add_row(table, f"{start}-{end - 1}", _author(version), mean, content)
    return table


def show_tokens(trajectory: Trajectory, *, decode: Decode | None) -> Table:
    """A line for each token."""
    table = make_table("place", "id", "written by", "logprob", "text", numbers=("place", "id", "logprob"))
    versions = trajectory.token_versions().tolist()
    logprobs = trajectory.generator_logprobs.tolist()
    for place, (token, version, logprob) in enumerate(
        zip(trajectory.token_ids.tolist(), versions, logprobs, strict=True)
    ):
        text = decode(trajectory.token_ids[place : place + 1]) if decode else ""
        add_row(table, place, token, _author(version), f"{logprob:.4f}" if version >= 0 else "", repr(text)[1:-1])
    return table


def _facts(stored: StoredTrajectory, step_versions: dict[int, int]) -> Iterator[tuple[str, object]]:
    trajectory = stored.trajectory
    reward, sampling = trajectory.reward, trajectory.sampling
    yield "trajectory", trajectory.id
    yield "group", f"{trajectory.group_id}, member {trajectory.index}, attempt {trajectory.attempt}"
    yield "prompt", f"{trajectory.prompt_uid} of {trajectory.data_source}"
    yield "outcome", stored.state + (f": {stored.reason}" if stored.reason else "")
    for step in stored.steps:
        yield f"step {step}", _training(stored, step_versions.get(step))
    parts = "".join(f", {name} {value:g}" for name, value in reward.parts.items())
    yield "reward", f"{reward.total:g}{parts}, {'right' if reward.is_correct else 'not entirely right'}"
    if reward.status != "ok":
        yield "reward status", f"{reward.status}: {reward.detail}"
    yield "tokens", f"{trajectory.num_tokens}, of which the model wrote {stored.response_tokens}"
    yield "ended by", f"{trajectory.stop_reason} after {trajectory.num_turns} turn(s)"
    yield "versions", ", ".join(map(str, stored.versions))
    limits = f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, at most {sampling.max_tokens} tokens"
    yield "sampling", f"temperature {sampling.temperature:g}, {limits}, seed {sampling.seed}"
    seconds = trajectory.finished_at - trajectory.started_at
    yield "generator", f"{trajectory.generator_id}, {_moment(trajectory.started_at)}, {seconds:.2f} s"
    if stored.archived_at is not None:
        yield "archived", _moment(stored.archived_at)
    if trajectory.extras:
        yield "extras", trajectory.extras


def _training(stored: StoredTrajectory, version: int | None) -> str:
    if version is None:
        return "trained on it"
    return f"trained on it at version {version}: lag {version - stored.oldest_version}"


def _stretches(trajectory: Trajectory) -> Iterator[tuple[int, int, int]]:
    """(first token, token after the last, version or -1)."""
    versions = trajectory.token_versions()
    borders = np.flatnonzero(np.diff(versions)) + 1
    for start, end in pairwise([0, *borders.tolist(), len(versions)]):
        yield start, end, int(versions[start])


def _author(version: int) -> str:
    return f"version {version}" if version >= 0 else ""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
