"""One training run with 1, 4, 2, then 3 generators: throughput of each phase, start-up time of new generators.

digits_rotary_cpu with real vLLM, DeepSpeed, and Redis under the launcher, scaled by `run_async.py scale`. A phase
NUMBER:STEP requests that number of generators from that step on. The time of a new generator's first trajectory comes
from its gauges and is up to a second late.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.base import ConfigError

_POLL_INTERVAL_S = 0.2
_START_S = 180.0
_REWARD_ROWS = 10
_NAME = "elastic"
_EXPERIMENT = "experiment=digits_rotary_cpu"
_COLUMNS = {
    "generators": "{generators}",
    "steps": "{steps}",
    "seconds": "{seconds:.1f}",
    "learner waits": "{wait_fraction:.0%}",
    "publishing": "{publish_fraction:.1%}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "lag": "{lag_mean:.2f}",
    "reward at its end": "{reward_at_end:.3f}",
}

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Run once, scaling at each phase, then report on the phases."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as runs_dir:
        overrides = [f"name={_NAME}", f"runs_dir={runs_dir}", f"generators.count={arguments.phases[0][0]}"]
        # A run of minutes: the default experiment ends before a new generator has started.
        command = [sys.executable, "-m", "slipstream", "run", _EXPERIMENT, *overrides, *arguments.overrides]
        with (Path(runs_dir) / "launcher.log").open("w") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            joined = Steering(Path(runs_dir) / _NAME, launcher).run(arguments.phases)
        finally:
            launcher.terminate()
            launcher.wait()
            # Even if the run failed.
            metrics = Path(runs_dir) / _NAME / "metrics.jsonl"
            rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
            write_result(arguments, {"rows": rows})
        summary = json.loads((Path(runs_dir) / _NAME / "summary.json").read_text())
    result = {"joined": joined, "phases": by_phase(rows, arguments.phases), "summary": summary}
    steps = [row["step"] for row in rows]
    result["no_step_lost"] = steps == list(range(1, len(steps) + 1))
    print_tables(result)
    write_result(arguments, result)


class Steering:
    """Scales a run and observes it through its store."""

    def __init__(self, folder: Path, launcher: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
        self._folder = folder
        self._launcher = launcher
        self._first: dict[str, float] = {}

    def run(self, phases: list[tuple[int, int]]) -> dict[str, float]:
        """Scale at each phase's step until the run ends; return each generator's seconds to its first trajectory."""
        due = phases[1:]
        with self._open_store() as store:
            while self._launcher.poll() is None:
                # The launcher stops the store at the end of the run.
                with suppress(ReplayBufferError):
                    self._record_first_trajectories(store)
                    if due and store.run_state().step >= due[0][1]:
                        number, step = due.pop(0)
                        console.print(f"step {step}: {number} generators")
                        settings = [f"generators={number}", f"name={_NAME}", f"runs_dir={self._folder.parent}"]
                        command = [sys.executable, "-m", "slipstream", "scale", *settings]
                        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                time.sleep(_POLL_INTERVAL_S)
        return self._first

    def _open_store(self) -> RedisStore:
        """Wait until the broker has created the run."""
        deadline = time.monotonic() + _START_S
        while self._launcher.poll() is None and time.monotonic() < deadline:
            with suppress(ConfigError, ReplayBufferError):
                return open_run_store(self._folder, timeout_s=COMMAND_TIMEOUT_S)
            time.sleep(_POLL_INTERVAL_S)
        printed = (self._folder.parent / "launcher.log").read_text()[-4000:]
        raise SystemExit(f"the run must start within {_START_S:g} s, its launcher printed:\n{printed}")

    def _record_first_trajectories(self, store: RedisStore) -> None:
        for name, gauges in store.roles().items():
            key = f"{name}, process {gauges.get('pid')}"
            if gauges.get("role") == "generator" and gauges.get("trajectories") and key not in self._first:
                self._first[key] = time.time() - psutil.Process(gauges["pid"]).create_time()


def by_phase(rows: list[dict[str, Any]], phases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Summarize the steps of each phase."""
    ends = [step for _, step in phases[1:]] + [rows[-1]["step"]]
    return [
        summarize(number, [row for row in rows if start < row["step"] <= end])
        for (number, start), end in zip(phases, ends, strict=True)
    ]


def summarize(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the metrics of one phase."""
    waited = sum(row["learner/wait_s"] for row in rows)
    worked = sum(row["learner/train_s"] + row["learner/publish_s"] for row in rows)
    return {
        "generators": number,
        "steps": len(rows),
        "seconds": waited + worked,
        "wait_fraction": waited / max(waited + worked, 1e-9),
        "publish_fraction": sum(row["learner/publish_s"] for row in rows) / max(waited + worked, 1e-9),
        "tokens_per_s": statistics.median([row.get("generators/tokens_per_s", 0.0) for row in rows] or [0.0]),
        "lag_mean": statistics.fmean([row["lag/mean"] for row in rows] or [0.0]),
        "reward_at_end": statistics.fmean([row["learner/reward_mean"] for row in rows[-_REWARD_ROWS:]] or [0.0]),
    }


def print_tables(result: dict[str, Any]) -> None:
    """Print phases, start-up times, and the outcome of the run."""
    console.print(make_table(result["phases"], _COLUMNS, title="one run"))
    joined = [{"name": name, "seconds": seconds} for name, seconds in result["joined"].items()]
    console.print(make_table(joined, {"generator": "{name}", "start to first trajectory, s": "{seconds:.1f}"}))
    summary = result["summary"]
    console.print(
        f"every step once: {result['no_step_lost']}; held-out accuracy {summary['accuracy_sampled']:.3f} sampled, "
        f"{summary['accuracy_greedy']:.3f} greedy after {summary['steps']} steps, {summary['train_seconds']:.0f} s"
    )


def _phase(text: str) -> tuple[int, int]:
    number, _, step = text.partition(":")
    return int(number), int(step)


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.elastic", __doc__)
    phases = [(1, 0), (4, 30), (2, 110), (3, 150)]
    parser.add_argument(
        "--phases", type=_phase, nargs="+", default=phases, help="NUMBER:STEP ..., the first one at step 0"
    )
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
