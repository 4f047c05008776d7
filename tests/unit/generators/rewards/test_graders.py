import json
import time
from typing import Any

import msgspec
import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards import functions as graders
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.functions import format_tags, qa_exact_match
from slipstream.generators.rewards.mathematics import MathVerify, dapo_math, gsm8k, math_answer, normalized
from slipstream.generators.rewards.procedural import UNRELIABLE
from slipstream.generators.rewards.reward import RewardInput
from tests.cases import cases
from tests.shape.tree import text
from tests.unit.generators.rewards.math_table import PAIRS, table


def make_sample(response: str = "", *, truth: Any = "7", num_tokens: int = 0, **fields: Any) -> RewardInput:
    ids = [1] * num_tokens
    return RewardInput(prompt="?", response=response, ground_truth=truth, response_token_ids=ids, **fields)


@cases(
    "response, method, total",
    *((text, "strict", 1.0) for text in ("3 + 4 = 7\n#### 7", "#### 7 apples\n", "#### 3 no\n#### $7.00")),
    *((text, "strict", 1.0) for text in ("#### **7**", "#### 14/2")),
    ("#### 8", "strict", 0.1),
    *((text, "strict", 0.0) for text in ("it is 7", "#### 7 or 8", "#### 8, 7", "#### 7 8", "#### none")),
    ("#### 7\n" + "and so on " * 40, "strict", 0.0),
    *((text, "flexible", total) for text, total in (("it is 7", 1), ("it is 7.", 1), ("7, no 8", 0.1), ("none", 0))),
)
def test_gsm8k(response: str, method: Any, total: float):
    reward = gsm8k(make_sample(response), method=method, format_score=0.1)
    assert reward == Reward(total=pytest.approx(total), is_correct=total == 1.0, detail=reward.detail)
    assert (reward.detail == "7") == (total == 1.0)
    for truth in (7, 7.0, "#### 7"):
        assert gsm8k(make_sample(response, truth=truth), method=method, format_score=0.1) == reward


@cases(
    "response, truth, total",
    *((text, "34", 1.0) for text in ("Answer: 34", "so\nanswer: $\\boxed{34}$", "Answer: 3\nAnswer: 34")),
    ("Answer: x = 34 dollars", 34, 1.0),
    ("Answer: 1,200", "1200", 1.0),
    ("Answer: \\frac12", "\\frac{1}{2}", 1.0),
    ("Answer: \\text{even}", "even", 1.0),
    *((text, "34", -1.0) for text in ("it is 34", "Answer: 35", "Answer: 34" + " " * 400)),
)
def test_dapo_math(response: str, truth: object, total: float):
    reward = dapo_math(make_sample(response, truth=truth))
    assert (reward.total, reward.is_correct) == (total, total > 0)
    assert (reward.detail == normalized(str(truth))) == reward.is_correct, "the answer that it extracted"


def test_math_verify_compares_formulas_and_refuses_truths_that_it_cannot_read():
    grade = MathVerify()
    assert grade(make_sample("Hence $x = \\boxed{\\frac{\\sqrt{8}}{2}}$.", truth="\\sqrt{2}")).is_correct
    assert grade(make_sample("so it is 0.5", truth="\\boxed{\\frac{1}{2}}")).total == 1.0
    assert grade(make_sample("no idea", truth="2")) == Reward(total=0.0)
    with pytest.raises(ValueError, match="must be a formula that math-verify reads, got ''"):
        grade(make_sample("2", truth=""))
    with pytest.raises(TypeError, match="a ground truth of math must be a text or a number, got a list"):
        grade(make_sample("2", truth=[2]))


@pytest.mark.slow
def test_the_graders_judge_the_pairs_as_documented():
    assert len(PAIRS) >= 200
    missing = [row for row in table() if row not in text("docs/rewards.md")]
    assert not missing, "python -m tests.unit.generators.rewards.math_table prints:\n" + "\n".join(table())


