"""Terminal views of a run: `slipstream status`, the launcher's live view, and results."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S
from slipstream.buffer.role_reports import Liveness, RoleStatus, describe_times, number_of
from slipstream.buffer.store import _POLL_EVERY_S
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.observe.catalog.token_decoder import TOKENIZER, TokenDecoder, extremes, find_decoder
from slipstream.observe.reader import RunReader, read_run
from slipstream.observe.run_status import RunSnapshot, RunStatus, dead_end_cause
from slipstream.runtime.command_line import add_row, make_console, make_table, printable
from slipstream.runtime.credentials import TOKEN_VARIABLE
from slipstream.runtime.model_files import find_file
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_ANSWERS_EVERY, _FIRST_STEPS, _MIN_WIDTH = 10, 2, 100
"""Steps between samples of answers, first steps checked for a signal, and columns for a sample."""
_NO_SIGNAL = 0.95
"""Share of tokens without an advantage."""
_REPORTED = {
    "seconds to the goal": "seconds_to_goal",
    "held-out loss before": "eval_loss_before",
    "held-out loss": "eval_loss",
    "held-out pair accuracy": "eval_pair_accuracy",
    "training loss": "train_loss",
    "seconds of training": "train_seconds",
    "steps": "steps",
    "tokens/s generated": "generated_tokens_per_s",
    "tokens/s learned": "learner_tokens_per_s",
    "lag mean": "lag_mean",
    "lag max": "lag_max",
    "largest log-prob difference": "logprob_diff_max",
}


class LiveView:
    """Shows snapshots of a run inside `with view.shown():`."""

    def __init__(
        self, run: RunConfig, *, console: Console, read_answers: Callable[[int], list[Trajectory]] = lambda _: []
    ) -> None:
        """`read_answers` returns the trajectories of a step that are still stored."""
        self._run = run
        self._read_answers = read_answers
        self._decoder: TokenDecoder | None = None
        self._console = console
        self._live: Live | None = None
        self._last_wait: str | None = None
        self._last_dead_end = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        live = Live(console=self._console, refresh_per_second=4, transient=False)
        with live if self._console.is_terminal else nullcontext() as self._live:
            yield
        self._live = None

    def show(self, snapshot: RunSnapshot) -> None:
        """Redraw the panel, or print a line per new step without a terminal. Print some answers."""
        for row in snapshot.new_rows[-1:]:
            self._show_answers(row)
        if self._live:
            self._live.update(self._panel(snapshot))
            return
        for row in snapshot.new_rows:
            self.print_line(step_line(row, snapshot, max_steps=self._run.learner.max_steps))
        cause = dead_end_cause(snapshot.roles)
        if cause and cause != self._last_dead_end:
            self.print_line(f"dead end: {cause}")
        self._last_dead_end = cause
        # Before the first step, the waits are the only sign of progress.
        if not snapshot.rows and (waits := snapshot.describe_waits()) != self._last_wait:
            self._last_wait = waits
            self.print_line(f"{snapshot.state.phase}: {waits or 'no role waits'}")

    def _show_answers(self, row: dict[str, Any]) -> None:
        step = row["step"]
        has_no_signal = row.get("learner/advantage_zero_fraction", 0.0) > _NO_SIGNAL
        is_due = step % _ANSWERS_EVERY == 1 or (has_no_signal and step <= _FIRST_STEPS)
        if not is_due or (self._console.is_terminal and self._console.width < _MIN_WIDTH):
            return
        with suppress(ConfigError):
            self._decoder = self._decoder or find_decoder(find_file(self._run.model.path, TOKENIZER), candidates=[])
        if self._decoder:
            for trajectory in extremes(self._read_answers(step)):
                self.print_line(f"answer of step {step}: {self._decoder.describe(trajectory)}")
        if has_no_signal:
            self.print_line(
                f"step {step} has almost no learning signal: all answers of nearly every group have the same reward. "
                "Is the reward right for these answers, and does the prompt ask for the format that it needs?"
            )

    def print_line(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, soft_wrap=True)

    def _panel(self, snapshot: RunSnapshot) -> Panel:
        waits, cause = snapshot.describe_waits() or "none", dead_end_cause(snapshot.roles)
        histogram = {int(lag): count for lag, count in snapshot.last.get("lag/histogram", {}).items()}
        total = sum(histogram.values()) or 1
        shares = "  ".join(f"{lag}: {100 * histogram[lag] / total:.0f}%" for lag in sorted(histogram))
        line = partial(Text, overflow="ellipsis", no_wrap=True)
        lags = line(f"lag     {shares or '…'}   (tokens of the last step, by versions behind)")
        progress, state, num_steps = Table.grid(padding=(0, 2)), snapshot.state, self._run.learner.max_steps
        eta = "…" if snapshot.eta_s is None else f"at most {duration(snapshot.eta_s)} left"
        bar = ProgressBar(total=num_steps, completed=state.step, width=40)
        progress.add_row(f"step {state.step}/{num_steps}", bar, f"version {state.version}", eta)
        parts: list[RenderableType] = [progress, Text(), _numbers(snapshot), Text(), lags]
        # The cause is never truncated: the text ends with the remedy.
        causes = [Text(f"dead end: {cause}", style="bold red")] if cause else []
        roles = Table("role", "state", "version", "tokens/s", "running", box=None, padding=(0, 2), header_style="dim")
        for name, gauges in sorted(snapshot.roles.items()):
            speed = number_of(gauges, "tokens_per_s")
            words = [str(gauges.get(key, "")) for key in ("state", "version", "running")]
            roles.add_row(name, *words[:2], "" if speed is None else f"{speed:,.0f}", words[2])
        group = Group(*parts, roles, line(f"waits   {waits}", style="yellow"), *causes)
        return Panel(group, title=f"slipstream · {self._run.name} · {state.phase}", title_align="left")


def step_line(row: dict[str, Any], snapshot: RunSnapshot, *, max_steps: int) -> str:
    """Format one step as a plain line."""
    return (
        f"step {row['step']:>4}/{max_steps}  {duration(row['time_s']):>6}  reward {row['learner/reward_mean']:.3f}  "
        f"{f'accuracy {accuracy}  ' if (accuracy := _accuracy(snapshot)) else ''}"
        f"lag {row['lag/mean']:.1f} (max {row['lag/max']:.0f})  "
        f"tokens/s {_rates(row)}  "
        f"wait {row['learner/wait_s']:.2f} s of {row['learner/wait_s'] + row['learner/train_s']:.2f} s"
    )


def _rates(row: dict[str, Any]) -> str:
    """Format the known rates of a row."""
    rates = {"generated": row.get("generators/tokens_per_s"), "learned": row.get("learner/tokens_per_s")}
    return ", ".join(f"{rate:,.0f} {what}" for what, rate in rates.items() if rate is not None)


def sparkline(values: list[float], *, low: float, high: float) -> str:
    """Format values as bars, newest on the right."""
    span = max(high - low, 1e-9)
    levels = (min(max((value - low) / span, 0.0), 1.0) for value in values[-_SPARK_WIDTH:])
    return "".join(_BARS[round(level * (len(_BARS) - 1))] for level in levels)


def _numbers(snapshot: RunSnapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    last = snapshot.last
    rewards = [row["learner/reward_mean"] for row in snapshot.rows]
    # The first held-out set, by default the sampled one.
    found = (next((row[key] for key in row if key.startswith("eval/accuracy_")), None) for row in snapshot.rows)
    accuracies = [value for value in found if value is not None]
    grid.add_row("reward", f"{last.get('learner/reward_mean', 0):.3f}", sparkline(rewards, low=0, high=1))
    if accuracies:
        grid.add_row("accuracy", _accuracy(snapshot), sparkline(accuracies, low=0, high=1))
    grid.add_row("tokens/s", _rates(last), "")
    groups = {state: getattr(snapshot.counts, state) for state in ("leased", "ready", "claimed", "used")}
    groups |= snapshot.counts.outcomes
    grid.add_row("groups", ", ".join(f"{number} {state}" for state, number in groups.items()), "")
    return grid


def _accuracy(snapshot: RunSnapshot) -> str:
    """Newest accuracy of each held-out set, such as `0.250 sampled 0.500 greedy`."""
    prefix = "eval/accuracy_"
    newest = {key: value for row in snapshot.rows for key, value in row.items() if key.startswith(prefix)}
    return " ".join(f"{value:.3f} {key.removeprefix(prefix)}" for key, value in newest.items())


def duration(seconds: float) -> str:
    """Format a duration: `7s`, `1m05s`, `3h20m`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


