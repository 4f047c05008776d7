"""Compares algorithms on the same data: replays a stored run under several settings, with one table and one picture."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.table import Table

from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.launch.plot import BLUE, GREEN, GREY, ORANGE, STYLE, Rows, running_mean
from slipstream.runtime.console import add_row, make_console, make_table
from slipstream.runtime.run_folder import read_metrics

_COLOURS = (BLUE, ORANGE, GREEN, GREY)
_PANELS = {
    "eval/accuracy_sampled": "Held-out accuracy, sampled",
    "learner/loss": "Loss",
    "learner/entropy": "Entropy, nats",
    "learner/grad_norm": "Gradient norm before clipping",
    "learner/idle_fraction": "Share of tokens without gradient",
    "learner/mismatch_k3": "KL from the generator, nats per token",
}
_SMOOTH = {"learner/loss", "learner/grad_norm"}
_TABLE = {
    "accuracy_before": "accuracy before",
    "accuracy_sampled": "sampled",
    "accuracy_greedy": "greedy",
    "train_seconds": "seconds",
}


class Replay(Record):
    """A replay under its own settings.

    Example: Replay(label="algorithm/policy_loss=reinforce", folder="runs/losses/replay-2")
    """

    label: str
    """Overrides that it does not share with the others, separated by blanks."""
    folder: str

    @property
    def rows(self) -> Rows:
        """Metrics, one dict per step. Raises ConfigError."""
        return read_metrics(Path(self.folder) / "metrics.jsonl")

    @property
    def summary(self) -> dict[str, float]:
        return json.loads((Path(self.folder) / "summary.json").read_text())


def compare_replays(archive: Path, settings: list[str], *, shared: list[str], out: Path) -> None:
    """Replay `archive` under each of `settings`, then print the table and draw the curves. Raises ConfigError."""
    if not 2 <= len(settings) <= len(_COLOURS):
        raise ConfigError(f"--replay must be given 2 to {len(_COLOURS)} times, got {len(settings)}.")
    replays = run_replays(archive, settings, shared=shared, out=out)
    make_console().print(tabulate(replays))
    print(f"picture {write_picture(replays, out / 'compared.png', title=f'{archive}, replayed')}")


def run_replays(archive: Path, settings: list[str], *, shared: list[str], out: Path) -> list[Replay]:
    """Replay `archive` under each of `settings` (overrides, separated by blanks), one after the other.

    Blocks until the last has ended. Raises ConfigError when one fails.
    """
    # Curves of another comparison must not end up in the same picture.
    if out.exists():
        raise ConfigError(f"--out must not exist yet, got {out}: choose another folder, or delete it.")
    replays = [Replay(label, str(out / f"replay-{number}")) for number, label in enumerate(settings, start=1)]
    for number, replay in enumerate(replays, start=1):
        print(f"replay {number} of {len(replays)}: {replay.label}", flush=True)
        # A process each: they share no random state, and the memory of one is free before the next.
        own = [f"name=replay-{number}", f"runs_dir={out}", f"replay.path={archive}"]
        command = [
            sys.executable,
            "-m",
            "slipstream",
            "run",
            "experiment=digits_replay",
            *shared,
            *shlex.split(replay.label),
            *own,
        ]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            raise ConfigError(f"the replay under {replay.label} failed with exit code {code}; its message is above.")
    return replays


def draw(replays: list[Replay], *, title: str) -> Figure:
    """Draw one panel per measure, with one curve per replay."""
    figure = Figure(figsize=(12, 6.8), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(2, 3)
    rows = [replay.rows for replay in replays]
    for index, (key, name) in enumerate(_PANELS.items()):
        axes = figure.add_subplot(grid[divmod(index, 3)])
        axes.set(title=name, xlabel="step")
        for replay, steps, colour in zip(replays, rows, _COLOURS, strict=False):
            _draw_curve(axes, steps, key, label=replay.label, colour=colour)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=len(replays))
    return figure


def _draw_curve(axes: Axes, rows: Rows, key: str, *, label: str, colour: str) -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    if key in _SMOOTH:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        values = running_mean(values, width=5)
    axes.plot(steps, values, color=colour, label=label, marker="o" if key.startswith("eval/") else "", markersize=3.5)


def tabulate(replays: list[Replay]) -> Table:
    """Build a table with one row per replay."""
    numbers = (*_TABLE.values(), "steps", "last loss", "last gradient norm")
    table = make_table("settings", *numbers, numbers=numbers)
    for replay in replays:
        last, summary = replay.rows[-1], replay.summary
        ends = (f"{last['learner/loss']:.4f}", f"{last['learner/grad_norm']:.3f}")
        add_row(table, replay.label, *(f"{summary[key]:.3f}" for key in _TABLE), last["step"], *ends)
    return table


def write_picture(replays: list[Replay], target: Path, *, title: str) -> Path:
    """Write the curves as PNG to `target` and return it."""
    with mpl.rc_context(STYLE):
        FigureCanvasAgg(draw(replays, title=title)).print_png(str(target))
    return target
