"""Restarts of a role by its launcher, its log and its end."""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.cluster import keeper, seat
from slipstream.cluster.role_process import Restart, RoleDiedError, RoleProcess
from slipstream.cluster.seat import LocalSeat, run_kept
from tests.cases import cases
from tests.runs import ROOT, until
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


@pytest.mark.parametrize("restart", ["on_death", "always"])
def test_a_verdict_of_the_role_itself_ends_the_run(folder: Path, restart: Restart):
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


PATIENCE_S = 20.0
ROLE = """
import os, signal, subprocess, sys, time
is_deaf = sys.argv[1] == "deaf"
heard = lambda number, frame: print("heard SIGTERM", flush=True) or is_deaf or sys.exit(7)
signal.signal(signal.SIGTERM, heard)
# A grandchild like vLLM's engine: in another session, and it ignores SIGTERM.
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
alone = subprocess.Popen([sys.executable, "-I", "-S", "-c", child], start_new_session=True)
print("descriptors", *sorted(os.listdir("/proc/self/fd"), key=int), flush=True)
while True:
    time.sleep(60)
"""
STARTER = """
import sys, time
from pathlib import Path
from slipstream.cluster import seat
seat.GRACE_S = 0.3 if sys.argv[1] == "deaf" else 5.0
started = seat.LocalSeat(Path("role.log"), is_detached=sys.argv[2] == "detached")
started.start(["kept", sys.argv[1]], variables={})
time.sleep(60)
"""
RUNNER = "from slipstream.cluster.seat import run_kept; raise SystemExit(run_kept(['kept', 'obedient']))"


