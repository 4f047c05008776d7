"""The token comes from the environment or a private file, and no message reveals it."""

from pathlib import Path

import pytest

from slipstream.broker.handshake import TOKEN_VARIABLE, check_token, read_token
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import BrokerConfig

SECRET = "kept-to-ourselves"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
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


def test_without_a_source_there_is_no_token():
    assert read_token(BrokerConfig()) == ""


def test_the_environment_takes_precedence_over_the_file(tmp_path, environment):
    config = write(tmp_path, f"{SECRET}\n")
    assert read_token(config) == SECRET
    environment.setenv(TOKEN_VARIABLE, "another")
    assert read_token(config) == "another"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_accessible_to_others_is_refused_with_the_remedy(tmp_path, mode):
    sentence = refusal(write(tmp_path, SECRET, mode=mode))
    assert f"{mode:04o}" in sentence
    assert f"chmod 600 {tmp_path}/token" in sentence


@pytest.mark.parametrize("content", ["", " \n", SECRET + "\n" + SECRET, SECRET + "ü", b"\xff\xfe", SECRET * 100])
def test_a_malformed_token_is_refused(tmp_path, content):
    assert "printable ASCII" in refusal(write(tmp_path, content))


def test_a_blank_variable_is_refused(environment):
    environment.setenv(TOKEN_VARIABLE, "  ")
    assert TOKEN_VARIABLE in refusal(BrokerConfig())


def test_a_missing_file_is_named(tmp_path):
    assert f"{tmp_path}/nope" in refusal(BrokerConfig(token_file=f"{tmp_path}/nope"))
    assert str(tmp_path) in refusal(BrokerConfig(token_file=str(tmp_path)))


@pytest.mark.parametrize(
    ("got", "words"), [("", "got none"), ("wrong", "got a wrong one"), (SECRET[:-1], "a wrong one")]
)
def test_a_rejected_peer_learns_the_remedy_and_not_the_token(got, words):
    sentence = check_token(got, expected=SECRET)
    assert words in sentence
    assert TOKEN_VARIABLE in sentence
    assert SECRET not in sentence
    assert got == "" or got not in sentence.replace("a wrong one", "")


def test_the_right_token_passes_and_so_does_any_if_none_is_expected():
    assert check_token(SECRET, expected=SECRET) == ""
    assert check_token("anything", expected="") == ""
