"""Exit codes and messages of programs."""

import errno
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from slipstream.cli import app
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly, make_app, run_app, with_command
from slipstream.runtime.import_path import find_function
from slipstream.runtime.process import LAUNCHER_VARIABLE
from tests.cases import cases


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
    ("train seed=1", "run seed=1"),
    ("start mine.yaml", "run experiment=mine.yaml"),
    ("sweep seed=1,2", "run -m seed=1,2"),
    ("-m seed=1,2", "run -m seed=1,2"),
    ("resume runs/mine", "run name=mine resume=true"),
    ("eval runs/mine", "evaluate runs/mine"),
    ("report mine", "status mine"),
    ("dashboard", "watch"),
    ("merge a b", "convert a b"),
    ("help status", "status --help"),
)
def test_another_name_of_a_command_works(given: str, ours: str) -> None:
    assert with_command(app, given.split()) == ours.split()


@cases(
    "given, advice",
    ("stop mine", "press Ctrl-C"),
    ("cancel mine", "press Ctrl-C"),
    ("tail mine", "runs/NAME/logs"),
    ("runs", "`slipstream watch` lists the runs"),
    ("save", "resume=true"),
    ("clean", "delete runs/NAME"),
    ("grpo", "recipe="),
    ("serve", "vllm serve"),
    ("push", "hf upload"),
    ("score f", "slipstream evaluate"),
    ("validate", "slipstream diagnose"),
)
def test_a_command_that_does_not_exist_is_answered_with_the_way(given: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"no command `{given.split()[0]}`: .*{advice}"):
        with_command(app, given.split())


@pytest.mark.parametrize("content", ["import sys; sys.exit(1)", "raise RuntimeError('no')", "def f(:"])
def test_a_file_that_cannot_be_imported_is_named_and_ends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=r"^reward\.function='.*mine\.py:f': importing '.*mine\.py' failed: \w+: "):
        find_function(f"{tmp_path}/mine.py:f", setting="reward.function")