_STYLES: dict[Liveness, str] = {"alive": "", "silent": "red", "gone": "dim"}
_MAX_GONE = 4
"""Gone roles shown, newest first."""
_NOTHING = "-"
_GROUP_STATES = ("leased", "returned", "open", "ready", "claimed", "used", "reusable", "unarchived")


def draw_status(status: RunStatus) -> RenderableType:
    """Render the run, its roles, waits, buffer, and errors."""
    events = Table.grid(padding=(0, 2))
    for event in status.events:
        add_row(events, f"{duration(event.age_s)} ago", event.role, event.text)
    return Group(
        Text(f"{status.run} · {status.phase}" + f": {printable(status.detail)}" * bool(status.detail), style="bold"),
        _facts(_run_facts(status)),
        _titled("roles", _roles(status)),
        _titled("waits", _waits(status)),
        _titled("time", Text("\n".join(describe_times(status.last_row.get("times")) or ["no step yet"]))),
        _titled("buffer", _facts(_buffer_facts(status))),
        _titled("last errors", events if status.events else Text("none", style="green")),
    )


def _titled(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2), expand=False))


def _facts(facts: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name, style="dim"), Text(printable(fact)))
    return table


def _run_facts(status: RunStatus) -> dict[str, str]:
    is_publishing = status.announced_version > status.version
    step = f"{status.step} of {status.max_steps}"
    if status.progress_age_s is not None:
        step += f", the last {duration(status.progress_age_s)} ago"
    if status.eta_s is not None and status.phase == "training":
        step += f", at most {duration(status.eta_s)} left"
    row, last_step = status.last_row, "none yet"
    if row:
        last_step = (
            f"reward {row['learner/reward_mean']:.3f}, lag {row['lag/mean']:.1f} (max {row['lag/max']:.0f}), waited "
            f"{row['learner/wait_s']:.2f} s, trained {row['learner/train_s']:.2f} s, tokens/s {_rates(row)}"
        )
    facts = {
        "step": step,
        "version": f"{status.version} committed" + f", {status.announced_version} being published" * is_publishing,
        "checkpoint": f"step {status.checkpoint.step}" if status.checkpoint else "none yet",
        "last step": last_step,
        "join": join_command(status.address) if status.address else "",
        "brokers": _brokers(status.roles),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _brokers(roles: list[RoleStatus]) -> str:
    """Format the brokers with their numbers of generators; empty for a single one."""
    served = Counter(role.broker for role in roles if role.is_alive and role.role == "generator")
    shown = []
    for each in (role for role in roles if role.role == "broker"):
        rank = "chief, " if each.is_chief and each.is_alive else ""
        shown.append(f"{each.name} ({rank}{f'{served[each.name]} generators' if each.is_alive else each.liveness})")
    return ", ".join(shown) if len(shown) > 1 else ""


def join_command(address: str) -> str:
    """Command for a generator on another machine."""
    return f"{TOKEN_VARIABLE}=... python -m slipstream.generators broker.address={address}, with the token of the run"


def _roles(status: RunStatus) -> RenderableType:
    if not status.roles:
        return Text("no role has reported yet")
    numbers = ("version", "lag", "tokens/s", "running", "progress", "restarts", "heard")
    table = make_table("role", "where", *numbers, "state", numbers=numbers)
    gone = sorted((role for role in status.roles if role.liveness == "gone"), key=lambda role: role.report_age_s)
    waiting = {wait.waiter for wait in status.waits}
    for role in status.roles:
        if role not in gone[_MAX_GONE:]:
            add_row(table, *_role_cells(role, is_waiting=role.name in waiting))
            table.rows[-1].style = _STYLES[role.liveness]
    hidden = [Text(f"and {len(gone) - _MAX_GONE} more that are gone", style="dim")] if gone[_MAX_GONE:] else []
    return Group(table, *hidden)


def _role_cells(role: RoleStatus, *, is_waiting: bool) -> list[str]:
    state = f"SILENT, was {role.state}" if role.liveness == "silent" else role.state
    return [
        role.name,
        f"{role.host}:{role.pid}" if role.host and role.pid else _NOTHING,
        _cell(role.version),
        _cell(role.version_lag),
        _cell(role.tokens_per_s, ",.0f"),
        _cell(role.running) if role.capacity is None else f"{role.running or 0}/{role.capacity}",
        _NOTHING if role.progress_age_s is None else duration(role.progress_age_s),
        _cell(role.restarts),
        duration(role.report_age_s),
        # The waits section already shows the reason of a wait.
        f"{state}: {role.reason}" if role.reason and not is_waiting else state,
    ]


def _cell(value: float | None, form: str = "") -> str:
    return _NOTHING if value is None else format(value, form)


def _waits(status: RunStatus) -> RenderableType:
    shares = []
    if status.learner_wait_fraction is not None:
        shares.append(f"the learner waited {status.learner_wait_fraction:.0%} of its last steps")
    if status.generators_busy_fraction is not None:
        shares.append(f"the generators run at {status.generators_busy_fraction:.0%} of their capacity")
    if status.generators_target is not None:
        alive = sum(role.role == "generator" and role.is_alive for role in status.roles)
        shares.append(f"{alive} of {status.generators_target} generators are alive")
    shown = [printable(f"{wait.waiter} for {wait.blocked_on}: {wait.reason}") for wait in status.waits]
    lines = [Text(line, style="yellow") for line in shown] or [Text("none", style="green")]
    return Group(*lines, *([Text("; ".join(shares), style="dim")] if shares else []))


def _buffer_facts(status: RunStatus) -> dict[str, str]:
    counts, admission, memory = status.counts, status.admission, status.memory
    limit = f" of {memory.max_bytes / 2**20:,.0f}" if memory.max_bytes else ""
    return {
        "admitted": f"{admission.admitted} of {admission.limit} prompts, for a lag of {admission.target_lag:g}; "
        f"{admission.reason or 'more may be admitted'}",
        "groups": ", ".join(f"{getattr(counts, state)} {state}" for state in _GROUP_STATES),
        "ready by lag": ", ".join(f"lag {lag}: {count}" for lag, count in status.ready_by_lag.items()) or "none",
        "outcomes": _format_counts(counts.outcomes),
        "reasons": _format_counts(counts.reasons),
        "filtered": f"{counts.filtered} of {counts.filtered + counts.became_ready} complete groups carried no signal "
        f"({counts.filtered_fraction:.1%})",
        "curriculum": _format_counts(counts.curriculum),
        "trajectories": f"{counts.accepted} accepted, {counts.duplicates} duplicates, {counts.superseded} superseded",
        "rewards": f"{sum(role.rewards_failed or 0 for role in status.roles)} failed, of connected generators",
        "refused": _format_counts(counts.refused),
        "tokens": f"length bias {status.length_bias:.3f}, {status.waste_fraction:.1%} wasted",
        "stored": f"{counts.payload_bytes / 2**20:.1f} MiB of trajectories; "
        f"the server holds {memory.used_bytes / 2**20:,.1f}{limit} MiB",
    }


def _format_counts(counts: dict[str, int]) -> str:
    largest_first = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in largest_first) or "none"


