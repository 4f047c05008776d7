"""Processes under chaos: a role forked from a warm process, a role started cold, and the Redis server."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.runtime.process import LAUNCHER_VARIABLE
from tests.runs import ROOT, kill_processes_of

_PRELOADED = [
    *("slipstream.broker.__main__", "slipstream.broker.weights.collective", "slipstream.generators.__main__"),
    *("slipstream.generators.build", "slipstream.learner.build", "slipstream.scripts.init_random_model"),
    *("tests.chaos.harness", "tests.chaos.relay", "tests.chaos.scripted_learner", "tests.chaos.watched.broker"),
    "tests.chaos.watched.generator",
]


class Process:
    """One process at a time, with a log; `start` again after its end."""

    _process: Any = None

    def __init__(self, log: Path) -> None:
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process lives; negative: the signal that ended it; 0 before the first start."""
        return self.wait(timeout_s=0) if self._process else 0

    @property
    def last_line(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return lines[-1] if lines else "(nothing)"

    def start(self) -> None:
        raise NotImplementedError

    def send(self, number: signal.Signals) -> None:
        """Send a signal; no effect on a process that has ended."""
        with suppress(ProcessLookupError):
            if self.exit_code is None:
                os.kill(self.pid, number)

    def wait(self, *, timeout_s: float) -> int | None:
        """Block until the process ends, at most `timeout_s`; returns the exit code."""
        raise NotImplementedError


class WarmProcess(Process):
    """A process forked from one that has imported torch and transformers, with the same `main` as `python -m module`.

    This saves seconds of imports, so that more kills fit into a minute. `module` is the one with `main`,
    such as `slipstream.generators.__main__`.
    """

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        super().__init__(log)
        self._target = (module, arguments, cwd, log)

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run_module, args=self._target)
        self._process.start()

    def wait(self, *, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode


def _run_module(module: str, arguments: list[str], cwd: Path, log: Path) -> None:
    os.setsid()  # Ctrl-C must reach the harness only, which then ends the roles
    os.chdir(cwd)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    importlib.import_module(module).main(arguments)


class ColdProcess(Process):
    """A process with a fresh interpreter, `python -m module arguments`, as a user starts it."""

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        super().__init__(log)
        self._command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        self._cwd = cwd
        self._is_group_killed = False

    def start(self) -> None:
        self._is_group_killed = False
        environment = os.environ | {LAUNCHER_VARIABLE: str(os.getpid()), "PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(
                self._command, cwd=self._cwd, env=environment, start_new_session=True, **streams
            )

    def wait(self, *, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        # Kill the role's children, like the launcher: a starting engine does not notice its parent's death.
        if not self._is_group_killed:
            self._is_group_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code


class StoreProcess(Process):
    """The embedded Redis server; every start is on the same data."""

    def __init__(self, server: EmbeddedRedis) -> None:
        super().__init__(server.log_path)
        self._server = server

    def start(self) -> None:
        """Block until the server has loaded its data and answers. Raises StoreUnavailableError."""
        self._server.start()
        self._process = psutil.Process(self._server.pid)

    def wait(self, *, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s) or 0
        except psutil.TimeoutExpired:
            return None


_ROUNDS, _GAP_S = 5, 0.2
"""More than one round: a role that is dying may still start a process."""


def start_guard(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the guard of a folder, in a session of its own; its end is `guard.stdin.close()`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.processes", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        # Not the harness's output, because its reader waits until every process has closed it.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(folder: Path) -> None:
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        kill_processes_of(folder)
        time.sleep(_GAP_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
