"""Stop signals on the side of a role."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from slipstream.runtime.logs import LogLimiter, escape_control_characters
from tests.cases import cases
from tests.fakes import FakeClock

NEVER_DONE = """
import signal, sys
from slipstream.runtime.process import on_stop_signal
on_stop_signal(lambda: print("stopping", flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""
PATIENCE_S = 30.0
BURST = 8


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


@cases("program, printed", (TIDY, "put in order\n"), (TEARDOWN + TIDY, "put in order\ntorn down\n"))
def test_the_signals_of_a_closing_terminal_interrupt_once_and_leave_no_traceback(program: str, printed: str):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "interrupted\n")


def make_limiter() -> tuple[LogLimiter, list, FakeClock]:
    lines, clock = [], FakeClock()
    return LogLimiter(lambda event, **details: lines.append((event, details)), clock=clock), lines, clock


def test_the_first_lines_of_a_kind_are_written_and_the_next_counted_in_a_few_lines_that_add_up():
    limiter, lines, clock = make_limiter()
    assert all(limiter.log("refused", "token", peer=number) for number in range(BURST))
    assert not limiter.log("refused", "token", peer="b")
    assert limiter.log("refused", "schema", peer="c")
    assert not limiter.log("refused", "token", peer="d")
    clock.now += 5
    assert limiter.log("refused", "token", peer="e")
    newest = [{"kind": "schema", "peer": "c"}, {"kind": "token", "peer": "e", "more": 2}]
    assert lines[BURST:] == [("refused", details) for details in newest]
    limiter, lines, clock = make_limiter()
    for _ in range(6000):
        limiter.log("frame", "malformed", peer="a")
        clock.now += 0.01
        limiter.flush()
    clock.now += 5
    limiter.flush()
    limiter.flush()
    assert len(lines) <= BURST + 13
    assert sum(("peer" in details) + details.get("more", 0) for _, details in lines) == 6000


ROLE = """
import structlog
from slipstream.runtime.logs import configure_logs
configure_logs("role")
"""
FLOOD = f"""{ROLE}
for number in range(1000):
    structlog.get_logger().info("a line that is long enough to fill a buffer soon", number=number)
    print("another one", flush=True)
"""


def test_a_role_outlives_the_disk_of_its_log():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", FLOOD], stdout=full, stderr=full, timeout=30)
    assert done.returncode == 0


def test_what_a_peer_sent_stays_on_its_line_and_moves_no_cursor():
    event = {"event": "left", "reason": "a\n12:00 forged\x1b[2J\u202e", "leases": 3, "peer": "grün"}
    escaped = escape_control_characters(None, "info", event)
    assert escaped == {"event": "left", "reason": "a\\n12:00 forged\\x1b[2J\\u202e", "leases": 3, "peer": "grün"}
    said = f"{ROLE}structlog.get_logger().info('left: forged\\n12:00 \\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=30, check=True)
    (line,) = done.stderr.splitlines()
    assert "\\x1b[2J" in line
    assert line.isprintable()
