"""Agents with a simulated user: conversations, scores of turns, tools in between."""

import re
from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.generators.errors import PromptError
from tests.builders import make_prompt
from tests.unit.generators.agents import tools
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, play, written
from tests.unit.generators.chat import make_chat_tokenizer

HERE = "tests.unit.generators.agents.tools"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 30"}}</tool_call>'


def interaction(**settings: Any) -> dict[str, Any]:
    return {"kind": "interaction", "interactions": [f"{HERE}:Teacher"], **settings}


def row(prompt: Any = QUESTION, **kwargs: Any) -> Any:
    return make_prompt(prompt, ground_truth="42", extra_info={"interaction_kwargs": kwargs})


def test_a_conversation():
    scorers: list[RecordingScorer] = []
    tools.closed.clear()
    texts = ["it is 41", "it is 42"]
    trajectory = play(interaction(), texts, prompt=row(), inspect=lambda _, scorer: scorers.append(scorer))
    hint = "\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n"
    assert written(trajectory) == [(f"{texts[0]}<|im_end|>", True), (hint, False), (f"{texts[1]}<|im_end|>", True)]
    assert trajectory.reward.turns == [-0.25, 1.0]
    assert (trajectory.reward.total, trajectory.reward.parts["turns"]) == (1.75, 0.75)
    assert trajectory.metrics["corrections"] == 1
    assert tools.closed == ["42"]
    assert [message["role"] for message in scorers[0].samples[0].messages] == ["assistant", "user", "assistant"]


def test_plain_text_goes_on_as_plain_text():
    trajectory = play(interaction(), ["41", "42"], prompt=row("what is 12 + 30?"))
    text = make_chat_tokenizer("chatml").decode(trajectory.token_ids)
    assert text == "what is 12 + 30?41<|im_end|>wrong42<|im_end|>"


def test_turns_that_call_tools_are_not_the_users():
    trajectory = play(interaction(tools=["calculator"]), [CALL, "41", CALL, "42"], prompt=row())
    assert trajectory.reward.turns == [0.0, -0.25, 0.0, 1.0]
    assert trajectory.metrics["tool_calls"] == 2


@pytest.mark.parametrize(
    ("settings", "limits", "turns", "reason"),
    [({"max_turns": 2}, {}, [-0.25, -0.25], "turn_limit"), ({}, {"max_tokens": 4}, [0.0], "length")],
)
def test_limits(settings: dict, limits: dict, turns: list[float], reason: str):
    trajectory = play(interaction(**settings), ["it is 41", "it is 40"], prompt=row(), **limits)
    assert (trajectory.reward.turns, trajectory.stop_reason) == (turns, reason)


def test_a_row_chooses_its_user_who_need_not_be_async():
    users = [f"{HERE}:Teacher", {"function": f"{HERE}:Pupil", "name": "pupil", "arguments": {"word": "hm"}}]
    tools.closed.clear()
    assert play(interaction(interactions=users), ["41"], prompt=row(name="pupil")).reward.turns == [0.5]
    assert tools.closed == ["at the end"]
    with pytest.raises(PromptError, match=r"names the interaction 'nobody', .* got Teacher, pupil: add it"):
        play(interaction(interactions=users), [], prompt=row(name="nobody"))


def test_an_answer_that_is_none_costs_one_answer():
    users = [f"{HERE}:Pupil"]
    trajectory = play(interaction(interactions=users), ["41"], prompt=row(answer="well"))
    assert trajectory.reward.status == "error"
    assert "must return (is it over, text, score, record), got well from Pupil" in trajectory.reward.detail


@pytest.mark.parametrize(
    ("users", "complaint"),
    [
        ([], "agent.interactions must name at least one class, got none"),
        ([f"{HERE}:Teacher"] * 2, "agent.interactions must have unique names, got Teacher twice: set `name`"),
        ([f"{HERE}:Uncalled"], "interactions[0].function must name a class that is made with one record"),
        ([f"{HERE}:Counter"], "interactions[0].function must have the methods start_interaction, generate_response"),
    ],
)
def test_what_cannot_be_a_user_is_refused(users: list, complaint: str):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        play(interaction(interactions=users), [])
