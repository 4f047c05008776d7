"""Stop signals on the side of a role."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from slipstream.cli import app
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly, make_app, run_app, with_command
from slipstream.runtime.import_path import find_function
from slipstream.runtime.logs import LogLimiter, escape_control_characters
from slipstream.runtime.process import LAUNCHER_VARIABLE
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
import atexit, os, signal, time
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.process import raise_on_stop_signal
atexit.register(lambda: (time.sleep(1.1), os.kill(os.getpid(), signal.SIGTERM), print("torn down", flush=True)))
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


def test_the_signals_of_a_closing_terminal_interrupt_once_and_leave_no_traceback():
    done = subprocess.run([sys.executable, "-c", TIDY], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "put in order\ntorn down\n", "interrupted\n")


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


class FaultError(Exception):
    pass


def code_of(error: BaseException) -> int:
    """Exit code of a program that raises this error."""
    with pytest.raises(SystemExit) as caught, fail_cleanly(FaultError):
        raise error
    return caught.value.code


@pytest.mark.parametrize("error", [ConfigError("x must be 1, got 2"), FaultError("x must be 1, got 2")])
def test_an_expected_error_is_one_line_on_stderr_and_exit_code_2(error, capsys):
    assert code_of(error) == 2
    assert capsys.readouterr() == ("", "error: x must be 1, got 2\n")


def test_a_restartable_error_is_exit_code_75_an_interrupted_command_says_so_and_a_decorated_one_runs_twice(capsys):
    with pytest.raises(SystemExit) as caught, fail_cleanly(FaultError, restartable=(FaultError,)):
        raise FaultError("the claim lapsed")
    assert caught.value.code == 75
    assert capsys.readouterr().err == "error: the claim lapsed\n"
    app = make_app("help")

    @app.command()
    @app.command("others")
    def wait() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught, fail_cleanly():
        run_app(app, ["wait"], program="program")
    assert (caught.value.code, capsys.readouterr().err.strip()) == (130, "interrupted")

    @fail_cleanly()
    def double(number: int) -> int:
        return 2 * number

    assert (double(1), double(2)) == (2, 4)


@cases(
    "error, code, words",
    (OSError(errno.EROFS, "Read-only file system", "runs/x"), 2, "runs/x must be a path that this user may read"),
    (OSError(errno.ENOTDIR, "Not a directory", "runs/x"), 2, "got Not a directory"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 75, "runs/x must have room on its disk, got No"),
    (OSError("ArrowIOError: No space left on device"), 75, "a file must have room on its disk, got ArrowIOError"),
    (OSError(errno.EMFILE, "Too many open files"), 75, "got Too many open files: raise `ulimit -n`"),
)
def test_a_path_that_is_refused_and_a_full_disk_are_one_line_too(error, code, words, capsys):
    assert code_of(error) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_role_whose_path_is_refused_is_restarted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied", "runs/x")
    # The launcher has named itself to its roles.
    for launcher, code in ((os.getppid(), 76), (os.getpid(), 2)):
        monkeypatch.setenv(LAUNCHER_VARIABLE, str(launcher))
        assert code_of(refused) == code


@cases(
    "error",
    KeyError("x"),
    FileNotFoundError(errno.ENOENT, "no", "x"),
    PermissionError(13, "no"),
    ModuleNotFoundError("No module named 'slipstream.nosuch'", name="slipstream.nosuch"),
)
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), fail_cleanly(FaultError):
        raise error


@cases("error", PackageNotFoundError("torch"), ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"))
def test_a_library_of_a_build_that_is_not_installed_is_named_with_its_extra(error, capsys):
    assert code_of(error) == 2
    assert capsys.readouterr().err.startswith("error: torch must be installed, but is not: `pip install 'slipstream[")


@cases(
    "given, ours",
    ("start mine.yaml", "run experiment=mine.yaml"),
    ("sweep seed=1,2", "run -m seed=1,2"),
    ("-m seed=1,2", "run -m seed=1,2"),
    ("resume runs/mine", "run name=mine resume=true"),
    ("eval runs/mine", "evaluate runs/mine"),
    ("help status", "status --help"),
)
def test_another_name_of_a_command_works(given: str, ours: str) -> None:
    assert with_command(app, given.split()) == ours.split()


@cases(
    "given, advice",
    ("stop mine", "press Ctrl-C"),
    ("runs", "`slipstream watch` lists the runs"),
    ("grpo", "recipe="),
)
def test_a_command_that_does_not_exist_is_answered_with_the_way(given: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"no command `{given.split()[0]}`: .*{advice}"):
        with_command(app, given.split())


@pytest.mark.parametrize("content", ["import sys; sys.exit(1)", "raise RuntimeError('no')", "def f(:"])
def test_a_file_that_cannot_be_imported_is_named_and_ends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=r"^reward\.function='.*mine\.py:f': importing '.*mine\.py' failed: \w+: "):
        find_function(f"{tmp_path}/mine.py:f", setting="reward.function")
