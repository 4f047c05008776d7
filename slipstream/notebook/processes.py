"""Runs as child processes: a notebook shares neither memory, nor signals, nor random state with them.

Their roles are processes of their own, too, and import functions of the notebook from files."""

import hashlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.migration.translation import format_value
from slipstream.runtime.run_folder import RunFolder

Function = str | Callable[..., Any]
"""`module:function`, `FILE.py:function`, or the function itself."""
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
    RunFolder(load(chosen)).check_name()
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


def path_of(function: Function, *, folder: Path) -> str:
    """Return the path by which a role finds a function.

    A function of the notebook or script itself is written into `folder`, from its source alone: it must import what it
    needs in its body. Raises ConfigError for one without a source or a name.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"a function must be defined by `def` at the top level of a cell or module, got {function!r}."
        )
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(
            f"the source of {name} must be known to hand it to the roles, but Python has none: put it into a file, and "
            f"name it as FILE.py:{name}."
        ) from None
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = folder / f"{name}_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""{name}, as a notebook defined it."""\n\n{source}', encoding="utf-8")
    return f"{path.resolve()}:{name}"
