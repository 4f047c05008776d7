"""Costs and gains of `staleness.target_lag=auto`, simulated: fixed values next to it in many situations.

The real `Pacer` and admission limit drive a simulated engine and learner on simulated time, so that hundreds of steps
take seconds and other load on the machine changes nothing. Lengths are lognormal; an engine slows down when more
answers run than it has capacity for. `python -m benchmarks.generators.long_answers` measures real roles.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.pacing import Pacer, admission_limit, target_lag
from slipstream.buffer.records import RunState
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig

_GROUPS_PER_STEP = 8
_GROUP_SIZE = 4
_MAX_LAG = 4
_TICKS_PER_STEP = 200
_COLUMNS = {
    "situation": "{situation}",
    "target_lag": "{target_lag}",
    "step, relative": "{step:.3f}",
    "learner waits": "{wait:.1%}",
    "mean lag": "{lag:.2f}",
    "stale tokens": "{stale:.2%}",
    "target_lag at the end": "{last:.2f}",
}

console = Console(highlight=False)


@dataclass(frozen=True)
class Situation:
    """Durations are relative to the learner's step without waiting."""

    answer: float = 0.4
    """Median duration of an answer on an engine with free capacity."""
    sigma: float = 0.3
    """Spread of lengths, log scale; lengths are cut at ten times the median."""
    capacity: float = 1e9
    """Answers that run at full speed; more share it."""
    tool: float = 0.0
    """Mean wait for tools per answer, exponential."""
    publish: float = 0.1
    """From the end of a step until its version is committed."""
    pause: float = 0.02
    """Engine's pause before a commit."""
    learner_pause_every: int = 0
    """Steps between pauses of one step's duration, as for a checkpoint."""
    capacity_changes: tuple[tuple[float, float], ...] = ()
    """(fraction of the run, new capacity): generators that join or leave."""


_SITUATIONS = {
    "short answers": Situation(),
    "answers as long as a step": Situation(answer=0.9),
    "long answers": Situation(answer=1.8),
    "long tails": Situation(answer=0.3, sigma=1.0),
    "tools": Situation(tool=0.5),
    "slow updates": Situation(publish=0.6, pause=0.3),
    "learner pauses": Situation(answer=0.9, learner_pause_every=10),
    "generators are the bottleneck": Situation(answer=0.4, capacity=10.0),
    "generators leave and join": Situation(answer=0.6, capacity=60.0, capacity_changes=((0.35, 18.0), (0.7, 60.0))),
}


def main(arguments: argparse.Namespace) -> None:
    """Simulate every situation with every value."""
    rows: list[dict[str, Any]] = []
    traces: dict[str, list[float]] = {}
    for name, situation in _SITUATIONS.items():
        compared: list[dict[str, Any]] = []
        for lag in ["auto", "4", "3", "2", "1"]:
            runs = [Simulation(situation, lag, seed=seed, num_steps=arguments.steps) for seed in range(arguments.seeds)]
            figures = [each.run() for each in runs]
            mean = {key: float(np.mean([each[key] for each in figures])) for key in figures[0]}
            compared.append({"situation": name, "target_lag": lag} | mean)
            if lag == "auto":
                traces[name] = runs[0].lags
        fastest = min(row["step_s"] for row in compared)
        rows += [row | {"step": row["step_s"] / fastest} for row in compared]
    console.print(make_table(rows, _COLUMNS))
    if arguments.plot:
        _plot(traces, arguments.plot)
    write_result(arguments, {"rows": rows, "target_lag by step": traces})


class Engine:
    """Answers of all groups on simulated time, as arrays [groups, members]."""

    def __init__(self, situation: Situation, *, num_groups: int, num_versions: int, rng: np.random.Generator) -> None:
        shape = (num_groups, _GROUP_SIZE)
        lengths = situation.answer * np.exp(situation.sigma * rng.standard_normal(shape))
        self._left = np.minimum(lengths, 10 * situation.answer)
        """Time to go at full speed."""
        self._tool = rng.exponential(situation.tool, size=shape) if situation.tool else np.zeros(shape)
        self.sampled = np.zeros((num_groups, num_versions))
        """Time spent on sampling, by group and version."""
        self.capacity = situation.capacity
        self._done = 0
        """All groups before this one are finished."""

    def run(self, dt: float, *, admitted: int, version: int) -> list[int]:
        """Generate for `dt`; return the groups that became ready."""
        left, tool = self._left[self._done : admitted], self._tool[self._done : admitted]
        runs = (left > 0) & (tool <= 0)
        was_open = (left > 0).any(axis=1)
        tool[left > 0] -= dt
        rate = min(1.0, self.capacity / max(1, runs.sum()))
        progress = np.where(runs, np.minimum(left, rate * dt), 0.0)
        left -= progress
        left[left < 1e-9] = 0.0
        self.sampled[self._done : admitted, version] += progress.sum(axis=1)
        is_open = (left > 0).any(axis=1)
        ready = [self._done + int(index) for index in np.flatnonzero(was_open & ~is_open)]
        self._done += int(np.argmax(is_open)) if is_open.any() else len(left)
        return ready


