"""The token comes from the environment or a private file, and no message ever tells it."""

from pathlib import Path

import pytest

from slipstream.broker.handshake import VARIABLE, read_token, token_objection
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import BrokerConfig

SECRET = "kept-to-ourselves"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(VARIABLE, raising=False)
    return monkeypatch


def write(folder: Path, content: str | bytes, *, mode: int = 0o600) -> BrokerConfig:
    path = folder / "token"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return BrokerConfig(token_file=str(path))


def refusal(config: BrokerConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        read_token(config)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_without_any_there_is_none():
    assert read_token(BrokerConfig()) == ""


def test_a_file_holds_it_and_the_environment_goes_before_the_file(tmp_path, environment):
    config = write(tmp_path, f"{SECRET}\n")
    assert read_token(config) == SECRET
    environment.setenv(VARIABLE, "another")
    assert read_token(config) == "another"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_may_open_is_refused_with_what_to_do(tmp_path, mode):
    sentence = refusal(write(tmp_path, SECRET, mode=mode))
    assert f"{mode:04o}" in sentence
    assert f"chmod 600 {tmp_path}/token" in sentence


@pytest.mark.parametrize("content", ["", " \n", SECRET + "\n" + SECRET, SECRET + "ü", b"\xff\xfe", SECRET * 100])
def test_what_cannot_be_a_token_is_refused(tmp_path, content):
    assert "printable ASCII" in refusal(write(tmp_path, content))


def test_a_blank_variable_is_refused_rather_than_taken_for_none(environment):
    environment.setenv(VARIABLE, "  ")
    assert VARIABLE in refusal(BrokerConfig())


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path}/nope" in refusal(BrokerConfig(token_file=f"{tmp_path}/nope"))
    assert str(tmp_path) in refusal(BrokerConfig(token_file=str(tmp_path)))


@pytest.mark.parametrize(
    ("got", "what"), [("", "got none"), ("wrong", "got a wrong one"), (SECRET[:-1], "a wrong one")]
)
def test_who_does_not_know_it_is_told_what_to_do_and_not_what_it_is(got, what):
    sentence = token_objection(got, wanted=SECRET)
    assert what in sentence
    assert VARIABLE in sentence
    assert SECRET not in sentence
    assert got == "" or got not in sentence.replace("a wrong one", "")


def test_the_right_one_passes_and_so_does_any_where_none_is_asked_for():
    assert token_objection(SECRET, wanted=SECRET) == ""
    assert token_objection("anything", wanted="") == ""
