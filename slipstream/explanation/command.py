"""The command `slipstream explain`."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console

from slipstream.buffer.errors import ArchiveError
from slipstream.configs.base import ConfigError
from slipstream.explanation.answer import Answer, Finding, shown
from slipstream.explanation.books import Books, open_books
from slipstream.explanation.health import Health, HealthWarning
from slipstream.explanation.provenance import explain_step, explain_version, find_entry, table_of_step
from slipstream.explanation.reward import explain_reward
from slipstream.explanation.slowness import explain_slowness
from slipstream.learner.metrics.ranges import RANGES
from slipstream.runtime.console import make_console, printable
from slipstream.runtime.run_folder import find_run

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
