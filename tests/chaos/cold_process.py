"""ColdProcess: a role's process started as a person starts it, `python -m module arguments`."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from slipstream.runtime.process import LAUNCHER_VARIABLE
from tests.chaos.warm_process import last_line

_ROOT = Path(__file__).parents[2]


class ColdProcess:
    """One process at a time; `start` again after its end."""

    def __init__(self, module: str, arguments: list[str], *, cwd: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        self._cwd = cwd
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cleared = False

    @property
    def pid(self) -> int:
        """Of the newest process."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative = the signal it died of."""
        return self._ended(self._process.poll()) if self._process else 0

    @property
    def last_line(self) -> str:
        """Of its log."""
        return last_line(self._log)

    def start(self) -> None:
        """Run it in a session of its own: Ctrl-C reaches the harness alone."""
        self._is_cleared = False
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
        """A signal; nothing happens to a process that is gone."""
        if self._process:
            self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int | None:
        """Block until it ends, at most `timeout_s`; returns the exit code."""
        assert self._process is not None
        try:
            return self._ended(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def _ended(self, code: int | None) -> int | None:
        """Its children go with it, as under the launcher: an engine that still starts does not notice it is alone."""
        if code is not None and not self._is_cleared:
            self._is_cleared = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code
