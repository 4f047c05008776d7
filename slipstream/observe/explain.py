"""The command `slipstream explain`."""

import math
import textwrap
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import unpack
from slipstream.buffer.errors import ArchiveError, ReplayBufferError, StaleFenceError
from slipstream.buffer.records import EVENTS_KEPT, StepEntry, VersionEntry
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.finding import Answer, Finding, number_in, shown
from slipstream.observe.metrics_rows import Health, HealthWarning
from slipstream.observe.reward_fall import explain_reward
from slipstream.observe.slowness import explain_slowness
from slipstream.runtime.command_line import add_row, make_console, make_table, printable
from slipstream.runtime.healthy_ranges import RANGES
from slipstream.runtime.run_folder import find_run, read_metrics

_CONNECT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0
"""Limit for a run's own server, which loads its data if it is started to be read."""


class Books:
    """Records of a run. Reads of the store raise ReplayBufferError, of the archive ArchiveError."""

    def __init__(
        self,
        run: RunConfig,
        folder: Path,
        *,
        store: Store | None = None,
        archive: Archive | None = None,
        note: str = "",
    ) -> None:
        """`note`: why there is no store."""
        self.run = run
        self.note = note
        self._folder = folder
        self._store = store
        self._archive = archive
        self.damage = archive.note if archive else ""
        """Sentence on a part of the archive that is missing, by damage or after a crash; empty if it is whole."""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics, in order. Raises ConfigError when there is none."""
        return read_metrics(self._folder / "metrics.jsonl")

    def entries(self, *, first_step: int = 1) -> list[StepEntry]:
        """Return the step ledger, in order; without a store, of the steps that are archived."""
        if self._store:
            return self._store.ledger(first_step=first_step)
        steps = self._archive.steps() if self._archive else []
        return [entry for entry in steps if entry.step >= first_step]

    def versions(self) -> list[VersionEntry]:
        """Return every published set of weights, in order; none without a store."""
        return self._store.versions() if self._store else []

    def members(self, entry: StepEntry) -> dict[str, Trajectory]:
        """Return the trajectories of a step that are still stored, by id."""
        names = {name for group in entry.trajectory_ids for name in group}
        stored = [each for group_id in entry.group_ids for each in self._in_store(group_id)]
        found = {each.id: each for each in stored if each.id in names}
        if self._archive and names - found.keys():
            selected = TrajectoryFilter(min_step=entry.step, max_step=entry.step)
            archived = (stored.trajectory for stored in self._archive.read(selected))
            found |= {each.id: each for each in archived if each.id in names}
        return found

    def _in_store(self, group_id: str) -> list[Trajectory]:
        # Payloads leave the store when a checkpoint retires their group; the ledger keeps the ids.
        try:
            (payloads,) = self._store.fetch([group_id]) if self._store else ([],)
        except StaleFenceError:
            return []
        return [unpack(payload) for payload in payloads]

    def events(self) -> dict[int, list[str]]:
        """Return step -> what happened while it was made, since the learner was started last; nothing without a store.

        Rows count seconds from the first step and events have the store's clock: both know when the last step ended.
        """
        stepped_at = self._store.run_state().stepped_at if self._store else None
        if self._store is None or stepped_at is None:
            return {}
        rows = self.rows
        latest = rows[-int((rows[-1].get("times") or {}).get("steps", len(rows))) :]
        own = [row for row in latest if math.isfinite(number_in(row, "time_s"))]
        ends = [stepped_at + row["time_s"] - own[-1]["time_s"] for row in own]
        found: dict[int, list[str]] = {}
        for event in self._store.events(limit=EVENTS_KEPT):
            index = bisect_left(ends, event.at)
            if index < len(own):
                found.setdefault(own[index]["step"], []).append(f"{event.role}: {event.text}")
        return found


@contextmanager
def open_books(folder: Path) -> Iterator[Books]:
    """Open what the run in a folder has recorded; starts the embedded server of a run that is over, and stops it again.

    Raises ConfigError when the run's settings cannot be read, ArchiveError for a damaged manifest.
    """
    run = read_config(folder)
    archive = Archive(folder / "archive") if is_archive(folder / "archive") else None
    store, note = None, ""
    timeout_s = _CONNECT_TIMEOUT_S if isinstance(run.buffer.store, RedisConfig) else _START_TIMEOUT_S
    with ExitStack() as stack:
        try:
            store = stack.enter_context(open_run_store(folder, timeout_s=timeout_s, starts_server=True))
        # A folder of another user's may not be written, which a server would.
        except (ConfigError, ReplayBufferError, OSError) as error:
            note = f"events and versions must be read from the store, which is not there: {error}"
        yield Books(run, folder, store=store, archive=archive, note=note)


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


Kind = Literal["slow", "reward", "health", "step", "version"]
_NUMBERED = ("step", "version")


def explain(kind: Kind, words: Sequence[str]) -> None:
    """Print an answer; `words`: the number of a step or version, then as for `find_run`.

    Raises ConfigError, ReplayBufferError.
    """
    number, run = "", list(words)
    if kind in _NUMBERED:
        number, *run = words or [""]
        if not number.isdecimal():
            raise ConfigError(f"{kind} must be followed by its number, `slipstream explain {kind} 12`, got {number!r}.")
    console = make_console()
    with open_books(find_run(run, command="explain")) as books:
        if kind == "step":
            entry = find_entry(books, int(number))
            members = books.members(entry)
            _print(console, explain_step(books, entry, members))
            console.print(table_of_step(entry, members))
        elif kind == "version":
            _print(console, explain_version(books, int(number)))
        else:
            _print(console, _ANSWERS[kind](books).lines())
            # A supervised run has no events and versions that could be missing.
            is_lacking = books.note and kind != "health" and books.run.mode != "sft"
            _print(console, [books.note] if is_lacking else [])
        if books.damage:
            raise ArchiveError(books.damage)


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        # Names of tasks and events are others' words.
        shown = printable(line)
        if console.is_terminal:
            # Between words alone: a path is copied whole.
            indent = " " * (len(shown) - len(shown.lstrip()))
            shown = textwrap.fill(
                shown, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        console.print(shown, markup=False, soft_wrap=True)


def _slow(books: Books) -> Answer:
    if books.run.mode == "sft":
        return Answer(
            "A run with mode=sft records no shares of its time: learner/train_s and learner/tokens_per_s, which "
            "`slipstream watch` draws, tell its pace."
        )
    return explain_slowness(books.rows, books.run, events=books.events())


def _reward(books: Books) -> Answer:
    if books.run.mode == "sft":
        measured = "eval/pair_accuracy" if books.run.trains_reward_model else "eval/loss"
        return Answer(
            f"A run with mode=sft has no reward: its measures are learner/loss and {measured}, which `slipstream "
            "watch` draws; `slipstream explain health` judges the rest."
        )
    return explain_reward(books.rows, books.run, entries=books.entries(), events=books.events())


def _health(books: Books) -> Answer:
    """Answer which metrics are outside of their healthy range after the last step."""
    health = Health(books.run)
    rows = books.rows
    for row in rows:
        health.add(row)
    # Metrics that mean the same are named together, as in the events of the run.
    by_advice: dict[str, list[HealthWarning]] = {}
    for warning in health.warnings:
        by_advice.setdefault(warning.advice, []).append(warning)
    findings = [
        Finding(found[0].metric, "; ".join([_figures(found[0]), *map(_named, found[1:])]), advice)
        for advice, found in by_advice.items()
    ]
    count = sum(map(len, by_advice.values()))
    said = f"{count} of {len(RANGES)} watched metrics" if count else "no watched metric"
    return Answer(f"After step {rows[-1]['step']}, outside of its healthy range: {said}.", findings)


def _named(warning: HealthWarning) -> str:
    return f"{warning.metric} {_figures(warning)}"


def _figures(warning: HealthWarning) -> str:
    return f"{shown(warning.value)}, healthy is {warning.healthy}, since step {warning.since_step}"


_ANSWERS = {"slow": _slow, "reward": _reward, "health": _health}
