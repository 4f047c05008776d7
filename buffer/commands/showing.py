"""`python -m buffer show`: one trajectory, whole."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
from rich.table import Table

from buffer.archive.stored_trajectory import StoredTrajectory
from buffer.archive.trajectory_filter import Decode
from buffer.commands.printing import add_row, make_table
from buffer.trajectory import Trajectory


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
    yield "outcome", stored.place + (f": {stored.reason}" if stored.reason else "")
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
