"""Stop signals on the side of a role."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

NEVER_DONE = """
import signal, sys
from slipstream.runtime.process import on_stop_signal
on_stop_signal(lambda: print("stopping", flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""
PATIENCE_S = 30.0


@contextmanager
def never_done(*before: str):
    """A role that listens to the first signal, and then has much to put in order."""
    program = "\n".join([*before, NEVER_DONE])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_a_second_signal_ends_a_role_that_is_still_stopping():
    with never_done() as role:
        role.terminate()
        assert role.stdout.readline() == "stopping\n"
        started_at = time.monotonic()
        while role.poll() is None:
            assert time.monotonic() < started_at + PATIENCE_S
            role.terminate()
        assert role.returncode == -signal.SIGTERM
        assert time.monotonic() - started_at > 0.5
        assert role.stdout.read() == ""


@pytest.mark.parametrize(("before", "stops"), [("SIG_DFL", True), ("SIG_IGN", False)])
def test_a_closed_terminal_stops_a_role_as_ctrl_c_does_but_not_under_nohup(before: str, stops: bool):
    with never_done(f"import signal; signal.signal(signal.SIGHUP, signal.{before})") as role:
        role.send_signal(signal.SIGHUP)
        if stops:
            assert role.stdout.readline() == "stopping\n"
        time.sleep(0.3)
        role.kill()
        assert role.stdout.read() == ""


TIDY = """
import os, signal, time
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.process import raise_on_stop_signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with fail_cleanly():
    raise_on_stop_signal()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        print("put in order", flush=True)
"""
TEARDOWN = """
import atexit, os, signal, time
atexit.register(lambda: (time.sleep(1.1), os.kill(os.getpid(), signal.SIGTERM), print("torn down", flush=True)))
"""


@pytest.mark.parametrize(
    ("program", "printed"), [(TIDY, "put in order\n"), (TEARDOWN + TIDY, "put in order\ntorn down\n")]
)
def test_the_signals_of_a_closing_terminal_interrupt_once_and_leave_no_traceback(program: str, printed: str):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "interrupted\n")
