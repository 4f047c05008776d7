"""Plots a run's metrics; `plot_run` writes `curve.png` into its folder."""

import itertools
import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from slipstream.observe.reader import RunReader

Rows = list[dict[str, Any]]
"""One flat dict per step."""
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9741a", "#2f8f5b", "#6b7280"
STYLE: Any = {
    "axes.edgecolor": "#9aa1ab",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
ACCURACY, REWARD = "eval/accuracy_", "eval/reward_"
TRAINING_REWARD, ENTROPY = "learner/reward_mean", "learner/entropy"
LENGTH = re.compile("learner/by_source/(.+)/(length_mean|trajectories)")
MISMATCH = re.compile("learner/by_lag/([^/]+)/mismatch_k3")
_BY, _UNITS = {"step": "step", "time_s": "time"}, {"step": "step", "time_s": "seconds"}
_COLUMNS = 3
"""Panels in a row below the first."""
SHADES = ("#2563a8", "#2f8f5b", "#c9a227", "#d9741a", "#b3372b", "#6b2d5c")
SET_COLORS = (BLUE, ORANGE, GREEN, *SHADES)
RATES = {"generators/tokens_per_s": ("generators", BLUE), "learner/tokens_per_s": ("learner", ORANGE)}


def is_drawn(key: str) -> bool:
    """Return whether `draw` reads this key of a row."""
    read = ("step", "time_s", TRAINING_REWARD, ENTROPY, "lag/mean", "lag/max", *RATES)
    return key in read or key.startswith((ACCURACY, REWARD)) or bool(MISMATCH.fullmatch(key) or LENGTH.fullmatch(key))


def plot_run(run_dir: Path) -> Path:
    """Draw a run's curves; return the path. Raises ConfigError without a step."""
    rows = RunReader(run_dir).rows()
    target = run_dir / "curve.png"
    target.write_bytes(_png(rows, title=run_dir.resolve().name))
    return target


def _png(rows: Rows, *, title: str) -> bytes:
    file = BytesIO()
    with mpl.rc_context(STYLE):
        FigureCanvasAgg(draw(rows, title=title)).print_png(file)
    return file.getvalue()


def draw(rows: Rows, *, title: str) -> Figure:
    """Draw accuracy by step and time, or the reward if no answer was correct; below, a panel per other measure."""
    measured = {key for row in rows for key in row if row[key] is not None}
    has_accuracy = any(row[key] for row in rows for key in row if key.startswith(ACCURACY))
    panels = {
        _draw_reward: has_accuracy,
        _draw_entropy: ENTROPY in measured,
        _draw_length: any(map(LENGTH.fullmatch, measured)),
        _draw_lag: any(row.get("lag/max") for row in rows),
        _draw_mismatch: any(map(MISMATCH.fullmatch, measured)),
        _draw_rates: bool(measured & RATES.keys()),
    }
    shown = [panel for panel, is_measured in panels.items() if is_measured]
    num_rows = 1 + -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(14, 3.4 * num_rows), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(num_rows, 2 * _COLUMNS)
    for over, columns in (("step", slice(0, _COLUMNS)), ("time_s", slice(_COLUMNS, None))):
        axes = figure.add_subplot(grid[0, columns])
        if has_accuracy:
            _draw_sets(axes, rows, prefix=ACCURACY, over=over)
            axes.set(xlim=(0, None), ylim=(0, 1.02), xlabel=_UNITS[over], title=f"Held-out accuracy by {_BY[over]}")
            axes.legend(loc="best")
        else:
            _draw_reward(axes, rows, over=over)
    for index, panel in enumerate(shown):
        row, column = divmod(index, _COLUMNS)
        panel(figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2]), rows)
    return figure


def _draw_sets(axes: Axes, rows: Rows, *, prefix: str, over: str) -> None:
    found = dict.fromkeys(key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix))
    for label, color in zip(found, itertools.cycle(SET_COLORS), strict=False):
        positions, values = _series(rows, f"{prefix}{label}", over)
        name = f"{label}, last {values[-1]:.3f}"
        axes.plot(positions, values, color=color, marker="o", markersize=3.5, label=name)