_REFRESH_EVERY_S = 1.0


def show_status(words: Sequence[str], *, is_json: bool, is_watching: bool) -> None:
    """Print a run's status or results. Raises and exits as `read_run`."""
    if is_json and is_watching:
        raise ConfigError("--json prints once: leave --watch away.")
    with RunReader(find_run(words, command="status"), timeout_s=COMMAND_TIMEOUT_S) as ended:
        if ended.folder_phase == "finished" and not ended.find_store():
            run, summary = ended.config, ended.summary
            if is_json:
                state = {"run": run.name, "phase": "finished", "step": summary["steps"]}
                print(json.dumps(state | {"max_steps": run.learner.max_steps, "summary": summary}))
            else:
                final = f"all figures: {ended.folder / 'summary.json'}"
                make_console().print(*draw_results(run, summary), final, sep="\n", soft_wrap=True)
            return
    with read_run(words, command="status") as reader:
        status = reader.status()
        if is_json:
            print(msgspec.json.encode(status).decode())
        elif is_watching:
            _watch(reader, status, console=make_console())
        else:
            make_console().print(draw_status(status))


def _watch(reader: RunReader, status: RunStatus, *, console: Console) -> None:
    is_stopping = on_stop_signal(lambda: None)
    refresh_at = time.monotonic() + _REFRESH_EVERY_S
    with Live(draw_status(status), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not is_stopping():
            time.sleep(_POLL_EVERY_S)
            if time.monotonic() >= refresh_at:
                try:
                    drawn = draw_status(reader.status())
                except ReplayBufferError as error:
                    drawn = Text(str(error), style="red")
                live.update(drawn, refresh=True)
                refresh_at = time.monotonic() + _REFRESH_EVERY_S


def verdict(run: RunConfig, summary: dict[str, Any]) -> str:
    """Describe goals and the accuracies of the final evaluation."""
    evaluation, steps = summary.get("evaluation") or {}, summary["steps"]
    shown = []
    for goal in (goal for goal in run.evaluation.goals if evaluation and not goal.holds(evaluation)):
        bounds, value = {"least": goal.at_least, "most": goal.at_most}, evaluation.get(goal.metric)
        asked = " and ".join(f"at {word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        shown.append(f"{goal.metric} is {'unknown' if value is None else f'{value:.4g}'}, the goal {asked}")
    word = "learned" if run.evaluation.goals and evaluation else f"done after {steps} steps"
    if shown:
        word = f"goal not reached after {steps} steps ({'; '.join(shown)})"
    found = {each.name: summary.get(f"accuracy_{each.name}") for each in run.data.eval_sets}
    accuracies = [f"{value:.3f} {name}" for name, value in found.items() if value is not None]
    sizes = dict.fromkeys(summary.get("num_final_prompts", {}).values())
    where = f"final evaluation on {' or '.join(map(str, sizes))} prompts" if sizes else "final evaluation"
    return f"{word}; {where}: accuracy {', '.join(accuracies)}" if accuracies else word


def draw_results(run: RunConfig, summary: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the verdict, a table of figures, and the shares of the wall time, from summary.json."""
    yield Text(f"{run.name}: {verdict(run, summary)}", style="bold")
    sets = run.data.eval_sets
    labels = {f"accuracy before, {each.name}": each.before_key for each in sets}
    labels |= {f"accuracy after, {each.name}": f"accuracy_{each.name}" for each in sets}
    table = Table(show_header=False, box=None)
    for label, key in (labels | _REPORTED).items():
        # A value that was not measured is null.
        if (value := summary.get(key)) is not None:
            table.add_row(label, f"{value:,.4g}" if isinstance(value, float) else str(value))
    yield table
    if best := summary.get("best"):
        yield f"best model: step {best['checkpoint']['step']}, {best['metric']} {best['value']:.4g}"
    yield from describe_times(summary.get("times"))
