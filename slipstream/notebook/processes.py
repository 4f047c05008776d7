"""Runs as child processes: a notebook shares neither memory, nor signals, nor random state with them."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.migration.translation import format_value
from slipstream.notebook.functions import Function, path_of

_SETTINGS = {
    "reward": ("generators.reward.function={path}",),
    "rescore": ("replay.rescore={path}",),
    "loss": ("algorithm/policy_loss=custom", "algorithm.policy_loss.function={path}"),
    "advantage": ("algorithm/advantage=custom", "algorithm.advantage.function={path}"),
    "agent": ("generators/agent=custom", "generators.agent.function={path}"),
}
"""Own function -> the overrides that choose it."""
_STOP_TIMEOUT_S = 60.0
"""Time for a run to drain its roles after an interrupt."""


def train(overrides: Sequence[str], *, name: str, runs_dir: Path, functions: Mapping[str, Function | None]) -> Path:
    """Run an experiment to its end, printing what it prints; return its folder.

    An interrupt (the stop button of a notebook) ends the run as Ctrl-C does. Raises ConfigError for settings that are
    not valid, RuntimeError when the run fails.
    """
    chosen = list(overrides)
    for kind, function in functions.items():
        if function is not None:
            path = path_of(function, folder=runs_dir / "functions")
            chosen += [setting.format(path=format_value(path)) for setting in _SETTINGS[kind]]
    chosen += [f"name={name}", f"runs_dir={runs_dir}"]
    load(chosen)
    if (runs_dir / name).exists() and "resume=true" not in chosen:
        raise ConfigError(f"name must be unused in {runs_dir}/, got {name!r}, which exists: choose another.")
    child = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "run", *chosen],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = ""
    try:
        assert child.stdout is not None
        # Needs no deadline: every wait of the run has one.
        for line in child.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        code = child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    if code:
        raise RuntimeError(f"run {name!r} must end well, got exit code {code}: {last}")
    return runs_dir / name
