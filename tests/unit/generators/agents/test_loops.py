import re
from typing import Any

import pytest
import structlog

from slipstream.buffer.codec import encode, unpack
from slipstream.configs.base import ConfigError
from slipstream.generators.errors import EngineError, PromptError
from tests.builders import make_prompt
from tests.cases import cases
from tests.unit.generators.agents import tools
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, WritingEngine, broken_engine, play, written
from tests.unit.generators.chat import make_chat_tokenizer

HERE = "tests.unit.generators.agents.tools"


def custom(name: str, **settings) -> dict:
    return {"kind": "custom", "function": f"{HERE}:{name}", **settings}


def test_rewards_of_turns_are_added_to_the_reward_of_the_answer():
    trajectory = play(custom("corrected", arguments={"hint": "check it"}), ["it is 42", "42 it is"])
    reward = trajectory.reward
    assert (reward.turns, reward.total, reward.parts) == ([0.25, 0.5], 1.75, {"answer": 1.0, "turns": 0.75})
    assert trajectory.extras == {"hint": "check it"}
    assert unpack(encode(trajectory)).num_turns == 2


@cases(
    "name, status, stop_reason, detail",
    ("broken", "error", "tool_failure", "the agent failed: ValueError: no connection ?"),
    ("endless", "timeout", "timeout", "an answer must end within 0.1 s"),
    ("wordless", "error", "tool_failure", "the agent failed: ValueError: max_tokens of a turn must be >= 1, got 0"),
    ("impatient", "error", "tool_failure", "the agent failed: TimeoutError: the page must load"),
    ("forsaken", "error", "tool_failure", "the agent failed: CancelledError"),
    ("leaving", "error", "tool_failure", "the agent failed: SystemExit: 0"),
    ("unpaid", "error", "stop", "the agent must reward each of 1 turns, got 2 rewards"),
)
def test_a_failure_costs_one_answer(name: str, status: str, stop_reason: str, detail: str):
    with structlog.testing.capture_logs() as logged:
        limit_s = 0.1 if name == "endless" else 60.0
        trajectory = play(custom("failing", arguments={"how": name}), ["it is 42"], answer_timeout_s=limit_s)
    assert (trajectory.reward.status, trajectory.stop_reason) == (status, stop_reason)
    named = [entry["reason"] for entry in logged if entry["event"] == "agent_failed"]
    assert named == ([] if name == "unpaid" else [trajectory.reward.detail])
    assert trajectory.reward.detail.startswith(detail)
    unpack(encode(trajectory))


@cases(
    "field, value, complaint",
    ("extras", {"found": {1, 2}}, "extras: extras must be made of numbers, text"),
    ("extras", {"found": 2**64}, "extras: extras must be made of numbers, text"),
    ("metrics", {"score": float("nan")}, "nonfinite_number: metrics must be finite"),
    ("metrics", {"score": "high"}, "could not convert string to float: 'high'"),
    ("metrics", {"a" * 65: 1.0}, "names: arrays and metrics must be at most 64, with names of 1 to 64 characters"),
    ("turn_rewards", [float("inf")], "nonfinite_reward: rewards must be finite"),
    ("stop_reason", "", "names: a stop reason has 1 to 64 characters, got ''"),
)
def test_what_cannot_be_stored_is_refused_where_the_loop_runs(field: str, value: Any, complaint: str):
    trajectory = play(custom("careless", arguments={"field": field, "value": value}), ["it is 42"])
    assert (trajectory.reward.status, trajectory.stop_reason, trajectory.extras) == ("error", "tool_failure", {})
    assert "the agent must produce plain extras, finite metrics, and valid turn rewards" in trajectory.reward.detail
    assert complaint in trajectory.reward.detail
    unpack(encode(trajectory))


@pytest.mark.parametrize(("stop", "used"), [("</a>", ("</a>",)), (["", "b"], ("b",))])
def test_a_text_that_ends_a_turn_may_stand_alone(stop: str | list[str], used: tuple[str]):
    stops: list[Any] = []
    play(custom("ended", arguments={"stop": stop}), ["42"], inspect=lambda engine, _: stops.extend(engine.stops))
    assert stops == [used]


def test_a_fault_of_the_engine_is_not_the_agents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WritingEngine, "generate", broken_engine)
    with pytest.raises(EngineError, match="request 0-0-1 failed: TypeError: no such argument"):
        play(custom("unhurried"), ["it is 42"])


