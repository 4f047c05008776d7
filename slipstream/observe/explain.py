"""`slipstream explain`: answers a question about a run from its records."""

import math
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import StepEntry
from slipstream.buffer.role_reports import LAUNCHER, LEARNER
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError, Record
from slipstream.observe.catalog.token_decoder import TOKENIZER, extremes, find_decoder
from slipstream.observe.finding import Answer, Finding, shown
from slipstream.observe.metrics_rows import Health, HealthWarning
from slipstream.observe.reader import RunReader
from slipstream.observe.reward_fall import explain_reward
from slipstream.observe.slowness import explain_slowness
from slipstream.runtime.command_line import add_row, make_console, make_table, printable
from slipstream.runtime.healthy_ranges import RANGES
from slipstream.runtime.model_files import find_file
from slipstream.runtime.run_folder import STAGES, find_run

_GONE = "its tokens are stored no more"
_NAMED = 8
_LONGEST = 3


def missing_store(reader: RunReader) -> str:
    """Reason that the store is missing, or empty."""
    if reader.find_store():
        return ""
    return f"events and versions must be read from the store, which is not there: {reader.problem}"


def find_entry(reader: RunReader, step: int) -> StepEntry:
    """A step's entry of the ledger. Raises ConfigError."""
    if entry := reader.find_step(step):
        return entry
    known = [entry.step for entry in reader.steps()]
    steps = f"{known[0]} to {known[-1]}" if known else "which has none"
    note = missing_store(reader).rstrip(".")
    raise ConfigError(f"step must be one of the ledger's, {steps}, got {step}{f': {note}' if note else ''}.")


def explain_step(reader: RunReader, entry: StepEntry, members: dict[str, Trajectory]) -> Iterator[str]:
    """Yield lines on a step's trajectories and the weights after it."""
    num_trajectories = sum(map(len, entry.trajectory_ids))
    yield (
        f"step {entry.step}: {num_trajectories} trajectories in {len(entry.group_ids)} groups, learner at version "
        f"{entry.version}"
    )
    yield f"seed {entry.seed}, settings {entry.config_hash}, claim fence {entry.fence}"
    versions = reader.versions()
    after = [f"version {each.version} (checksum {each.checksum})" for each in versions if each.step == entry.step]
    unknown = "not published" if versions else "not known without the store"
    yield f"weights after it: {', '.join(after) or unknown}"
    reused = list(compress(entry.group_ids, entry.reused))
    weighted = [f"{group_id} x {weight:.3g}" for group_id, weight in zip(entry.group_ids, entry.weights, strict=False)]
    lines = (("used again", reused), ("losses weighted", weighted), ("mixed in", entry.mixed_group_ids))
    yield from (f"{label}: {', '.join(groups)}" for label, groups in lines if groups)
    found = list(members.values())
    if len(found) < num_trajectories:
        yield f"{num_trajectories - len(found)} of them: {_GONE}; what follows is of the others"
    if found:
        yield from _tasks(found)
        yield f"made by: {_counted(each.generator_id for each in found)}"
        lags = Counter(entry.version - min(span.version for span in each.version_spans) for each in found)
        yield f"lag of the oldest token -> trajectories: {', '.join(f'{lag}: {lags[lag]}' for lag in sorted(lags))}"
        yield f"ended by: {_counted(each.stop_reason for each in found)}"


def explain_version(reader: RunReader, version: int) -> Iterator[str]:
    """Yield a version's step and checksum. Raises ConfigError."""
    entries = [entry for entry in reader.versions() if entry.version == version]
    if not entries:
        problem = missing_store(reader) or "version must have been published by this run"
        raise ConfigError(f"{problem.rstrip('.')}, got {version}.")
    for entry in entries:
        origin = f"the weights after step {entry.step}" if entry.step else "the initial weights"
        yield f"version {version}: {origin}, checksum {entry.checksum}"


def _tasks(trajectories: list[Trajectory]) -> Iterator[str]:
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
    """List the trajectories of a step."""
    table = make_table("trajectory", "prompt", "generator", "seed", "versions", "reward", numbers=("reward",))
    for name in chain.from_iterable(entry.trajectory_ids):
        cells: tuple[object, ...] = (_GONE, "", "", "", "")
        if found := members.get(name):
            versions = " ".join(str(span.version) for span in found.version_spans)
            reward = f"{found.reward.total:.3f}"
            cells = (found.prompt_uid, found.generator_id, found.sampling.seed, versions, reward)
        add_row(table, name, *cells)
    return table


Kind = Literal["start", "slow", "reward", "health", "step", "version"]
_NUMBERED = ("step", "version")


def explain(kind: Kind, words: Sequence[str]) -> None:
    """Print an answer. `words`: number of the step or version, then a run. Raises ConfigError, ReplayBufferError."""
    number, run = "", list(words)
    if kind in _NUMBERED:
        number, *run = words or [""]
        if not number.isdecimal():
            raise ConfigError(f"{kind} must be followed by its number, `slipstream explain {kind} 12`, got {number!r}.")
    console = make_console()
    folder = find_run(run, command="explain")
    if kind == "start":
        # Without the store, which a finished run's server would have to load.
        _print(console, explain_start(read_stages(folder)).lines())
        return
    with RunReader(folder, starts_server=True) as reader:
        if kind == "step":
            entry = find_entry(reader, int(number))
            members = reader.members(entry)
            _print(console, explain_step(reader, entry, members))
            console.print(table_of_step(entry, members))
        elif kind == "version":
            _print(console, explain_version(reader, int(number)))
        else:
            _print(console, _ANSWERS[kind](reader).lines())
            # A supervised run has no events or versions, and health does not need them.
            note = "" if kind == "health" or reader.config.mode == "sft" else missing_store(reader)
            _print(console, [note] if note else [])
        if reader.archive and reader.archive.note:
            raise ArchiveError(reader.archive.note)


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        # Names of tasks and texts of events are untrusted.
        shown = printable(line)
        if console.is_terminal:
            # Break between words, so that a path can be copied.
            indent = " " * (len(shown) - len(shown.lstrip()))
            options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
            shown = textwrap.fill(shown, console.width, subsequent_indent=indent, **options)
        console.print(shown, markup=False, soft_wrap=True)


