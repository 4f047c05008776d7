import math
from typing import Any

import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from tests.unit.generators.rewards.scene import SAMPLES, sample


def run_sample(name: str, response: str = "", **arguments: Any) -> Reward:
    return RewardFunctions(RewardConfig(f"{SAMPLES}:{name}", arguments=arguments)).score(sample(response))


@pytest.mark.parametrize(
    ("name", "arguments", "reward"),
    [
        ("by_response", {}, Reward(total=0.5)),
        ("with_arguments", {"bonus": 0.75}, Reward(total=1.0, is_correct=True)),
        (
            "returning",
            {"value": {"total": 0.75, "parts": {"a": 0.5, "b": 0.25}, "is_correct": True}},
            Reward(total=0.75, parts={"a": 0.5, "b": 0.25}, is_correct=True),
        ),
    ],
)
def test_a_number_or_a_dict_is_a_reward_and_1_is_correct(name: str, arguments: dict[str, Any], reward: Reward):
    assert run_sample(name, **arguments) == reward


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nan", "finite"),
        ({"total": 0.75, "parts": {"a": math.inf}}, "finite number, got a=inf"),
        ("text", "got str"),
        ({"score": 1.0}, "score"),
        ("raise now", "ValueError: no good: now"),
        ("exit", "must return, it called sys.exit(3)"),
        ("shout", "ValueError: no good: no good:"),
        ({"total": 0.75, "parts": {str(index): 0.0 for index in range(10**4)}}, "at most 64 parts"),
    ],
)
def test_an_invalid_reward_is_an_error_with_one_line_of_detail(given: Any, words: str):
    reward = run_sample("by_response", given) if isinstance(given, str) else run_sample("returning", value=given)
    assert reward.status == "error"
    assert words in reward.detail
    assert "\n" not in reward.detail
    assert len(reward.detail) <= 300


def test_the_detail_of_a_reward_is_cut():
    reward = run_sample("returning", value={"total": 0.75, "detail": "wordy " * 10**6})
    assert reward.total == 0.75
    assert reward.detail == ("wordy " * 50)[:300]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("positions_match", "Did you mean 'position_match'?"),
        ("no_such_module:f", "no module 'no_such_module'"),
        (f"{SAMPLES}:by_respons", "Did you mean 'by_response'?"),
        (f"{SAMPLES}:NOT_A_FUNCTION", "it is a int"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error_with_its_key(path: str, words: str):
    with pytest.raises(ConfigError, match=r"generators\.reward\.function") as caught:
        RewardFunctions(RewardConfig(path))
    assert words in str(caught.value)


def test_arguments_must_fit_the_function():
    with pytest.raises(
        ConfigError, match=r"generators\.reward\.arguments must fit .* missing a required argument: 'bonus'"
    ):
        RewardFunctions(RewardConfig(f"{SAMPLES}:with_arguments"))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        RewardFunctions(RewardConfig(f"{SAMPLES}:by_response", arguments={"size": 3}))
