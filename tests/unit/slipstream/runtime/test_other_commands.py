"""Commands of other tools."""

import pytest

from slipstream.cli import app
from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import with_command


@pytest.mark.parametrize(
    ("given", "ours"),
    [
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
    ],
)
def test_another_name_of_a_command_works(given: str, ours: str) -> None:
    assert with_command(app, given.split()) == ours.split()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
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
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_way(given: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"no command `{given.split()[0]}`: .*{advice}"):
        with_command(app, given.split())
