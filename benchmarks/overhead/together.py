"""Both sides at once: a short run of the real program, and what its own metrics say of it."""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMEOUT_S = 400.0
_KEYS = (
    "generators/tokens_per_s",
    "learner/tokens_per_s",
    "learner/wait_s",
    "learner/train_s",
    "learner/publish_s",
    "weights/pause_s",
)


def run_together(folder: Path, *, overrides: list[str], steps: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Medians over the last half of `steps` steps of a run in `folder`, and how many tokens/s it used in them."""
    settings = [
        "name=together",
        f"runs_dir={folder}",
        f"broker.address=ipc://{folder}/broker.sock",
        f"learner.max_steps={steps}",
        "learner.stop=null",
        "evaluation.every_steps=0",
        "evaluation.final_prompts=32",
    ]
    command = [sys.executable, "run_async.py", *overrides, *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        logs = "\n".join(log.read_text()[-2000:] for log in sorted((folder / "together" / "logs").glob("*.log")))
        raise RuntimeError(f"the run must end well, got exit code {done.returncode}:\n{done.stdout}\n{logs}")
    return _medians([json.loads(line) for line in (folder / "together" / "metrics.jsonl").read_text().splitlines()])


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    steady = rows[len(rows) // 2 :]
    seconds = steady[-1]["time_s"] - steady[0]["time_s"]
    tokens = sum(row["learner/tokens"] for row in steady[1:])
    return {key: statistics.median(row[key] for row in steady) for key in _KEYS} | {
        "steps": len(rows),
        "measured_steps": len(steady),
        "tokens_per_s": tokens / seconds,
    }
