"""Explains where a step, a trajectory or a policy version came from, from the step ledger down to seeds and rewards.

Reads the store alone, of a run in progress or of one that has ended.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Trajectory, group_of, lease_of
from slipstream.configs.base import ConfigError
from slipstream.runtime.run_folder import find_run

_STORE_TIMEOUT_S = 30.0

console = Console(highlight=False, soft_wrap=True)


def explain(kind: Literal["step", "trajectory", "version"], which: str, run: Sequence[str]) -> None:
    """Print where a part of a run came from; `run` as for `find_run`. Raises ConfigError, ReplayBufferError."""
    if kind != "trajectory" and not which.isdecimal():
        raise ConfigError(f"{kind} must be a whole number, got {which!r}.")
    with open_run_store(find_run(run, command="explain"), timeout_s=_STORE_TIMEOUT_S, starts_server=True) as store:
        if kind == "step":
            explain_step(store, int(which))
        elif kind == "trajectory":
            explain_trajectory(store, which)
        else:
            explain_version(store, int(which))


def explain_step(store: Store, step: int) -> None:
    """Print the trajectories that a step trained on, and the weights that it produced. Raises ConfigError."""
    entry = next((entry for entry in store.ledger(first_step=step) if entry.step == step), None)
    if entry is None:
        newest = store.run_state().step
        raise ConfigError(f"step must be one of the ledger's, 1 to {newest}, got {step}.")
    console.print(f"step {step}: {len(entry.group_ids)} groups, learner at version {entry.version}", style="bold")
    console.print(f"seed {entry.seed}, settings {entry.config_hash}, claim fence {entry.fence}")
    console.print(f"weights after it: {_weights_of_step(store, step)}")
    for line in _deviations(entry):
        console.print(line)
    console.print(_table(_rows(store, entry)))


def explain_trajectory(store: Store, trajectory_id: str) -> None:
    """Print the origin of a trajectory, its weights, and the steps that trained on it. Raises ConfigError."""
    group_id = group_of(lease_of(trajectory_id))
    found = [member for member in _stored(store, group_id) if member.id == trajectory_id]
    steps = [entry for entry in store.ledger() if any(trajectory_id in names for names in entry.trajectory_ids)]
    if not found and not steps:
        raise ConfigError(f"trajectory {trajectory_id!r} must be in the store or the ledger, but is in neither.")
    console.print(f"trajectory {trajectory_id} of group {group_id}", style="bold")
    for trajectory in found:
        console.print(*_facts(trajectory), sep="\n")
    if not found:
        console.print("its tokens have left the store")
    for entry in steps:
        lag = "" if not found else f", lag {entry.version - _oldest(found[0])} of its oldest token"
        console.print(f"trained on in step {entry.step}, learner at version {entry.version}{lag}")
    for version in sorted({span.version for trajectory in found for span in trajectory.version_spans}):
        explain_version(store, version)


def explain_version(store: Store, version: int) -> None:
    """Print the step that produced a policy version, and its checksum. Raises ConfigError."""
    entries = [entry for entry in store.versions() if entry.version == version]
    if not entries:
        raise ConfigError(f"version must have been published by this run, got {version}.")
    for entry in entries:
        origin = f"the weights after step {entry.step}" if entry.step else "the initial weights"
        console.print(f"version {version}: {origin}, checksum {entry.checksum}")


def _deviations(entry: StepEntry) -> list[str]:
    """List reused groups, weighted losses and groups of other archives: what a plain run does not have."""
    reused = [group_id for group_id, is_reused in zip(entry.group_ids, entry.reused, strict=False) if is_reused]
    weighted = [f"{group_id} x {weight:.3g}" for group_id, weight in zip(entry.group_ids, entry.weights, strict=False)]
    lines = (("used again", reused), ("losses weighted", weighted), ("mixed in", entry.mixed_group_ids))
    return [f"{label}: {', '.join(groups)}" for label, groups in lines if groups]


def _weights_of_step(store: Store, step: int) -> str:
    found = [f"version {entry.version} (checksum {entry.checksum})" for entry in store.versions() if entry.step == step]
    return ", ".join(found) or "not published"


def _rows(store: Store, entry: StepEntry) -> Iterable[tuple[str, ...]]:
    for group_id, names in zip(entry.group_ids, entry.trajectory_ids, strict=True):
        members = {member.id: member for member in _stored(store, group_id)}
        for name in names:
            yield _row(name, members.get(name))


def _row(name: str, trajectory: Trajectory | None) -> tuple[str, ...]:
    if trajectory is None:
        return (name, "its tokens have left the store", "", "", "", "")
    return (
        name,
        trajectory.prompt_uid,
        trajectory.generator_id,
        str(trajectory.sampling.seed),
        " ".join(str(span.version) for span in trajectory.version_spans),
        f"{trajectory.reward.total:.3f}",
    )


def _table(rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table("trajectory", "prompt", "generator", "seed", "versions", "reward")
    for row in rows:
        table.add_row(*row)
    return table


def _facts(trajectory: Trajectory) -> list[str]:
    sampling, reward = trajectory.sampling, trajectory.reward
    spans = ", ".join(f"from token {span.first_token} version {span.version}" for span in trajectory.version_spans)
    parts = ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
    return [
        f"prompt {trajectory.prompt_uid} of {trajectory.data_source}, attempt {trajectory.attempt}",
        f"made by {trajectory.generator_id} in {trajectory.finished_at - trajectory.started_at:.2f} s, "
        f"seed {sampling.seed}, temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}",
        f"{trajectory.num_tokens} tokens, {int(trajectory.model_mask.sum())} of them the model's ({spans}), "
        f"ended by {trajectory.stop_reason}",
        f"reward {reward.total:g} ({parts or 'no parts'}), status {reward.status}",
    ]


def _oldest(trajectory: Trajectory) -> int:
    return min(span.version for span in trajectory.version_spans)


def _stored(store: Store, group_id: str) -> list[Trajectory]:
    # Payloads leave the store when a checkpoint retires their group; the ledger keeps the ids.
    try:
        (payloads,) = store.fetch([group_id])
    except StaleFenceError:
        return []
    return [unpack(payload) for payload in payloads]
