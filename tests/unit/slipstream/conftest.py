"""The command line as a newcomer calls it: everything is checked, and nothing starts."""

import re
from collections.abc import Callable

import pytest

from slipstream.cli import main


class StartedError(Exception):
    """A command has checked everything and would start the roles of its run."""


@pytest.fixture
def answer_to(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function of a command's words: its error, one sentence with exit code 2, or "" if a run would start."""

    def start(*_args: object, **_kwargs: object) -> None:
        raise StartedError

    monkeypatch.setattr("slipstream.launch.run.Launcher", start)
    monkeypatch.setattr("os.execv", start)

    def call(*words: str) -> str:
        with pytest.raises((SystemExit, StartedError)) as ended:
            main([*words])
        error = capsys.readouterr().err
        if isinstance(ended.value, StartedError):
            return ""
        assert ended.value.code == 2, error
        assert re.fullmatch(r"error: [^\n]+\n", error), error
        return error.removeprefix("error: ").strip()

    return call
