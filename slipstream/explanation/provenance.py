"""Provenance: where a step or a policy version came from, down to seeds and rewards."""

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import fmean

from rich.table import Table

from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.explanation.answer import shown
from slipstream.explanation.books import Books
from slipstream.runtime.console import add_row, make_table

_GONE = "its tokens are stored no more"
_NAMED = 8


def find_entry(books: Books, step: int) -> StepEntry:
    """Return a step's entry of the ledger. Raises ConfigError."""
    entry = next((entry for entry in books.entries(first_step=step) if entry.step == step), None)
    if entry is None:
        known = [entry.step for entry in books.entries()]
        steps = f"{known[0]} to {known[-1]}" if known else "which has none"
        reason = f": {books.note.rstrip('.')}" if books.note else ""
        raise ConfigError(f"step must be one of the ledger's, {steps}, got {step}{reason}.")
    return entry


def explain_step(books: Books, entry: StepEntry, members: dict[str, Trajectory]) -> Iterator[str]:
    """Yield what a step trained on, by task, maker and age, and the weights that it produced."""
    num_trajectories = sum(map(len, entry.trajectory_ids))
    yield (
        f"step {entry.step}: {num_trajectories} trajectories in {len(entry.group_ids)} groups, learner at version "
        f"{entry.version}"
    )
    yield f"seed {entry.seed}, settings {entry.config_hash}, claim fence {entry.fence}"
    yield f"weights after it: {_weights_of_step(books, entry.step)}"
    yield from _deviations(entry)
    found = list(members.values())
    if len(found) < num_trajectories:
        yield f"{num_trajectories - len(found)} of them: {_GONE}; what follows is of the others"
    if found:
        yield from _tasks(found)
        yield f"made by: {_counted(each.generator_id for each in found)}"
        lags = Counter(entry.version - _oldest(each) for each in found)
        yield f"lag of the oldest token -> trajectories: {', '.join(f'{lag}: {lags[lag]}' for lag in sorted(lags))}"
        yield f"ended by: {_counted(each.stop_reason for each in found)}"


def explain_version(books: Books, version: int) -> Iterator[str]:
    """Yield the step that produced a policy version, and its checksum. Raises ConfigError."""
    entries = [entry for entry in books.versions() if entry.version == version]
    if not entries:
        problem = books.note or "version must have been published by this run"
        raise ConfigError(f"{problem.rstrip('.')}, got {version}.")
    for entry in entries:
        origin = f"the weights after step {entry.step}" if entry.step else "the initial weights"
        yield f"version {version}: {origin}, checksum {entry.checksum}"


def _deviations(entry: StepEntry) -> list[str]:
    """List reused groups, weighted losses and groups of other archives: what a plain run does not have."""
    reused = [group_id for group_id, is_reused in zip(entry.group_ids, entry.reused, strict=False) if is_reused]
    weighted = [f"{group_id} x {weight:.3g}" for group_id, weight in zip(entry.group_ids, entry.weights, strict=False)]
    lines = (("used again", reused), ("losses weighted", weighted), ("mixed in", entry.mixed_group_ids))
    return [f"{label}: {', '.join(groups)}" for label, groups in lines if groups]


def _weights_of_step(books: Books, step: int) -> str:
    entries = books.versions()
    found = [f"version {entry.version} (checksum {entry.checksum})" for entry in entries if entry.step == step]
    return ", ".join(found) or ("not published" if entries else "not known without the store")


def _tasks(trajectories: list[Trajectory]) -> Iterator[str]:
    """Yield a line per data source, the most frequent first."""
    sources = Counter(each.data_source for each in trajectories)
    for source, count in sources.most_common(_NAMED):
        own = [each for each in trajectories if each.data_source == source]
        rewards = [each.reward.total for each in own if each.reward.status == "ok"]
        prompts = len({each.prompt_uid for each in own})
        reward = f"reward {shown(fmean(rewards))} ({shown(min(rewards))} to {shown(max(rewards))})" if rewards else ""
        failed = f"{count - len(rewards)} without a reward" if len(rewards) < count else ""
        length = f"{fmean(float(each.model_mask.sum()) for each in own):.1f} tokens by the model"
        yield f"{source}: {', '.join(filter(None, (f'{count} answers to {prompts} prompts', reward, failed, length)))}"
    if len(sources) > _NAMED:
        yield f"and {len(sources) - _NAMED} more tasks"


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    more = f", and {len(counts) - _NAMED} more" if len(counts) > _NAMED else ""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(_NAMED)) + more


def table_of_step(entry: StepEntry, members: dict[str, Trajectory]) -> Table:
    """Return a table of the trajectories of a step."""
    table = make_table("trajectory", "prompt", "generator", "seed", "versions", "reward", numbers=("reward",))
    for name in (name for names in entry.trajectory_ids for name in names):
        if (found := members.get(name)) is None:
            add_row(table, name, _GONE, "", "", "", "")
            continue
        versions = " ".join(str(span.version) for span in found.version_spans)
        reward = f"{found.reward.total:.3f}"
        add_row(table, name, found.prompt_uid, found.generator_id, found.sampling.seed, versions, reward)
    return table


def _oldest(trajectory: Trajectory) -> int:
    return min(span.version for span in trajectory.version_spans)