def _slow(reader: RunReader) -> Answer:
    if reader.config.mode == "sft":
        return Answer(
            "A run with mode=sft records no shares of its time: learner/train_s and learner/tokens_per_s, which "
            "`slipstream watch` draws, tell its pace."
        )
    rows, cluster = reader.rows(), reader.config.cluster
    num_cores = os.cpu_count() if cluster.kind == "local" and not cluster.network else None
    return explain_slowness(rows, reader.config, events=reader.events_by_step(rows), num_cores=num_cores)


def _reward(reader: RunReader) -> Answer:
    if reader.config.mode == "sft":
        measured = "eval/pair_accuracy" if reader.config.trains_reward_model else "eval/loss"
        return Answer(
            f"A run with mode=sft has no reward: its measures are learner/loss and {measured}, which `slipstream "
            "watch` draws; `slipstream explain health` judges the rest."
        )
    rows = reader.rows()
    return explain_reward(rows, reader.config, entries=reader.steps(), events=reader.events_by_step(rows))


def _health(reader: RunReader) -> Answer:
    health, rows = Health(reader.config), reader.rows()
    for row in rows:
        health.add(row)
    # Metrics with the same advice are one finding, as in the run's events.
    by_advice: dict[str, list[HealthWarning]] = {}
    for warning in health.warnings:
        by_advice.setdefault(warning.advice, []).append(warning)
    findings = []
    for advice, (first, *others) in by_advice.items():
        figures = [_figures(first), *(f"{each.metric} {_figures(each)}" for each in others)]
        findings.append(Finding(first.metric, "; ".join(figures), advice))
    count = sum(map(len, by_advice.values()))
    said = f"{count} of {len(RANGES)} watched metrics" if count else "no watched metric"
    headline = f"After step {rows[-1]['step']}, outside of its healthy range: {said}."
    facts, step = [], rows[-1]["step"]
    if findings:
        entry, tokenizer = reader.find_step(step), find_file(reader.config.model.path, TOKENIZER)
        if entry and (decoder := find_decoder(tokenizer, candidates=[reader.folder / "final_model"])):
            extreme = extremes(reader.members(entry).values())
            facts = [f"answer of step {step}: {decoder.describe(each)}" for each in extreme]
    return Answer(headline, findings, facts)


def _figures(warning: HealthWarning) -> str:
    return f"{shown(warning.value)}, healthy is {warning.healthy}, since step {warning.since_step}"


_ANSWERS = {"slow": _slow, "reward": _reward, "health": _health}


class Stage(Record):
    """A moment of a role's start or end. Example: Stage(1763718000.25, "generator-0", 4711, "engine built")."""

    at: float
    """Seconds since 1970, on the clock of the role's machine."""
    role: str
    pid: int
    stage: str
    """End of a stage, such as `libraries loaded`, or a beginning, such as `training`."""


def read_stages(folder: Path) -> list[Stage]:
    """Stages of the newest launch in a run folder, oldest first, without damaged lines."""
    stages, path = [], folder / STAGES
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(msgspec.DecodeError):
            stages.append(msgspec.json.decode(line, type=Stage))
    # Without a launcher, the roles are started by hand, in any order.
    launched_at = max((s.at for s in stages if (s.role, s.stage) == (LAUNCHER, "process started")), default=0.0)
    return sorted((each for each in stages if each.at >= launched_at), key=lambda each: each.at)


def explain_start(stages: Sequence[Stage]) -> Answer:
    """Return a run's timeline. Raises ConfigError without stages."""
    if not stages:
        raise ConfigError(f"the run folder must have {STAGES}, which roles on its machine write, but has none.")
    first, last = stages[0].at, stages[-1].at
    times = {each.stage: each.at for each in stages if each.role == LEARNER}
    began, ended = times.get("training", math.inf), times.get("trained", math.inf)
    headline = f"{last - first:.1f} s after the start, the newest stage is: {stages[-1].stage}."
    if ended < math.inf:
        headline = (
            f"Training began {began - first:.1f} s after the start and took {ended - began:.1f} s; {last - ended:.1f} "
            f"s followed: {last - ended + began - first:.1f} s outside of training."
        )
    facts, outside = ["   at, s   took, s  role          stage"], []
    before: dict[tuple[str, int], float] = {}
    for each in stages:
        since = before.get((each.role, each.pid), each.at)
        before[each.role, each.pid] = each.at
        facts.append(f"{each.at - first:8.2f}  {each.at - since:8.2f}  {each.role:<12}  {each.stage}")
        # The stages that span training wait for it.
        if since < each.at and (each.at <= began or since >= ended):
            figures = f"{each.at - since:.1f} s, until {each.at - first:.1f} s"
            outside.append((since - each.at, Finding(f"{each.role}/{each.stage}", figures)))
    longest = [finding for _, finding in sorted(outside, key=lambda pair: pair[0])[:_LONGEST]]
    note = "A stage includes waits for other roles. Generators on other machines are not listed."
    return Answer(headline, longest, facts, note)
