"""Processes: restarts of a role by its launcher, and signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.runtime.process import Restart, RoleDiedError, RoleProcess

ENDS_WITH = """
import os, sys
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]))
"""
NEVER_DONE = """
import signal, sys
from slipstream.runtime.process import on_stop_signal
on_stop_signal(lambda: print("stopping", flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""
PATIENCE_S = 30.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ends_with.py").write_text(ENDS_WITH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def fate(folder: Path, end: str, restart: Restart) -> str:
    """The launcher's report of a role that ends in this way."""
    role = RoleProcess("role", ["ends_with", end], logs=folder, restart=restart)
    role.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        has_finished = role.has_finished
        if messages := role.poll():
            return messages[0]
        if has_finished:
            return "finished"
    raise TimeoutError("the role must end")


@pytest.mark.parametrize(
    ("end", "restart"),
    [("kill", "on_death"), ("1", "on_death"), ("75", "on_death"), ("130", "on_death"), ("0", "always")],
)
def test_a_death_that_a_restart_may_cure_leads_to_one(folder: Path, end: str, restart: Restart):
    assert "restarting in 1 s" in fate(folder, end, restart)


@pytest.mark.parametrize("restart", ["on_death", "always"])
def test_a_verdict_of_the_role_ends_the_run(folder: Path, restart: Restart):
    with pytest.raises(RoleDiedError, match="role ended with exit code 2"):
        fate(folder, "2", restart)


FAILS = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
error, *others = path.read_text().splitlines()
path.write_text("\\n".join(others))
if sys.argv[2] == "raise":
    raise RuntimeError(error)
print("error: " + error)
sys.exit(int(sys.argv[2]))
"""


def fails(folder: Path, end: str, errors: list[str]) -> RoleProcess:
    """A role each of whose starts ends with the next error."""
    (folder / "fails.py").write_text(FAILS)
    (folder / "errors").write_text("\n".join(errors))
    return RoleProcess("role", ["fails", str(folder / "errors"), end], logs=folder)


@pytest.mark.parametrize(("end", "reported"), [("76", "role: of model 7"), ("raise", "role: RuntimeError: of model 7")])
def test_an_error_of_the_start_that_comes_back_the_same_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, reported: str
):
    monkeypatch.setattr("slipstream.runtime.process._RESTART_AFTER_S", 0.0)
    # It changes once, then it comes back with another number in it.
    role = fails(folder, end, ["of the machine", "of model 6", "of model 7"])
    role.start()
    with pytest.raises(RoleDiedError, match=reported):
        until(lambda: bool(role.poll()) and False)
    assert role.num_restarts == 2


@pytest.mark.parametrize(("end", "has_worked"), [("raise", True), ("75", False)])
def test_an_error_that_a_restart_may_cure_may_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, has_worked: bool
):
    monkeypatch.setattr("slipstream.runtime.process._RESTART_AFTER_S", 0.0)
    role = fails(folder, end, ["of the network"] * 4)
    role.start()

    def is_restarted_thrice() -> bool:
        if has_worked:
            role.record_work()
        role.poll()
        return role.num_restarts == 3

    until(is_restarted_thrice)
    role.stop(ends_at=0.0)


def test_a_role_that_succeeds_is_not_restarted(folder: Path):
    assert fate(folder, "0", "on_death") == "finished"


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline


@pytest.fixture
def never_done() -> Iterator["subprocess.Popen[str]"]:
    """A role that listens to the first signal, and then has much to put in order."""
    with subprocess.Popen([sys.executable, "-c", NEVER_DONE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_a_second_signal_ends_a_role_that_is_still_stopping(never_done: "subprocess.Popen[str]"):
    assert never_done.stdout
    never_done.terminate()
    assert never_done.stdout.readline() == "stopping\n"

    def is_ended() -> bool:
        never_done.terminate()
        return never_done.poll() is not None

    started_at = time.monotonic()
    until(is_ended)
    assert never_done.returncode == -signal.SIGTERM
    assert time.monotonic() - started_at > 0.5
    assert never_done.stdout.read() == ""


def test_terminate_signals_a_role_once(folder: Path):
    (folder / "never_done.py").write_text(NEVER_DONE)
    role = RoleProcess("role", ["never_done"], logs=folder)
    role.start()
    until(lambda: "up" in role.log_tail())
    role.terminate()
    until(lambda: "stopping" in role.log_tail())
    grace_ends_at = time.monotonic() + 1.5
    while time.monotonic() < grace_ends_at:
        role.terminate()
    assert role.is_running
    role.stop(ends_at=0.0)
    assert not role.is_running


@pytest.mark.parametrize(("before", "stops"), [("SIG_DFL", True), ("SIG_IGN", False)])
def test_a_closed_terminal_stops_a_role_as_ctrl_c_does_but_not_under_nohup(before: str, stops: bool):
    program = f"import signal; signal.signal(signal.SIGHUP, signal.{before})\n{NEVER_DONE}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        if stops:
            assert process.stdout.readline() == "stopping\n"
        time.sleep(0.3)
        process.kill()
        assert process.stdout.read() == ""


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


CHATTY = """
import sys, time
for number in range(int(sys.argv[1])):
    print("line", number, flush=True)
print("error: the last line", flush=True)
sys.exit(2) if len(sys.argv) > 2 else time.sleep(60)
"""


def test_a_log_is_cut_to_its_newest_lines_while_the_role_goes_on_writing(folder: Path):
    (folder / "chatty.py").write_text(CHATTY)
    role = RoleProcess("role", ["chatty", "5000"], logs=folder, max_log_bytes=8000)
    role.start()
    until(lambda: "the last line" in role.log_tail(num_lines=1))
    assert role.poll() == []
    log = (folder / "role.log").read_text()
    assert 1000 < len(log) <= 2000
    assert log.endswith("line 4999\nerror: the last line\n")
    role.stop(ends_at=0.0)


def test_an_error_is_found_in_a_log_that_was_cut(folder: Path):
    (folder / "chatty.py").write_text(CHATTY)
    (folder / "role.log").write_text("error: of a start before\n" * 400)
    role = RoleProcess("role", ["chatty", "5000", "ends"], logs=folder, max_log_bytes=8000)
    role.start()
    until(lambda: not role.is_running)
    with pytest.raises(RoleDiedError, match="role: the last line"):
        role.poll()


ORPHAN = """
import os, signal, sys, time
from slipstream.runtime.process import die_with_launcher
if os.fork():
    time.sleep(float(sys.argv[1]))
    os._exit(0)
die_with_launcher()
print("alive", flush=True)
time.sleep(60)
"""


def in_a_container(folder: Path, *, launcher_lives_s: str) -> str:
    """Output of a role whose launcher is process 1, as in a container."""
    (folder / "orphan.py").write_text(ORPHAN)
    command = ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-m", "orphan", launcher_lives_s]
    environment = os.environ | {"SLIPSTREAM_LAUNCHER_PID": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def can_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "--fork", "--pid", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="needs leave to make a process namespace")
def test_a_role_lives_when_its_launcher_is_process_1(folder: Path):
    assert in_a_container(folder, launcher_lives_s="3") == "alive\n"
