"""Settings, origins and derived sizes as print_config prints them."""

import pytest
import yaml

from slipstream.cli import main
from slipstream.configs.load import load, to_plain


def test_the_config_is_printed_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "learner.max_steps=3"])
    assert yaml.safe_load(capsys.readouterr().out) == to_plain(load(["learner.max_steps=3"]))


def test_sources_stand_beside_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "learner.max_steps=3", "--sources"])
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split() == ["learner.max_steps", "=", "3", "command", "line", "learner.max_steps=3"] for line in lines
    )
    assert any(line.split() == ["broker.lease_s", "=", "30.0", "default"] for line in lines)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("learner.max_step=3", "did you mean learner.max_steps?"),
        ("--learner.max_steps=3", "write learner.max_steps=3."),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argument: str, advice: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "--sources", argument])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(advice)
