"""Exit codes and messages of programs."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly


class FaultError(Exception):
    pass


def end_with(error: BaseException) -> None:
    with fail_cleanly(FaultError):
        raise error


@pytest.mark.parametrize("error", [ConfigError("x must be 1, got 2"), FaultError("x must be 1, got 2")])
def test_an_expected_error_is_one_line_on_stderr_and_exit_code_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        end_with(error)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: x must be 1, got 2\n")


def test_a_restartable_error_is_exit_code_75(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, fail_cleanly(FaultError, restartable=(FaultError,)):
        raise FaultError("the claim lapsed")
    assert caught.value.code == 75
    assert capsys.readouterr().err == "error: the claim lapsed\n"


def test_an_interrupt_is_exit_code_130() -> None:
    with pytest.raises(SystemExit) as caught:
        end_with(KeyboardInterrupt())
    assert caught.value.code == 130


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        end_with(KeyError("x"))


def test_it_decorates_a_function_that_can_be_called_twice() -> None:
    @fail_cleanly()
    def double(number: int) -> int:
        return 2 * number

    assert (double(1), double(2)) == (2, 4)
