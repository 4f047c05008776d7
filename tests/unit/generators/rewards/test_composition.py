import asyncio
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.configs.load import load
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput, truth_text, truth_texts
from tests.cases import cases
from tests.unit.generators.rewards.scene import SAMPLES, in_pool, sample, scores


def make_input(response: str = "31284", *, truth: Any = "31284", source: str = "digits/reverse") -> RewardInput:
    return sample(response, truth=truth, data_source=source)


def several(*functions: dict[str, Any], **settings: Any) -> RewardConfig:
    return msgspec.convert({"functions": list(functions), **settings}, RewardConfig)


def score(config: RewardConfig, sample: RewardInput) -> Reward:
    functions = RewardFunctions(config)
    return asyncio.run(functions.score_async(sample)) if functions.is_async else functions.score(sample)


def test_functions_are_added_with_weights_also_rewards_of_turns_and_each_has_a_part():
    config = several({"function": "exact_match", "weight": 2}, {"function": "position_match", "weight": -0.5})
    right, half = score(config, make_input()), score(config, make_input("31000"))
    parts = {"exact_match": 2.0, "position_match": -0.5, "position_match/positions": 1.0}
    assert right == Reward(total=1.5, parts=parts, is_correct=True)
    # A function's own parts stay as it gave them.
    assert half.parts == pytest.approx({"exact_match": 0.0, "position_match": -0.25, "position_match/positions": 0.5})
    assert half.total == pytest.approx(-0.5 * 3 / 6)
    config = several(
        {"function": f"{SAMPLES}:with_turns", "weight": 2},
        {"function": f"{SAMPLES}:with_turns", "name": "b", "arguments": {"turns": [1.0]}},
        {"function": "exact_match"},
    )
    assert score(config, make_input()).turns == [2.0, -0.5, 0.5]


@pytest.mark.parametrize(
    ("source", "parts"),
    [("digits/reverse", {"exact", "all"}), ("digits/sort", {"glob", "all"}), ("other", {"all"}), ("DIGITS/x", {"all"})],
)
def test_a_row_is_scored_by_the_functions_of_its_data_source(source: str, parts: set[str]):
    config = several(
        {"function": "exact_match", "name": "exact", "data_sources": ["digits/reverse"]},
        {"function": "exact_match", "name": "glob", "data_sources": ["digits/s*", "nothing"]},
        {"function": "exact_match", "name": "all"},
    )
    assert score(config, make_input(source=source)).parts.keys() == parts


def test_a_row_that_no_function_takes_is_an_error_with_its_data_source_and_no_zero():
    config = several({"function": "exact_match", "data_sources": ["digits/*", "math"]})
    reward = score(config, make_input(source="gsm8k"))
    assert reward.status == "error"
    assert "got none for data_source 'gsm8k' of this row (they take digits/*, math)" in reward.detail
    with pytest.raises(ConfigError, match=r"data_source 'gsm8k' of train\.parquet"):
        config.check_data_source("gsm8k", found_in="train.parquet")


@pytest.mark.parametrize(
    ("decides", "is_correct"),
    [((False, False), True), ((False, True), False), ((True, False), True), ((True, True), False)],
)
def test_correctness_is_decided_by_the_marked_functions_and_else_by_the_first(decides: tuple, is_correct: bool):
    config = several(
        {"function": "exact_match", "counts_for_accuracy": decides[0]},
        {"function": f"{SAMPLES}:by_response", "counts_for_accuracy": decides[1]},
    )
    assert score(config, make_input()).is_correct is is_correct


def test_a_function_may_lie_in_a_file(tmp_path: Path):
    (tmp_path / "json.py").write_text("def length(sample, *, factor):\n    return len(sample.response) * factor\n")
    config = RewardConfig(f"{tmp_path}/json.py:length", arguments={"factor": 2})
    assert score(config, make_input()).total == 10
    assert score(RewardConfig(f"{SAMPLES}:Lengths", arguments={"factor": 3}), make_input()).total == 15, "or be a class"


