"""The picture of benchmarks.staleness: final accuracy by method and lag, curves at the largest lag and with replay."""

from pathlib import Path
from statistics import mean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.staleness.plans import METHODS
from benchmarks.staleness.tables import Rows, methods_of, select
from slipstream.configs.base import ConfigError
from slipstream.launch.plot import BLUE, GREEN, GREY, ORANGE, STYLE

_CURVES = {"none": GREY, "naive_ppo": ORANGE, "token_tis": BLUE, "decoupled_ppo": GREEN}
_REPLAY_COLOURS = (GREY, BLUE, GREEN, ORANGE)


def plot(lagging: Rows, replaying: Rows, target: Path) -> Path:
    """Draw runs with lag, and without lag and with replay; returns where. Raises ConfigError: nothing to draw."""
    if not lagging:
        raise ConfigError("there must be finished runs to be plotted, got none with these settings.")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 8.4), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        grid = figure.add_gridspec(2, 2)
        _draw_grid(figure.add_subplot(grid[:, 0]), lagging)
        _draw_curves(figure.add_subplot(grid[0, 1]), lagging)
        _draw_replay(figure.add_subplot(grid[1, 1]), replaying)
        FigureCanvasAgg(figure).print_png(str(target))
    return target


def _draw_grid(axes: Axes, rows: Rows) -> None:
    methods, lags = methods_of(rows), sorted({row["lag"] for row in rows})
    cells = [[[row["final"] for row in select(rows, method=m, lag=lag)] for lag in lags] for m in methods]
    values = [[mean(cell) if cell else float("nan") for cell in line] for line in cells]
    axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.6)
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            if cell:
                axes.text(x, y, f"{mean(cell):.2f}", ha="center", va="bottom", fontweight="bold")
                axes.text(x, y, f"{min(cell):.2f} to {max(cell):.2f}", ha="center", va="top", fontsize=7.5)
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_yticks(range(len(methods)), [METHODS[name].title for name in methods])
    axes.set(title="Final accuracy by lag: mean over seeds, and range", xlabel="versions behind")
    axes.grid(visible=False)


def _draw_curves(axes: Axes, rows: Rows) -> None:
    lag = max(row["lag"] for row in rows)
    for method, colour in _CURVES.items():
        for number, row in enumerate(select(rows, method=method, lag=lag)):
            _draw_points(axes, row, over="step", colour=colour, label="" if number else METHODS[method].title)
    axes.set(title=f"Accuracy at lag {lag}, a line for each seed", xlabel="step", ylim=(0, 1.02))
    axes.legend(loc="lower left", bbox_to_anchor=(0.12, 0.0))


def _draw_replay(axes: Axes, rows: Rows) -> None:
    replays = sorted({row["replay"] for row in rows})
    for replay, colour in zip(replays, _REPLAY_COLOURS, strict=False):
        for method, style in (("token_tis", "-"), ("none", ":")):
            found = select(rows, method=method, replay=replay)
            for number, row in enumerate(found):
                label = "" if number else f"{replay} replayed, {METHODS[method].title}"
                _draw_points(axes, row, over="samples", colour=colour, label=label, style=style)
    axes.set(title="Accuracy with replayed batches, no lag", xlabel="trajectories generated", ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower right", fontsize=8)


def _draw_points(axes: Axes, row: dict[str, object], *, over: str, colour: str, label: str, style: str = "-") -> None:
    points = row["points"]
    assert isinstance(points, list), "as `lagging_run.run_plan` returns it"
    places = [point[over] for point in points]
    axes.plot(
        places, [p["accuracy"] for p in points], style, color=colour, label=label or None, linewidth=1.2, alpha=0.9
    )
