"""Processes under chaos: a role forked from a warm process, a role started cold, and the Redis server."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Protocol

import psutil

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.runtime.process import LAUNCHER_VARIABLE

_ROOT = Path(__file__).parents[2]
_PRELOADED = [
    "slipstream.broker.__main__",
    "slipstream.broker.weights.collective",
    "slipstream.generators.__main__",
    "slipstream.generators.build",
    "slipstream.learner.build",
    "slipstream.scripts.init_random_model",
    "tests.chaos.harness",
    "tests.chaos.relay",
    "tests.chaos.scripted_learner",
    "tests.chaos.watched.broker",
    "tests.chaos.watched.generator",
]


class Process(Protocol):
    """One process at a time; `start` again after its end."""

    @property
    def pid(self) -> int:
        """Id of the newest process."""
        ...

    @property
    def exit_code(self) -> int | None:
        """None while the process lives; negative: the signal that ended it; 0 before the first start."""
        ...

    @property
    def last_line(self) -> str:
        """Last line of its log."""
        ...

    def start(self) -> None:
        """Start a process with an empty memory."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Send a signal; no effect on a process that has ended."""
        ...

    def wait(self, *, timeout_s: float) -> int | None:
        """Block until the process ends, at most `timeout_s`; returns the exit code."""
        ...


class WarmProcess:
    """A process forked from one that has imported torch and transformers, with the same `main` as `python -m module`.

    This saves seconds of imports, so that more kills fit into a minute. `module` is the one with `main`,
    such as `slipstream.generators.__main__`.
    """

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        self._target = (module, arguments, cwd, log)
        self._log = log
        self._process: ForkServerProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode if self._process else 0

    @property
    def last_line(self) -> str:
        return last_line(self._log)

    def start(self) -> None:
        self._process = _warm_context().Process(target=_run_module, args=self._target)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait(self, *, timeout_s: float) -> int | None:
        assert self._process is not None
        self._process.join(timeout_s)
        return self.exit_code


def _warm_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run_module(module: str, arguments: list[str], cwd: Path, log: Path) -> None:
    os.setsid()  # Ctrl-C must reach the harness only, which then ends the roles
    os.chdir(cwd)
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    importlib.import_module(module).main(arguments)


class ColdProcess:
    """A process with a fresh interpreter, `python -m module arguments`, as a user starts it."""

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        self._cwd = cwd
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._is_group_killed = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._ended(self._process.poll()) if self._process else 0

    @property
    def last_line(self) -> str:
        return last_line(self._log)

    def start(self) -> None:
        self._is_group_killed = False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {LAUNCHER_VARIABLE: str(os.getpid()), "PYTHONPATH": str(_ROOT)},
            )

    def send(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int | None:
        assert self._process is not None
        try:
            return self._ended(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def _ended(self, code: int | None) -> int | None:
        # Kill the role's children, like the launcher: a starting engine does not notice its parent's death.
        if code is not None and not self._is_group_killed:
            self._is_group_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code


class StoreProcess:
    """The embedded Redis server; every start is on the same data."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server
        self._process: psutil.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return 0 if self._process is None else self.wait(timeout_s=0)

    @property
    def last_line(self) -> str:
        return last_line(self._server.log_path)

    def start(self) -> None:
        """Block until the server has loaded its data and answers. Raises StoreUnavailableError."""
        self._server.start()
        assert self._server.pid is not None
        self._process = psutil.Process(self._server.pid)

    def send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            if self._process:
                self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(timeout_s) or 0
        except psutil.TimeoutExpired:
            return None


def last_line(log: Path) -> str:
    """Last line of a log file."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "(nothing)"