@pytest.mark.parametrize(
    ("name", "num_turns"),
    [("two_steps", 2), ("single_turn", 1), ("single_turn_agent", 1), ("", 1), ("tool_agent", 2), ("react_agent", 2)],
)
def test_a_row_names_its_agent(name: str, num_turns: int):
    tools = {"kind": "tools", "tools": ["calculator"]}
    agents = {"two_steps": custom("corrected", arguments={"hint": "no"}), "calculating": tools}
    prompt = make_prompt(QUESTION, agent_name=name)
    trajectory = play({"kind": "single_turn"}, [CALL, "42"], prompt=prompt, agents=agents)
    assert trajectory.num_turns == num_turns


@cases(
    "agent, name, error, complaint",
    ("silent", "", PromptError, "prompt test/0 must get an answer"),
    ("not_async", "", ConfigError, "generators.agent.function must be an `async def` function"),
    ("silent", "three", PromptError, "names the agent 'three', so generators.agents must have it, got none"),
    ("silent", "tool_agent", PromptError, "names the agent 'tool_agent', so generators.agents must have it"),
)
def test_an_agent_that_cannot_answer_is_an_error(agent: str, name: str, error: type[Exception], complaint: str):
    with pytest.raises(error, match=complaint):
        play(custom(agent), [], prompt=make_prompt(QUESTION, agent_name=name))


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_tokens": 2}, "length"), ({"max_tokens": 28, "max_length": 60}, "context_overflow")]
)
def test_without_room_a_turn_is_empty_and_not_recorded(limits: dict, reason: str):
    trajectory = play(custom("unhurried"), ["it is 42"], **limits)
    assert (trajectory.num_turns, trajectory.stop_reason) == (1, reason)
    # What the model would have read next is not kept.
    assert trajectory.model_mask[-1]


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 + 30"}}</tool_call>'


def interaction(**settings: Any) -> dict[str, Any]:
    return {"kind": "interaction", "interactions": [f"{HERE}:Teacher"], **settings}


def row(prompt: Any = QUESTION, **kwargs: Any) -> Any:
    return make_prompt(prompt, ground_truth="42", extra_info={"interaction_kwargs": kwargs})


def test_a_conversation_of_messages_or_of_plain_text():
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

    trajectory = play(interaction(), ["41", "42"], prompt=row("what is 12 + 30?"))
    text = make_chat_tokenizer("chatml").decode(trajectory.token_ids)
    assert text == "what is 12 + 30?41<|im_end|>wrong42<|im_end|>"


@cases(
    "settings, texts, turns, reason",
    pytest.param({"tools": ["calculator"]}, [CALL, "41", CALL, "42"], [0.0, -0.25, 0.0, 1.0], "stop", id="calls"),
    pytest.param({"max_turns": 2}, ["it is 41", "it is 40"], [-0.25, -0.25], "turn_limit", id="turns"),
    pytest.param({}, ["it is all of a long answer: " * 20], [0.0], "length", id="length"),
)
def test_turns_without_an_answer_of_the_user_earn_nothing(settings: dict, texts: list, turns: list, reason: str):
    trajectory = play(interaction(**settings), texts, prompt=row())
    assert (trajectory.reward.turns, trajectory.stop_reason) == (turns, reason)


def test_a_row_chooses_its_user_who_need_not_be_async():
    users = [f"{HERE}:Teacher", {"function": f"{HERE}:Pupil", "name": "pupil", "arguments": {"word": "hm"}}]
    tools.closed.clear()
    assert play(interaction(interactions=users), ["41"], prompt=row(name="pupil")).reward.turns == [0.5]
    assert tools.closed == ["at the end"]
    invalid = play(interaction(interactions=users), ["41"], prompt=row(name="pupil", answer="well"))
    assert invalid.reward.status == "error"
    assert "must return (is it over, text, score, record), got well from Pupil" in invalid.reward.detail
    with pytest.raises(PromptError, match=r"names the interaction 'nobody', .* got Teacher, pupil: add it"):
        play(interaction(interactions=users), [], prompt=row(name="nobody"))


@cases(
    "users, complaint",
    ([], "agent.interactions must name at least one class, got none"),
    ([f"{HERE}:Teacher"] * 2, "agent.interactions must have unique names, got Teacher twice: set `name`"),
    ([f"{HERE}:Uncalled"], "interactions[0].function must name a class that is made with one record"),
    ([f"{HERE}:Counter"], "interactions[0].function must have the methods start_interaction, generate_response"),
)
def test_what_cannot_be_a_user_is_refused(users: list, complaint: str):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        play(interaction(interactions=users), [])