@cases(
    "response, exact, sub",
    ("<answer>The Beatles!</answer>", 1.0, 1.0),
    ("<answer>no</answer> <answer> beatles </answer>", 1.0, 1.0),
    ("<answer>It was the Beatles</answer>", 0.1, 1.0),
    ("<answer>the\nfab four</answer>", 1.0, 1.0),
    ("<answer>beatles</answer><answer>Queen</answer>", 0.1, 0.1),
    ("The Beatles", 0.0, 0.0),
    ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", 0.25, 0.25),
    ("<answer>x</answer>" * 9 + "<answer>Beatles</answer>", 1.0, 1.0),
)
@pytest.mark.parametrize("form", [lambda texts: texts, lambda texts: {"target": texts}])
def test_question_answering(response: str, exact: float, sub: float, form: Any):
    sample = make_sample(response, truth=form(["Beatles", "The Fab Four"]))
    assert qa_exact_match(sample, format_score=0.1).total == exact
    assert graders.qa_sub_match(sample, format_score=0.1).total == sub


def test_question_answering_reads_all_turns_of_the_model_and_nothing_else():
    turns = [("assistant", "<answer>Paris</answer>"), ("user", "<answer>Rome</answer> " * 20), ("assistant", "done")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert qa_exact_match(msgspec.structs.replace(make_sample("done", truth=["Paris"]), messages=messages)).total == 1.0
    messages[0]["content"] *= 11
    guessed = qa_exact_match(msgspec.structs.replace(make_sample("done", truth=["Paris"]), messages=messages))
    assert (guessed.total, guessed.is_correct) == (0.25, False)
    with pytest.raises(ValueError, match="must contain more than articles and punctuation"):
        graders.qa_sub_match(make_sample("<answer>x</answer>", truth="the !"))


@cases(
    "response, total",
    *((text, 1.0) for text in ("<think>a</think><answer>b</answer>", "\n<think>a</think>\n\n<answer>b</answer>\n")),
    *((text, 0.0) for text in ("<think>a</think> so <answer>b</answer>", "a<think>a</think><answer>b</answer>")),
    *((text, 0.0) for text in ("<think>a</think><answer>b</answer>c", "<think>a<think></think><answer>b</answer>")),
    *((text, 0.0) for text in ("<answer>b</answer><think>a</think>", "<think>a</think>", "", "<think>" * 10**5)),
)
def test_format_tags(response: str, total: float):
    assert format_tags(make_sample(response)).total == total
    opened = response.strip().removeprefix("<think>")
    assert format_tags(make_sample(opened), is_first_open=True).total == (total if opened != response.strip() else 0.0)


def test_penalties_of_length_and_repetition():
    for length, total in ((0, 0.0), (80, -0.8), (100, -1.0), (200, -1.0)):
        assert graders.length_penalty(make_sample(num_tokens=length), max_tokens=100).total == pytest.approx(total)
    for response, total in (("a b c d", 0.0), ("a b a b a b", -0.5), ("a", 0.0), ("x " * 12, -0.9)):
        assert graders.repetition_penalty(make_sample(response)).total == pytest.approx(total)


def test_tasks_of_reasoning_gym_are_graded_by_their_verifiers():
    gym = pytest.importorskip("reasoning_gym")
    entry = next(iter(gym.create_dataset("chain_sum", size=1, seed=3)))
    functions = RewardFunctions(RewardConfig("reasoning_gym"))
    right = f"<think>..</think><answer>{entry['answer']}</answer>"
    truth = {name: entry[name] for name in ("answer", "metadata")}
    assert functions.score(make_sample(right, truth=truth)) == Reward(total=1.0, is_correct=True)
    extra = {"metadata": entry["metadata"]}
    assert functions.score(make_sample(right, truth=entry["answer"], extra_info=extra)).is_correct
    assert functions.score(make_sample("<answer>none</answer>", truth=truth)).total < 1
    rush_hour = {"answer": None, "metadata": {"source_dataset": "rush_hour"}}
    unreliable = functions.score(make_sample(right, truth=rush_hour))
    assert "the task 'rush_hour' of reasoning-gym cannot be graded" in unreliable.detail
    assert "a row of reasoning_gym must have" in functions.score(make_sample(right)).detail


@pytest.mark.long
def test_every_other_task_of_reasoning_gym_rewards_its_own_answer_after_json():
    gym = pytest.importorskip("reasoning_gym")
    functions = RewardFunctions(RewardConfig("reasoning_gym"))
    failing = []
    for task in sorted(set(gym.factory.DATASETS) - UNRELIABLE.keys()):
        entry = json.loads(json.dumps(next(iter(gym.create_dataset(task, size=1, seed=7)))))
        if not functions.score(make_sample(f"<answer>{entry['answer']}</answer>", truth=entry)).is_correct:
            failing.append(task)
    assert failing == []


@cases(
    "response, stop_reason, total, is_correct",
    ("31284", "stop", 1.0, True),
    ("31284", "length", 5 / 6, False),
    ("31280", "stop", 5 / 6, False),
    ("3128", "stop", 4 / 6, False),
    ("312844", "length", 5 / 7, False),
    ("", "stop", 0.0, False),
    ("13284", "stop", 4 / 6, False),
)
def test_position_match_rewards_positions_and_exact_match_all_or_nothing(response, stop_reason, total, is_correct):
    reward = graders.position_match(make_sample(response, truth="31284", stop_reason=stop_reason))
    assert reward.total == pytest.approx(total)
    assert reward.is_correct is is_correct

    assert graders.exact_match(make_sample(" 31284\n", truth="31284")).total == 1.0
    assert graders.exact_match(make_sample(" 31284\n", truth="31284"), strip=False).total == 0.0
    assert graders.exact_match(make_sample("Yes", truth="yes"), ignore_case=True).is_correct
    assert graders.exact_match(make_sample("31284", truth="31284", stop_reason="length")).total == 0.0


@cases(
    "response, truth",
    ("3 + 4 = 7, so\n#### 7", "They have 7.\n#### 7"),
    ("#### 1,200", "#### 1200"),
    ("It costs \\boxed{\\$1200.00}.", "#### 1,200"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("First #### 3, no: #### 4", "#### 4"),
    ("The answer is -5.", "-5"),
    ("12 apples and 3 more make 15", "15"),
    ("The answer is 5%", "5"),
    ("**7**", "\\boxed{7}"),
    ("#### Conclusion\n\\boxed{7}", "7"),
    ("7 (seven)", "7"),
    ("\\boxed{7\\text{ km}}", "7"),
    ("\\boxed{1{,}200}", "1200"),
    ("\\boxed{-\\dfrac{3}{4}}", "-0.75"),
)
def test_math_answer_finds_equal_answers_and_can_reward_the_format(response: str, truth: str):
    assert math_answer(make_sample(response, truth=truth)).is_correct
    assert math_answer(make_sample("#### 8", truth="7"), format_reward=0.1).total == pytest.approx(0.1)
    assert math_answer(make_sample("it is 7", truth="7"), format_reward=0.1).total == pytest.approx(1.0)


@cases(
    "response, truth",
    *((response, "#### 7") for response in ("#### 8", "no number at all", "7 of 9", "", "\\boxed{}", "#### 7/0")),
    ("\\boxed{3\\sqrt{2}}", "2"),
    ("#### 3\\sqrt{2}", "3"),
    ("it is 3\\sqrt{2}", "2"),
    ("it is 2^{10}", "10"),
    ("the answer is 2^10", "2"),
    ("\\boxed{1e5}", "100000"),
    ("#### 1e5", "1"),
    ("#### 2x", "2"),
    ("\\boxed{1,2}", "12"),
    ("\\boxed{3\\frac{1}{2}}", "15.5"),
    ("#### 7 1/2", "7"),
    ("the answer is 3 + 4", "3"),
    ("#### 7 or 8", "7"),
    ("the answer is 7 or 8", "7"),
    ("\\boxed{7 or 8}", "7"),
)
def test_math_answer_rejects_other_answers_and_parts_of_a_formula(response: str, truth: str):
    reward = math_answer(make_sample(response, truth=truth))
    assert (reward.total, reward.is_correct, reward.status) == (0.0, False, "ok")


@pytest.mark.parametrize(
    "truth", ["3\\sqrt{2}", "2^{10}", "\\boxed{x+1}", "12 apples", "7 or 8", "1e5", "1,2", "", "9" * 101, "1/0"]
)
def test_a_truth_of_math_answer_is_one_number(truth: str):
    with pytest.raises(ValueError, match="must be a number of at most 100 characters, got"):
        math_answer(make_sample("#### 2", truth=truth))


@pytest.mark.parametrize(
    "response", ["\\boxed{1e20000000}", "#### " + "9" * 10**6, "answer" + " " * 10**6, "\\boxed{" * 10**5]
)
def test_math_answer_is_fast_for_any_response(response: str):
    started_at = time.process_time()
    assert not math_answer(make_sample(response, truth="7")).is_correct
    assert time.process_time() - started_at < 2
