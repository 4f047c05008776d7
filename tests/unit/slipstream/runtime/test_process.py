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
    [("kill", "on_kill"), ("75", "on_kill"), ("kill", "on_death"), ("1", "on_death"), ("75", "on_death")],
)
def test_a_death_that_a_restart_may_cure_leads_to_one(folder: Path, end: str, restart: Restart):
    assert "restarting in 1 s" in fate(folder, end, restart)


@pytest.mark.parametrize(("end", "restart"), [("1", "on_kill"), ("2", "on_kill"), ("2", "on_death")])
def test_a_death_that_no_restart_cures_ends_the_run(folder: Path, end: str, restart: Restart):
    with pytest.raises(RoleDiedError, match=f"role ended with exit code {end}"):
        fate(folder, end, restart)


def test_a_role_that_succeeds_is_not_restarted(folder: Path):
    assert fate(folder, "0", "on_death") == "finished"


def test_a_role_with_restart_always_is_restarted_after_success_too(folder: Path):
    assert "restarting in 1 s" in fate(folder, "0", "always")


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