class Scene:
    """Processes that work in a folder of the test, and what the role prints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "role.log"
        (folder / "kept.py").write_text(ROLE)

    def printed(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until_up(self) -> None:
        until(lambda: "up\n" in self.printed() and "descriptors" in self.printed(), what="a role and its grandchild")

    def processes(self) -> dict[str, psutil.Process]:
        """Living processes of the folder, by what they are."""
        found = {}
        for process in psutil.process_iter():
            if process.pid == os.getpid():
                continue
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    words = process.cmdline()
                    kinds = {keeper.__file__: "keeper", "kept": "role", STARTER: "starter"}
                    found[next((kind for word, kind in kinds.items() if word in words), "grandchild")] = process
            except psutil.Error:
                continue
        return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.chdir(tmp_path)
    made = Scene(tmp_path)
    yield made
    for process in made.processes().values():
        process.kill()


@cases("role, attachment", ("obedient", "detached"), ("deaf", "attached"))
def test_when_the_starter_is_killed_the_role_hears_it_and_nothing_is_left(scene: Scene, role: str, attachment: str):
    with subprocess.Popen([sys.executable, "-c", STARTER, role, attachment]) as starter:
        scene.until_up()
        assert {"keeper", "role", "grandchild", "starter"} <= set(scene.processes())
        starter.kill()
    until(lambda: not set(scene.processes()) & {"keeper", "role", "grandchild"}, what="the end")
    assert scene.printed().count("heard SIGTERM") == 1
    grace = "0.3 s" if role == "deaf" else "5 s"
    assert f"keeper: its starter is gone; the role gets SIGTERM, and SIGKILL after {grace}" in scene.printed()
    assert ("the role did not end within 0.3 s and is killed" in scene.printed()) == (role == "deaf")


@pytest.fixture
def seated(scene: Scene, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LocalSeat:
    """A role that runs in a seat of this process."""
    role = getattr(request, "param", "obedient")
    monkeypatch.setattr(seat, "GRACE_S", 0.3 if role == "deaf" else 5.0)
    made = LocalSeat(scene.log)
    made.start(["kept", role], variables={})
    scene.until_up()
    return made


def test_the_end_of_a_role_is_reported_once_nothing_of_it_is_left(scene: Scene, seated: LocalSeat):
    assert seated.poll() is None
    # It inherits nothing of its keeper: the fourth is that of the listing itself.
    assert "descriptors 0 1 2 3\n" in scene.printed()
    assert seated.pid == os.getsid(seated.pid)
    os.kill(seated.pid, signal.SIGKILL)
    until(lambda: seated.poll() is not None, what="the end")
    assert seated.poll() == -signal.SIGKILL
    assert not set(scene.processes()) & {"role", "grandchild"}
    assert "heard SIGTERM" not in scene.printed()
    assert "keeper: killed what the role left: python" in scene.printed()


@pytest.mark.parametrize("seated", ["obedient", "deaf"], indirect=True)
def test_when_the_keeper_is_killed_the_role_hears_it_and_ends(scene: Scene, seated: LocalSeat):
    scene.processes()["keeper"].kill()
    until(lambda: seated.poll() is not None, what="the end")
    assert seated.poll() == -signal.SIGKILL
    until(lambda: "role" not in scene.processes(), what="the end")
    assert "heard SIGTERM" in scene.printed()


def test_a_keeper_that_is_asked_to_end_ends_its_role(scene: Scene, seated: LocalSeat):
    scene.processes()["keeper"].terminate()
    until(lambda: seated.poll() is not None, what="the end")
    assert seated.poll() == 7
    assert "keeper: it was asked to end" in scene.printed()
    assert "grandchild" not in scene.processes()


@pytest.mark.parametrize(("seated", "code"), [("obedient", 7), ("deaf", -signal.SIGKILL)], indirect=["seated"])
def test_a_role_is_asked_to_end_and_killed_at_the_time_given(scene: Scene, seated: LocalSeat, code: int):
    seated.terminate()
    until(lambda: "heard SIGTERM" in scene.printed(), what="the end")
    seated.stop(ends_at=time.monotonic() + (PATIENCE_S if code == 7 else 0.2))
    assert seated.poll() == code
    assert not set(scene.processes()) & {"keeper", "role", "grandchild"}
    seated.stop(ends_at=0.0)
    seated.terminate()


def test_a_seat_is_used_again_and_leaves_no_descriptor(scene: Scene, seated: LocalSeat):
    descriptors = Path("/proc/self/fd")
    first, before = seated.pid, len(list(descriptors.iterdir()))
    for _ in range(2):
        seated.stop(ends_at=0.0)
        seated.start(["kept", "obedient"], variables={})
        assert seated.poll() is None
        assert seated.pid != first
    assert len(list(descriptors.iterdir())) == before
    seated.stop(ends_at=0.0)
    assert len(list(descriptors.iterdir())) == before - 2


def test_a_program_that_is_run_to_its_end_lives_no_longer_than_who_runs_it(scene: Scene):
    command = [sys.executable, "-c", RUNNER]
    with scene.log.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as runner:
        scene.until_up()
        runner.kill()
    until(lambda: not scene.processes(), what="the end")
    assert "keeper: its starter is gone" in scene.printed()
    (scene.folder / "three.py").write_text("raise SystemExit(3)")
    assert run_kept(["three"]) == 3
    assert run_kept(["kept", "obedient"], timeout_s=0.2) is None
    assert not scene.processes()


def test_a_keeper_ends_with_the_code_of_its_role_and_names_a_program_that_it_cannot_run():
    def keep(*command: str) -> "subprocess.CompletedProcess[str]":
        keeping = [sys.executable, "-I", "-S", keeper.__file__, "1", "5", "attached"]
        # Its input stays open: its end would be that of the starter.
        read, write = os.pipe()
        try:
            return subprocess.run([*keeping, *command], stdin=read, capture_output=True, text=True, timeout=PATIENCE_S)
        finally:
            os.close(read)
            os.close(write)

    done = keep("sh", "-c", "exit 3")
    assert (done.returncode, done.stdout.splitlines()[1], done.stderr) == (3, "ended 3", "")
    done = keep("sh", "-c", "kill -9 $$")
    assert (done.returncode, done.stdout.splitlines()[1]) == (137, "ended -9")
    done = keep("/nowhere/python")
    assert (done.returncode, done.stderr) == (127, "keeper: cannot run /nowhere/python: No such file or directory\n")
