"""Tables of benchmarks.staleness, in Markdown, means over seeds."""

from collections.abc import Callable
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.staleness.plans import METHODS

Rows = list[dict[str, Any]]
"""Finished runs, as `lagging_run.run_plan` returns them."""


def lag_tables(rows: Rows) -> list[Table]:
    """Final accuracy, and seconds to the goal, a column for each lag."""
    return [
        _by_lag(rows, "Final accuracy: mean over seeds (lowest)", final_cell),
        _by_lag(rows, "Seconds to 0.9: mean over seeds that reached it (how many, where not all)", seconds_cell),
    ]


def replay_table(rows: Rows) -> Table:
    """Samples and seconds to the goal, a line for each method and number of replayed batches."""
    table = Table(
        "method", "replayed per fresh", "trajectories to 0.9", "seconds to 0.9", "final accuracy", box=box.MARKDOWN
    )
    for method in methods_of(rows):
        for replay in sorted({row["replay"] for row in rows}):
            found = select(rows, method=method, replay=replay)
            cells = (samples_cell(found), seconds_cell(found), final_cell(found))
            table.add_row(METHODS[method].title, str(replay), *cells)
    return table


def select(rows: Rows, **wanted: Any) -> Rows:
    """Those whose fields are as said."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def methods_of(rows: Rows) -> list[str]:
    """Methods that have been run, in the order of METHODS."""
    return [name for name in METHODS if select(rows, method=name)]


def final_cell(rows: Rows) -> str:
    """Mean over seeds, the lowest in brackets."""
    values = [row["final"] for row in rows]
    return f"{mean(values):.2f} ({min(values):.2f})" if values else ""


def seconds_cell(rows: Rows) -> str:
    """Time to the goal."""
    return _reached(rows, "goal_s", "{:.0f} s")


def samples_cell(rows: Rows) -> str:
    """Trajectories generated until the goal."""
    return _reached(rows, "goal_samples", "{:,.0f}")


def _reached(rows: Rows, name: str, form: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return "never" if rows else ""
    share = f" ({len(values)} of {len(rows)})" if len(values) < len(rows) else ""
    return form.format(mean(values)) + share


def _by_lag(rows: Rows, title: str, cell: Callable[[Rows], str]) -> Table:
    lags = sorted({row["lag"] for row in rows})
    table = Table("method", *(f"lag {lag}" for lag in lags), box=box.MARKDOWN, title=title)
    for method in methods_of(rows):
        table.add_row(METHODS[method].title, *(cell(select(rows, method=method, lag=lag)) for lag in lags))
    return table
