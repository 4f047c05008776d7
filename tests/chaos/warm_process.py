"""WarmProcess: a role's process forked from one that has imported torch and transformers already.

It runs the same `main` with the same arguments as `python -m module`; the seconds of importing are saved, which decide
how many kills fit into a minute. Every start is a new process with a new memory.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from slipstream.runtime.process import LAUNCHER_VARIABLE

_PRELOADED = [
    "slipstream.broker.__main__",
    "slipstream.broker.weights.collective",
    "slipstream.generators.__main__",
    "slipstream.generators.build",
    "slipstream.learner.build",
    "slipstream.scripts.init_random_model",
    "tests.chaos.command",
    "tests.chaos.scripted_learner",
]


class WarmProcess:
    """One process at a time; `start` again after its end. `module` is the one with `main`, as `slipstream.generators.__main__`."""

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        self._target = (module, arguments, cwd, log)
        self._log = log
        self._process: ForkServerProcess | None = None

    @property
    def pid(self) -> int:
        """Of the newest process."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative = the signal it died of."""
        return self._process.exitcode if self._process else 0

    @property
    def last_line(self) -> str:
        """Of its log."""
        return last_line(self._log)

    def start(self) -> None:
        """Fork."""
        self._process = _warm_context().Process(target=_become, args=self._target)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """A signal; nothing happens to a process that is gone."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait(self, *, timeout_s: float) -> int | None:
        """Block until it ends, at most `timeout_s`; returns the exit code."""
        assert self._process is not None
        self._process.join(timeout_s)
        return self.exit_code


def last_line(log: Path) -> str:
    """What a log ends with."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "(nothing)"


def _warm_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _become(module: str, arguments: list[str], cwd: Path, log: Path) -> None:
    """Be `python -m module arguments` from here on, in a session of its own: Ctrl-C reaches the harness alone."""
    os.setsid()
    os.chdir(cwd)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    importlib.import_module(module).main(arguments)