class Simulation:
    """One run on simulated time. Life: run, once."""

    def __init__(self, situation: Situation, lag: str, *, seed: int, num_steps: int) -> None:
        overrides = [
            f"staleness.max_lag={_MAX_LAG}",
            f"staleness.target_lag={lag}",
            f"learner.prompts_per_step={_GROUPS_PER_STEP}",
            f"learner.max_steps={num_steps}",
            f"generators.group_size={_GROUP_SIZE}",
        ]
        self._run: RunConfig = load(overrides)
        self._situation, self._num_steps = situation, num_steps
        self._engine = Engine(
            situation,
            num_groups=num_steps * _GROUPS_PER_STEP,
            num_versions=num_steps + 1,
            rng=np.random.default_rng(seed),
        )
        self._pacer = Pacer(self._run) if lag == "auto" else None
        self._state = RunState(run_id="", phase="training", step=0, version=0, announced_version=0)
        self._ready: list[int] = []
        self._by_age = np.zeros(num_steps + 1)
        self._waited = 0.0
        self.lags: list[float] = []
        """Target lag at every step."""

    def run(self) -> dict[str, float]:
        """Return time per step (1 without waiting), fraction of waiting time, mean lag, fraction of stale tokens."""
        dt, now, asked_at = 1 / _TICKS_PER_STEP, 0.0, 0.0
        claimed_at, trained_at = 0.0, math.inf
        step = 0
        commits: list[tuple[float, int]] = []
        changes = list(self._situation.capacity_changes)
        while step < self._num_steps or now < trained_at < math.inf:
            now += dt
            if commits and now >= commits[0][0]:
                version = commits.pop(0)[1]
                self._state = replace(self._state, version=version, consumed=version * _GROUPS_PER_STEP)
            if changes and step >= changes[0][0] * self._num_steps:
                self._engine.capacity = changes.pop(0)[1]
            if not commits or now < commits[0][0] - self._situation.pause:
                admitted = admission_limit(self._run, self._state)
                self._ready += self._engine.run(dt, admitted=admitted, version=self._state.version)
            if now >= trained_at:
                commits.append((now + self._situation.publish, step))
                asked_at, trained_at = now, math.inf
            if trained_at == math.inf and step < self._num_steps and len(self._ready) >= _GROUPS_PER_STEP:
                self._claim(step, waited_s=now - asked_at, step_s=now - claimed_at)
                step, claimed_at = step + 1, now
                every = self._situation.learner_pause_every
                trained_at = now + (2.0 if every and step % every == 0 else 1.0)
        return {
            "step_s": now / self._num_steps,
            "wait": self._waited / now,
            "lag": float(self._by_age @ np.arange(len(self._by_age)) / self._by_age.sum()),
            "stale": float(self._by_age[_MAX_LAG + 1 :].sum() / self._by_age.sum()),
            "last": self.lags[-1],
        }

    def _claim(self, step: int, *, waited_s: float, step_s: float) -> None:
        groups, self._ready = self._ready[:_GROUPS_PER_STEP], self._ready[_GROUPS_PER_STEP:]
        self._waited += waited_s
        if self._pacer and self._pacer.record_step(waited_s=waited_s, step_s=step_s, num_spare=len(self._ready)):
            self._state = replace(self._state, target_lag=self._pacer.lag)
        self.lags.append(target_lag(self._run, self._state))
        # The version at the start of step `step` is `step`; the first steps are not representative.
        if step >= self._num_steps // 10:
            self._by_age[: step + 1] += self._engine.sampled[groups, : step + 1].sum(axis=0)[::-1]


def _plot(traces: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, lags in traces.items():
        axes.plot(np.arange(1, len(lags) + 1), lags, label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="target_lag chosen by auto, versions", ylim=(0, _MAX_LAG + 0.3))
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.pacing", __doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of a run (300)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each situation (3)")
    parser.add_argument("--plot", type=Path, help="write the chosen lags of all situations to this image")
    main(parser.parse_args())
