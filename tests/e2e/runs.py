"""Whole runs, started as a user starts them, in a folder of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


def make_task(folder: Path, *, warm: bool) -> Path:
    """Data and model of the default task, made by the project's own scripts. Returns `folder`."""
    run_script(folder, "slipstream.scripts.make_digits_data", "--task=reverse", "--digits=5", "--out=data/digits")
    run_script(folder, "slipstream.scripts.init_random_model", "--out=models/digits-random")
    if warm:
        arguments = ("--model=models/digits-random", "--data=data/digits", "--out=models/digits-warm")
        run_script(folder, "slipstream.scripts.warm_up", *arguments)
    return folder


def run_script(folder: Path, module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_async.py"), *overrides]


def train(folder: Path, *overrides: str, timeout_s: float = 240) -> str:
    """Run to the end; returns what it printed."""
    done = subprocess.run(
        command(*overrides), cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything whose working directory is the test's folder: roles, engine cores, store."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