def _draw_reward(axes: Axes, rows: Rows, *, over: str = "step") -> None:
    positions, values = _series(rows, TRAINING_REWARD, over)
    axes.plot(positions, values, color=GREY, alpha=0.4, linewidth=1)
    axes.plot(positions, running_mean(values, width=10), color=GREY, label="training, mean of 10 steps")
    _draw_sets(axes, rows, prefix=REWARD, over=over)
    axes.set(title=f"Reward by {_BY[over]}", xlabel=_UNITS[over])
    axes.legend(loc="best")


def _draw_entropy(axes: Axes, rows: Rows) -> None:
    axes.plot(*_series(rows, ENTROPY, "step"), color=BLUE)
    axes.set(title="Entropy at the sampled tokens, nats", xlabel="step", ylim=(0, None))


def _draw_length(axes: Axes, rows: Rows) -> None:
    lengths = []
    for row in rows:
        found = {match[1]: row[key] for key in row if (match := LENGTH.fullmatch(key)) and match[2] == "length_mean"}
        counts = {source: row.get(f"learner/by_source/{source}/trajectories", 1.0) for source in found}
        total = sum(counts.values())
        mean = sum(length * counts[source] for source, length in found.items()) / total if total else None
        lengths.append({"step": row["step"], "length": mean})
    axes.plot(*_series(lengths, "length", "step"), color=BLUE)
    axes.set(title="Length of answers, tokens", xlabel="step", ylim=(0, None))


def _draw_lag(axes: Axes, rows: Rows) -> None:
    axes.scatter(*_series(rows, "lag/max", "step"), color=ORANGE, s=9, label="oldest of a batch")
    axes.plot(*_series(rows, "lag/mean", "step"), color=BLUE, label="mean of a batch")
    axes.set(title="Lag, versions", xlabel="step", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")


def _draw_mismatch(axes: Axes, rows: Rows) -> None:
    # Lag 0 shows the difference between engines; the distance to it, staleness.
    found = {match[1] for row in rows for key in row if (match := MISMATCH.fullmatch(key))}
    # Buckets look like 3, 4-7, or 16+.
    buckets = sorted(found, key=lambda bucket: int(re.split("[-+]", bucket)[0]))
    for bucket, color in zip(buckets, SHADES, strict=False):
        positions, values = _series(rows, f"learner/by_lag/{bucket}/mismatch_k3", "step")
        axes.plot(positions, values, color=color, linewidth=1.2, label=bucket)
    axes.set_yscale("log", nonpositive="mask")
    axes.set(title="Mismatch k3 by lag, nats", xlabel="step")
    axes.legend(loc="lower right")


def _draw_rates(axes: Axes, rows: Rows) -> None:
    for key, (label, color) in RATES.items():
        axes.plot(*_series(rows, key, "step"), color=color, label=label)
    axes.set(title="Tokens per second", xlabel="step", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.legend(loc="lower right")


def _series(rows: Rows, key: str, over: str) -> tuple[list[float], list[float]]:
    drawn = [row for row in rows if row.get(key) is not None]
    return [row[over] for row in drawn], [row[key] for row in drawn]


def running_mean(values: list[float], *, width: int) -> list[float]:
    """Return trailing means over up to `width` values."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


class Curve:
    """Keeps the drawn keys of each row. Life: add* -> (draw | add)*."""

    def __init__(self, *, title: str) -> None:
        self._title = title
        self._rows: list[dict[str, Any]] = []
        self.has_undrawn = False

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        new = [{key: value for key, value in row.items() if is_drawn(key)} for row in rows]
        self._rows += new
        self.has_undrawn |= bool(new)

    def draw(self) -> tuple[int, bytes]:
        """Return the newest step and a PNG of all rows."""
        self.has_undrawn = False
        return self._rows[-1]["step"], _png(self._rows, title=self._title)
