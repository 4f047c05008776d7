"""Report of the comparison: Markdown tables of means over seeds, and a plot."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich import box
from rich.table import Table

from benchmarks.staleness.plans import METHODS
from slipstream.configs.base import ConfigError
from slipstream.observe.plot import BLUE, ORANGE, STYLE

Rows = list[dict[str, Any]]
"""Finished runs, as `lagging_run.run_plan` returns them."""

REACHED = 0.95
"""Accuracy at which a run counts as trained. The method is responsible for later losses."""


def lag_tables(rows: Rows) -> list[Table]:
    """Build the tables of final and lowest accuracy and of seconds to the goal, one column per lag."""
    return [
        _by_lag(rows, "Final accuracy: mean over seeds (lowest)", final_cell),
        _by_lag(rows, f"Lowest accuracy after {REACHED} was reached: mean over seeds (lowest)", lowest_cell),
        _by_lag(rows, "Seconds to 0.9: mean over seeds that reached it (how many, where not all)", seconds_cell),
    ]


def replay_table(rows: Rows) -> Table:
    """Build the table of samples and seconds to the goal, one line per method and replay factor."""
    table = Table(
        "method", "replayed per fresh", "trajectories to 0.9", "seconds to 0.9", "final accuracy", box=box.MARKDOWN
    )
    for method in methods_of(rows):
        for replay in sorted({row["replay"] for row in rows}):
            found = select(rows, method=method, replay=replay)
            cells = (samples_cell(found), seconds_cell(found), final_cell(found))
            table.add_row(METHODS[method].title, str(replay), *cells)
    return table


def select(rows: Rows, **fields: Any) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def methods_of(rows: Rows) -> list[str]:
    """Return the methods that were run, in the order of METHODS."""
    return [name for name in METHODS if select(rows, method=name)]


def final_cell(rows: Rows) -> str:
    """Format the mean over seeds, with the lowest in parentheses."""
    values = [row["final"] for row in rows]
    return f"{mean(values):.2f} ({min(values):.2f})" if values else ""


def lowest_cell(rows: Rows) -> str:
    """Format the mean over seeds of each run's lowest accuracy since REACHED, with the lowest in parentheses."""
    values = [value for row in rows if (value := lowest(row)) is not None]
    return f"{mean(values):.2f} ({min(values):.2f})" if values else ""


def lowest(row: dict[str, Any]) -> float | None:
    """Return the lowest accuracy of a run after it first reached REACHED; None if it never did."""
    accuracies = [point["accuracy"] for point in row["points"]]
    start = next((index for index, accuracy in enumerate(accuracies) if accuracy >= REACHED), None)
    return None if start is None else min(accuracies[start:])


def seconds_cell(rows: Rows) -> str:
    """Format the CPU time to the goal."""
    return _reached(rows, "goal_s", "{:.0f} s")


def samples_cell(rows: Rows) -> str:
    """Format the number of trajectories generated up to the goal."""
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


# --- plot ------------------------------------------------------------------------------------------------------------
_CURVES = {"token_tis": ORANGE, "default": BLUE}
_CURVES_LAG = 8


def plot(rows: Rows, target: Path) -> Path:
    """Plot the runs with lag and return the file. Raises ConfigError without any."""
    if not rows:
        raise ConfigError("plot needs finished runs, got none with these settings.")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.6), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        left, right = figure.subplots(1, 2, width_ratios=(4, 5))
        _draw_grid(left, rows)
        _draw_curves(right, rows)
        FigureCanvasAgg(figure).print_png(str(target))
    return target


def _draw_grid(axes: Axes, rows: Rows) -> None:
    methods, lags = methods_of(rows), sorted({row["lag"] for row in rows})
    cells = [[select(rows, method=m, lag=lag) for lag in lags] for m in methods]
    values = [[min((lowest(row) or 0.0 for row in cell), default=float("nan")) for cell in line] for line in cells]
    axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.6)
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            if cell:
                final = mean(row["final"] for row in cell)
                axes.text(x, y, f"{final:.2f}", ha="center", va="bottom", fontweight="bold")
                axes.text(x, y, f"lowest {values[y][x]:.2f}", ha="center", va="top", fontsize=7.5)
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_yticks(range(len(methods)), [METHODS[name].title for name in methods])
    axes.set(title="Final accuracy, and the lowest on the way", xlabel="versions behind")
    axes.grid(visible=False)


def _draw_curves(axes: Axes, rows: Rows) -> None:
    for method, color in _CURVES.items():
        for number, row in enumerate(select(rows, method=method, lag=_CURVES_LAG)):
            _draw_points(axes, row, color=color, label="" if number else METHODS[method].title)
    axes.set(title=f"Accuracy at lag {_CURVES_LAG}, a line for each seed", xlabel="step", ylim=(0, 1.02))
    axes.legend(loc="lower left", bbox_to_anchor=(0.12, 0.0))


def _draw_points(axes: Axes, row: dict[str, object], *, color: str, label: str) -> None:
    points = row["points"]
    assert isinstance(points, list), "as `lagging_run.run_plan` returns it"
    steps, accuracies = ([point[name] for point in points] for name in ("step", "accuracy"))
    axes.plot(steps, accuracies, color=color, label=label or None, linewidth=1.2, alpha=0.9)
