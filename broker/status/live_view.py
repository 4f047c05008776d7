"""LiveView: progress of a run, as a live panel on a terminal and as plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.broker.status.blocking import dead_end_cause
from slipstream.broker.status.monitor import RunSnapshot
from slipstream.broker.status.role_status import number_of
from slipstream.configs.run import RunConfig

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48


class LiveView:
    """Shows snapshots of a run, inside `with view.shown():`."""

    def __init__(self, run: RunConfig, *, console: Console) -> None:
        self._run = run
        self._console = console
        self._live: Live | None = None
        self._last_wait: str | None = None
        self._last_dead_end = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Use the terminal for the duration of the block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            self._live = live
            yield
        self._live = None

    def show(self, snapshot: RunSnapshot) -> None:
        """Draw a snapshot, or print one line per new step."""
        if self._live:
            self._live.update(self._panel(snapshot))
            return
        for row in snapshot.new_rows:
            self.print_line(step_line(row, snapshot, max_steps=self._run.learner.max_steps))
        cause = dead_end_cause(snapshot.roles)
        if cause and cause != self._last_dead_end:
            self.print_line(f"dead end: {cause}")
        self._last_dead_end = cause
        # Before the first step the waits are the only sign of progress.
        if not snapshot.rows and (waits := snapshot.describe_waits()) != self._last_wait:
            self._last_wait = waits
            self.print_line(f"{snapshot.state.phase}: {waits or 'no role waits'}")

    def print_line(self, sentence: str) -> None:
        """Print one line, above the panel if there is one."""
        self._console.print(sentence, highlight=False, soft_wrap=True)

    # --- the panel -----------------------------------------------------------------------------------------------
    def _panel(self, snapshot: RunSnapshot) -> Panel:
        waits, cause = snapshot.describe_waits() or "none", dead_end_cause(snapshot.roles)
        return Panel(
            Group(
                self._progress(snapshot),
                Text(),
                _numbers(snapshot),
                Text(),
                _lag_line(snapshot.last),
                _roles(snapshot),
                Text(f"waits   {waits}", style="yellow", overflow="ellipsis", no_wrap=True),
                # Never truncated: the text ends with the remedy.
                *([Text(f"dead end: {cause}", style="bold red")] if cause else ()),
            ),
            title=f"slipstream · {self._run.name} · {snapshot.state.phase}",
            title_align="left",
        )

    def _progress(self, snapshot: RunSnapshot) -> Table:
        grid = Table.grid(padding=(0, 2))
        total = self._run.learner.max_steps
        eta = "…" if snapshot.eta_s is None else f"at most {duration(snapshot.eta_s)} left"
        grid.add_row(
            f"step {snapshot.state.step}/{total}",
            ProgressBar(total=total, completed=snapshot.state.step, width=40),
            f"version {snapshot.state.version}",
            eta,
        )
        return grid


def step_line(row: dict[str, Any], snapshot: RunSnapshot, *, max_steps: int) -> str:
    """Format one step as a plain line."""
    return (
        f"step {row['step']:>4}/{max_steps}  {duration(row['time_s']):>6}  reward {row['learner/reward_mean']:.3f}  "
        f"accuracy {_accuracy(snapshot)}  "
        f"lag {row['lag/mean']:.1f} (max {row['lag/max']:.0f})  "
        f"tokens/s {row['generators/tokens_per_s']:.0f} generated {row['learner/tokens_per_s']:.0f} learned  "
        f"wait {row['learner/wait_s']:.2f} s of {row['learner/wait_s'] + row['learner/train_s']:.2f} s"
    )


def sparkline(values: list[float], *, low: float, high: float) -> str:
    """Format values as a row of bars, newest on the right."""
    span = max(high - low, 1e-9)
    levels = (min(max((value - low) / span, 0.0), 1.0) for value in values[-_SPARK_WIDTH:])
    return "".join(_BARS[round(level * (len(_BARS) - 1))] for level in levels)


def _numbers(snapshot: RunSnapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    last = snapshot.last
    rewards = [row["learner/reward_mean"] for row in snapshot.rows]
    # Of the first held-out set: the sampled one, by default.
    found = ([row[key] for key in row if key.startswith("eval/accuracy_")] for row in snapshot.rows)
    accuracies = [values[0] for values in found if values]
    grid.add_row("reward", f"{last.get('learner/reward_mean', 0):.3f}", sparkline(rewards, low=0, high=1))
    grid.add_row("accuracy", _accuracy(snapshot), sparkline(accuracies, low=0, high=1))
    speeds = (
        f"{last.get('generators/tokens_per_s', 0):,.0f} generated, {last.get('learner/tokens_per_s', 0):,.0f} learned"
    )
    grid.add_row("tokens/s", speeds, "")
    states = {state: getattr(snapshot.counts, state) for state in ("leased", "ready", "claimed", "used")}
    groups = (states | snapshot.counts.outcomes).items()
    grid.add_row("groups", ", ".join(f"{number} {state}" for state, number in groups), "")
    return grid


def _lag_line(row: dict[str, Any]) -> Text:
    histogram = {int(lag): count for lag, count in row.get("lag/histogram", {}).items()}
    total = sum(histogram.values()) or 1
    shares = "  ".join(f"{lag}: {100 * histogram[lag] / total:.0f}%" for lag in sorted(histogram))
    return Text(
        f"lag     {shares or '…'}   (tokens of the last step, by versions behind)", overflow="ellipsis", no_wrap=True
    )


def _roles(snapshot: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("role", "state", "version", "tokens/s", "running"):
        table.add_column(column)
    for name, gauges in sorted(snapshot.roles.items()):
        speed = number_of(gauges, "tokens_per_s")
        table.add_row(
            name,
            str(gauges.get("state", "")),
            str(gauges.get("version", "")),
            "" if speed is None else f"{speed:,.0f}",
            str(gauges.get("running", "")),
        )
    return table


def _accuracy(snapshot: RunSnapshot) -> str:
    prefix = "eval/accuracy_"
    names = [key.removeprefix(prefix) for row in snapshot.rows for key in row if key.startswith(prefix)]
    shown = dict.fromkeys(names or ["sampled", "greedy"])
    values = {name: snapshot.newest(f"{prefix}{name}") for name in shown}
    return " ".join(f"{'  …  ' if value is None else f'{value:.3f}'} {name}" for name, value in values.items())


def duration(seconds: float) -> str:
    """Format a duration: `7s`, `1m05s`, `3h20m`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
