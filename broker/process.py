"""What every role's process does with signals and with its parent."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
LAUNCHER_VARIABLE = "SLIPSTREAM_LAUNCHER_PID"
"""Set by a launcher for its roles: they end when it does, however it ends."""


def die_with_launcher() -> None:
    """Have the kernel end this process when the launcher dies. Does nothing for a role started by hand."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def on_stop_signal(stop: Callable[[], None]) -> threading.Event:
    """Call `stop` at the first SIGTERM or SIGINT; returns the event that is set then."""
    stopping = threading.Event()

    def handle(_number: int, _frame: object) -> None:
        if not stopping.is_set():
            stopping.set()
            stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stopping