@cases(
    "settings, complaint",
    ({"function": "positions_match"}, r"generators\.reward\.function must .* Did you mean 'position_match'"),
    ({"function": "no_such_module:f"}, "no module 'no_such_module'"),
    ({"function": f"{SAMPLES}:by_respons"}, "Did you mean 'by_response'"),
    ({"function": f"{SAMPLES}:NOT_A_FUNCTION"}, "it is a int"),
    ({"function": __file__ + ":lengthy"}, r"test_composition\.py has no 'lengthy'"),
    ({"functions": [{"function": "exact_mach"}]}, r"reward\.functions\[0\]\.function must .* Did you mean 'exact"),
    ({"function": f"{SAMPLES}:Lengths"}, r"arguments must fit .* missing 1 required .*'factor'"),
    ({"function": f"{SAMPLES}:Lengths", "arguments": {"factor": 0}}, "ValueError: no such factor"),
    ({"function": f"{SAMPLES}:with_arguments"}, r"arguments must fit .* missing a required argument: 'bonus'"),
    ({"function": f"{SAMPLES}:by_response", "arguments": {"size": 3}}, "unexpected keyword argument 'size'"),
)
def test_a_function_that_cannot_be_loaded_is_a_config_error_with_its_key(settings: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        RewardFunctions(msgspec.convert(settings, RewardConfig))
    with pytest.raises(ConfigError, match=r"functions must have unique names, got exact_match more than once"):
        load(["generators.reward.functions=[{function: exact_match}, {function: exact_match}]"])


def score_group(config: RewardConfig, *responses: str) -> list[Reward]:
    return scores(config, [make_input(response) for response in responses], compares=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_answers_are_ranked_by_the_part_of_a_function_that_is_measured_only(num_workers: int):
    config = several(
        {"function": "position_match", "weight": 0, "name": "score"},
        {"function": "exact_match", "weight": 2},
        {"function": "rank", "weight": 10, "arguments": {"by": "score"}},
        num_workers=num_workers,
    )
    best, tied, also, worst = score_group(config, "31284", "31000", "31000", "x")
    assert (best.total, best.is_correct, best.parts["rank"], best.parts["score"]) == (12.0, True, 10.0, 1.0)
    assert tied.total == also.total == pytest.approx(10 * 1.5 / 3)
    assert (worst.total, worst.parts["score"] < tied.parts["score"], worst.is_correct) == (0.0, True, False)


def test_an_answer_without_a_reward_of_its_own_is_not_compared():
    config = several({"function": f"{SAMPLES}:by_response", "name": "score"}, {"function": "rank"}, num_workers=0)
    first, failed, last = score_group(config, "", "raise x", "")
    assert (failed.status, failed.total) == ("error", 0.0)
    assert failed.detail.startswith("score: ValueError: no good: x, at ")
    assert first == last == Reward(total=1.0, parts={"score": 0.5, "rank": 0.5})


@cases(
    "functions, responses, words",
    (["exact_match", "rank"], ["a"], "rank: ValueError: rank requires at least two answers"),
    ([f"{SAMPLES}:too_few"], ["a", "b"], "too_few: ValueError: it must return one value per answer (2), got 1"),
    ([f"{SAMPLES}:first_only"], ["a", "b"], ""),
)
def test_an_answer_that_cannot_be_compared_is_an_error_and_no_zero(functions: list, responses: list, words: str):
    config = several(*({"function": function} for function in functions), num_workers=0)
    rewards = score_group(config, *responses)
    if words:
        assert [(reward.status, words in reward.detail) for reward in rewards] == [("error", True)] * len(responses)
    else:
        assert [(reward.status, reward.total) for reward in rewards] == [("ok", 1.0), ("error", 0.0)]


def test_functions_that_compare_or_have_no_opinion_leave_an_answer_by_itself_to_the_others():
    for other in ("rank", f"{SAMPLES}:as_trl_none"):
        reward = score(several({"function": other}, {"function": "exact_match"}), make_input())
        assert reward == Reward(total=1.0, parts={"exact_match": 1.0}, is_correct=True)
    alone = score(several({"function": f"{SAMPLES}:first_only"}), make_input())
    assert (alone.status, "requires a function that scores it individually" in alone.detail) == ("error", True)


@cases(
    "function, expected",
    ("as_verl", Reward(total=0.5, parts={"acc": 1.0, "length": 5.0}, is_correct=True, detail="31284")),
    ("as_verl_number", Reward(total=1.0, is_correct=True)),
    ("as_verl_async", Reward(total=0.5, parts={}, is_correct=False)),
    ("as_verl_batch", Reward(total=1.0, is_correct=True)),
    ("as_trl", Reward(total=5.0, is_correct=True)),
    ("as_trl_column", Reward(total=1.0, is_correct=True)),
)
def test_functions_of_other_libraries_are_recognized_by_their_parameters(function: str, expected: Reward):
    sample = msgspec.structs.replace(make_input(), extra_info={"answer": "31284", "unused": 3})
    assert score(RewardConfig(f"{SAMPLES}:{function}"), sample) == expected


def test_functions_of_trl_get_messages_for_chat_prompts():
    sample = msgspec.structs.replace(make_input(), prompt=[{"role": "user", "content": "48213="}])
    turns = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("tool", "b"), ("assistant", "cd"))]
    for messages, total in ([], 5.0), (turns, 2.0):
        chat = msgspec.structs.replace(sample, messages=messages)
        assert score(RewardConfig(f"{SAMPLES}:as_trl_chat"), chat).total == total


@cases(
    "function, words",
    ("as_trl_two", "must return one value per answer, got [1.0, 2.0] for 1"),
    ("as_verl_without_score", "must have a number `score`, got acc"),
    ("as_trl_none", "every one returned None"),
)
def test_wrong_values_of_these_forms_are_errors(function: str, words: str):
    reward = score(RewardConfig(f"{SAMPLES}:{function}"), make_input())
    assert reward.status == "error"
    assert words in reward.detail


