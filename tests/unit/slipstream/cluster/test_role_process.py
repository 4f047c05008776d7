"""Restarts of a role by its launcher, its log and its end."""

import itertools
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.cluster.role_process import Restart, RoleDiedError, RoleProcess
from tests.cases import cases
from tests.runs import until
from tests.unit.slipstream.runtime.test_process import NEVER_DONE

ENDS_WITH = """
import os, sys
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[1] == "abort":
    print("error: the disk is gone\\nterminate called without an active exception", flush=True)
    os.abort()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ends_with.py").write_text(ENDS_WITH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def fate(folder: Path, end: str, restart: Restart) -> str:
    """The launcher's report of a role that ends in this way."""
    role = RoleProcess("role", ["ends_with", end], logs=folder, restart=restart)
    role.start()
    until(lambda: not role.is_running, what="the role")
    messages = role.poll()
    return messages[0] if messages else "finished" * role.has_finished


@cases(
    "end, restart, report",
    ("kill", "on_death", "restarting in 1 s"),
    ("1", "on_death", "restarting in 1 s"),
    ("75", "on_death", "restarting in 1 s"),
    ("130", "on_death", "restarting in 1 s"),
    ("0", "always", "restarting in 1 s"),
    # A library that aborts while a role ends does not hide the error.
    ("abort", "on_death", "died (signal SIGABRT); the disk is gone; restarting in 1 s"),
    ("0", "on_death", "finished"),
)
def test_a_death_that_a_restart_may_cure_leads_to_one(folder: Path, end: str, restart: Restart, report: str):
    assert report in fate(folder, end, restart)
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
    """A role that fails with the next error at each start."""
    (folder / "fails.py").write_text(FAILS)
    (folder / "errors").write_text("\n".join(errors))
    return RoleProcess("role", ["fails", str(folder / "errors"), end], logs=folder)


@pytest.mark.parametrize(("end", "reported"), [("76", "role: of model 7"), ("raise", "role: RuntimeError: of model 7")])
def test_an_error_of_the_start_that_comes_back_the_same_ends_the_run(folder, monkeypatch, end, reported):
    monkeypatch.setattr("slipstream.cluster.role_process._RESTART_AFTER_S", 0.0)
    # It changes once, then it comes back with another number in it.
    role = fails(folder, end, ["of the machine", "of model 6", "of model 7"])
    role.start()
    with pytest.raises(RoleDiedError, match=reported):
        until(lambda: bool(role.poll()) and False, what="the role")
    assert role.num_restarts == 2


def open_descriptors() -> set[int]:
    return {int(each.name) for each in Path("/proc/self/fd").iterdir()}


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open so many more files."""
    opened, limits = open_descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (limit for limit in itertools.count(1) if len(set(range(limit)) - opened) == number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_role_that_cannot_be_started_is_started_later_and_a_failed_attempt_keeps_nothing_open(folder, monkeypatch):
    monkeypatch.setattr("slipstream.cluster.role_process._RESTART_AFTER_S", 0.0)
    role = fails(folder, "75", ["of the network"] * 2)
    role.start()
    until(lambda: bool(role.poll()), what="the role")
    opened = open_descriptors()
    with descriptors_left(5):
        messages = [role.poll() for _ in range(3)]
    assert all("cannot be started ([Errno 24]" in message for (message,) in messages)
    assert open_descriptors() == opened
    assert role.poll() == [f"role restarted ({role.place})"]
    role.stop(ends_at=0.0)
    # A machine that never recovers ends the run.
    role = fails(folder, "75", ["of the network"])
    role.start()
    until(lambda: bool(role.poll()), what="the role")
    with descriptors_left(5), pytest.raises(RoleDiedError, match="cannot be started"):
        until(lambda: bool(role.poll()) and False, what="the role")


@pytest.mark.parametrize(("end", "has_worked"), [("raise", True), ("75", False)])
def test_an_error_that_a_restart_may_cure_may_come_back(folder, monkeypatch, end, has_worked):
    monkeypatch.setattr("slipstream.cluster.role_process._RESTART_AFTER_S", 0.0)
    role = fails(folder, end, ["of the network"] * 4)
    role.start()

    def is_restarted_thrice() -> bool:
        if has_worked:
            role.record_work()
        role.poll()
        return role.num_restarts == 3

    until(is_restarted_thrice, what="three restarts")
    role.stop(ends_at=0.0)


def test_terminate_signals_a_role_once(folder: Path):
    (folder / "never_done.py").write_text(NEVER_DONE)
    role = RoleProcess("role", ["never_done"], logs=folder)
    role.start()
    until(lambda: "up" in role.log_tail(), what="the role")
    role.terminate()
    until(lambda: "stopping" in role.log_tail(), what="the role")
    grace_ends_at = time.monotonic() + 1.5
    while time.monotonic() < grace_ends_at:
        role.terminate()
    assert role.is_running
    role.stop(ends_at=0.0)
    assert not role.is_running


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
    until(lambda: "the last line" in role.log_tail(num_lines=1), what="the role")
    assert role.poll() == []
    log = (folder / "role.log").read_text()
    assert 1000 < len(log) <= 2000
    assert log.endswith("line 4999\nerror: the last line\n")
    role.stop(ends_at=0.0)
    # An error is found in a log that was cut.
    (folder / "role.log").write_text("error: of a start before\n" * 400)
    role = RoleProcess("role", ["chatty", "5000", "ends"], logs=folder, max_log_bytes=8000)
    role.start()
    until(lambda: not role.is_running, what="the role")
    with pytest.raises(RoleDiedError, match="role: the last line"):
        role.poll()


def test_a_role_whose_log_was_removed_is_restarted_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipstream.cluster.role_process._RESTART_AFTER_S", 0.0)
    role = RoleProcess("role", ["ends_with", "1"], logs=folder / "logs")
    role.start()
    until(lambda: not role.is_running, what="the role")
    shutil.rmtree(folder / "logs")
    assert role.poll() == ["role died (exit code 1); last line of its log: ; restarting in 0 s"]
    assert role.poll()[0].startswith("role restarted (pid ")
    role.stop(ends_at=0.0)
