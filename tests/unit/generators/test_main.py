"""The command line of a generator: its id, and the settings that it takes."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.generators.__main__ import ignored_settings, split_id

ADDRESS = "broker.address=tcp://127.0.0.1:5757"


@pytest.mark.parametrize(
    "arguments", [["--id", "second", ADDRESS], [ADDRESS, "--id", "second"], ["--id=second", ADDRESS]]
)
def test_the_id_may_stand_anywhere(arguments: list[str]) -> None:
    assert split_id(arguments) == ("second", [ADDRESS])


def test_without_an_id_it_is_named_after_host_and_process() -> None:
    name, overrides = split_id([ADDRESS])
    assert name.startswith("generator-")
    assert overrides == [ADDRESS]


@pytest.mark.parametrize("arguments", [["--id"], ["--id="], ["--id", ADDRESS]])
def test_an_id_needs_a_name(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--id"):
        split_id(arguments)


def test_settings_of_the_run_have_no_effect_here() -> None:
    assert ignored_settings([ADDRESS, "weights.transport=delta", "seed=3"]) == ["seed=3"]