def test_truths_of_every_form():
    assert [truth_text(make_input(truth=truth), grader="") for truth in ("7", 7, 7.5)] == ["7", "7", "7.5"]
    for truth, texts in [("a", ["a"]), (["a", "b"], ["a", "b"]), ({"target": ["a"]}, ["a"]), ({"target": "a"}, ["a"])]:
        assert truth_texts(make_input(truth=truth), grader="") == texts
    with pytest.raises(TypeError, match="a list of texts, or a record with either as `target`, got a list"):
        truth_texts(make_input(truth=[1]), grader="qa")
    for truth in [{"a": 1}, ["a"], None, True]:
        with pytest.raises(TypeError, match="a ground truth of gsm8k must be a text or a number, got "):
            truth_text(make_input(truth=truth), grader="gsm8k")


def score_all(responses: list[str], **settings: Any) -> tuple[list[Reward], float]:
    async def use(pool: RewardPool) -> tuple[list[Reward], float]:
        await pool.score(make_input(""))
        started_at = time.monotonic()
        rewards = await asyncio.gather(*(pool.score(make_input(response)) for response in responses))
        return rewards, time.monotonic() - started_at

    return in_pool(RewardConfig(f"{SAMPLES}:by_response_async", **settings), use)


def test_async_calls_are_in_flight_at_the_same_time_up_to_the_number_allowed():
    rewards, seconds = score_all(["wait 0.3"] * 60, timeout_s=20.0)
    assert [reward.status for reward in rewards] == ["ok"] * 60
    assert seconds < 60 * 0.3 / 3
    rewards, _ = score_all(["count"] * 12, timeout_s=20.0, max_concurrency=3)
    assert {reward.total for reward in rewards} <= {1.0, 2.0, 3.0}


def test_async_calls_that_raise_or_wait_too_long_leave_their_worker():
    responses = ["wait 30", "pid", "wait 0.1", "wait 30", "raise x", "cancel", "pid"]
    rewards, _ = score_all(responses, timeout_s=2.5)
    assert [reward.status for reward in rewards] == ["timeout", "ok", "ok", "timeout", "error", "error", "ok"]
    assert rewards[1].total == rewards[-1].total
    assert "generators.reward.timeout_s (2.5 s)" in rewards[0].detail
    assert rewards[4].detail.startswith("ValueError: no good: x, at ")
    assert rewards[5].detail.startswith("CancelledError, at ")


@pytest.mark.slow
@cases(
    "response, status, words, settings",
    *((response, "timeout", "timeout_s (2.5 s)", {}) for response in ("block", "child block", "stubborn")),
    ("leave", "error", "worker died (exit code 3)", {}),
    ("block", "timeout", "generators.reward.max_cpu_s (1 s)", {"timeout_s": 20.0, "max_cpu_s": 1}),
)
def test_a_call_that_takes_the_worker_down_or_too_much_processor_time_fails_alone(response, status, words, settings):
    rewards, _ = score_all(["wait 0.2", "wait 0.5", response, "wait 0.5"], **({"timeout_s": 2.5} | settings))
    assert [reward.status for reward in rewards] == ["ok", "ok", status, "ok"]
    assert words in rewards[2].detail


RECORD = {"total": 0.75, "parts": {"a": 0.5, "b": 0.25}, "is_correct": True}


def run_sample(name: str, response: str = "", **arguments: Any) -> Reward:
    return RewardFunctions(RewardConfig(f"{SAMPLES}:{name}", arguments=arguments)).score(sample(response))


@cases(
    "name, arguments, reward",
    ("by_response", {}, Reward(total=0.5)),
    ("with_arguments", {"bonus": 0.75}, Reward(total=1.0, is_correct=True)),
    ("returning", {"value": RECORD}, Reward(total=0.75, parts={"a": 0.5, "b": 0.25}, is_correct=True)),
)
def test_a_number_or_a_dict_is_a_reward_and_1_is_correct(name: str, arguments: dict[str, Any], reward: Reward):
    assert run_sample(name, **arguments) == reward


@cases(
    "given, words",
    ("nan", "finite"),
    ({"total": 0.75, "parts": {"a": math.inf}}, "finite number, got a=inf"),
    ("text", "got '0.5', a str"),
    ({"reward": 1.0}, "got {'reward': 1.0}, a dict"),
    ("raise now", "ValueError: no good: now"),
    ("exit", "must return, it called sys.exit(3)"),
    ("shout", "ValueError: no good: no good:"),
    ({"total": 0.75, "parts": {str(index): 0.0 for index in range(10**4)}}, "at most 64 parts"),
)
def test_an_invalid_reward_is_an_error_with_one_line_of_detail(given: Any, words: str):
    reward = run_sample("by_response", given) if isinstance(given, str) else run_sample("returning", value=given)
    assert (reward.status, words in reward.detail, "\n" in reward.detail) == ("error", True, False)
    assert len(reward.detail) <= 300
    reward = run_sample("returning", value={"total": 0.75, "detail": "wordy " * 10**6})
    assert (reward.total, reward.detail) == (0.75, ("wordy " * 50)[:300]), "also that of a valid reward is cut"
