"""Agent loops of users: what they earn, and what becomes of their failures."""

from typing import Any

import pytest
import structlog

from slipstream.buffer.codec import encode, unpack
from slipstream.configs.base import ConfigError
from slipstream.generators.errors import EngineError, PromptError
from tests.builders import make_prompt
from tests.unit.generators.agents.scene import QUESTION, WritingEngine, play

HERE = "tests.unit.generators.agents.tools"


def custom(name: str, **settings) -> dict:
    return {"kind": "custom", "function": f"{HERE}:{name}", **settings}


def test_rewards_of_turns_are_added_to_the_reward_of_the_answer():
    trajectory = play(custom("corrected", arguments={"hint": "check it"}), ["it is 42", "42 it is"])
    assert trajectory.reward.turns == [0.25, 0.5]
    assert trajectory.reward.total == 1.75
    assert trajectory.reward.parts == {"answer": 1.0, "turns": 0.75}
    assert trajectory.extras == {"hint": "check it"}
    assert unpack(encode(trajectory)).num_turns == 2


@pytest.mark.parametrize(
    ("name", "status", "stop_reason", "detail"),
    [
        ("broken", "error", "tool_failure", "the agent failed: ValueError: no connection ?"),
        ("endless", "timeout", "timeout", "an answer must end within 0.1 s"),
        ("wordless", "error", "tool_failure", "the agent failed: ValueError: max_tokens of a turn must be >= 1, got 0"),
        ("impatient", "error", "tool_failure", "the agent failed: TimeoutError: the page must load"),
        ("forsaken", "error", "tool_failure", "the agent failed: CancelledError"),
        ("leaving", "error", "tool_failure", "the agent failed: SystemExit: 0"),
        ("unpaid", "error", "stop", "the agent must reward each of 1 turns, got 2 rewards"),
    ],
)
def test_a_failure_costs_one_answer(name: str, status: str, stop_reason: str, detail: str):
    with structlog.testing.capture_logs() as logged:
        trajectory = play(custom(name, timeout_s=0.1), ["it is 42"])
    assert (trajectory.reward.status, trajectory.stop_reason) == (status, stop_reason)
    named = [entry["reason"] for entry in logged if entry["event"] == "agent_failed"]
    assert named == ([] if name == "unpaid" else [trajectory.reward.detail])
    assert trajectory.reward.detail.startswith(detail)
    unpack(encode(trajectory))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("extras", {"found": {1, 2}}, "extras: extras must be made of numbers, text"),
        ("extras", {"found": 2**64}, "extras: extras must be made of numbers, text"),
        ("metrics", {"score": float("nan")}, "nonfinite_number: metrics must be finite"),
        ("metrics", {"score": "high"}, "could not convert string to float: 'high'"),
        ("metrics", {"a" * 65: 1.0}, "names: arrays and metrics must be at most 64, with names of 1 to 64 characters"),
        ("turn_rewards", [float("inf")], "nonfinite_reward: rewards must be finite"),
        ("stop_reason", "", "names: a stop reason has 1 to 64 characters, got ''"),
    ],
)
def test_what_cannot_be_stored_is_refused_where_the_loop_runs(field: str, value: Any, complaint: str):
    trajectory = play(custom("careless", arguments={"field": field, "value": value}), ["it is 42"])
    assert (trajectory.reward.status, trajectory.stop_reason, trajectory.extras) == ("error", "tool_failure", {})
    assert "the agent must produce plain extras, finite metrics, and valid turn rewards" in trajectory.reward.detail
    assert complaint in trajectory.reward.detail
    unpack(encode(trajectory))


def test_a_text_that_ends_a_turn_may_stand_alone():
    engines: list[WritingEngine] = []
    play(custom("ended", arguments={"stop": "</a>"}), ["<a>42</a>"], inspect=lambda engine, _: engines.append(engine))
    play(custom("ended", arguments={"stop": ["", "b"]}), ["42"], inspect=lambda engine, _: engines.append(engine))
    assert [engine.stops for engine in engines] == [[("</a>",)], [("b",)]]


def test_a_fault_of_the_engine_is_not_the_agents(monkeypatch: pytest.MonkeyPatch):
    async def broken(*arguments: object, **settings: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(WritingEngine, "generate", broken)
    with pytest.raises(EngineError, match="request 0-0-1 failed: TypeError: no such argument"):
        play(custom("broken"), ["it is 42"])


def test_an_agent_that_lets_the_model_say_nothing_is_an_error():
    with pytest.raises(PromptError, match="prompt test/0 must get an answer"):
        play(custom("silent"), [])


def test_a_loop_must_be_a_coroutine_function():
    with pytest.raises(ConfigError, match=r"generators.agent.function must be an `async def` function"):
        play(custom("not_async"), [])


@pytest.mark.parametrize("name", ["two_steps", "single_turn", "single_turn_agent", ""])
def test_a_row_names_its_agent(name: str):
    agents = {"two_steps": custom("corrected", arguments={"hint": "no"})}
    prompt = make_prompt(QUESTION, agent_name=name)
    trajectory = play({"kind": "single_turn"}, ["it is 42", "42"], prompt=prompt, agents=agents)
    assert trajectory.num_turns == (2 if name == "two_steps" else 1)


def test_an_agent_that_nobody_knows_is_an_error():
    with pytest.raises(PromptError, match=r"names the agent 'three', so generators.agents must have it, got none"):
        play({"kind": "single_turn"}, [], prompt=make_prompt(QUESTION, agent_name="three"))


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_tokens": 2}, "length"), ({"max_tokens": 28, "max_length": 60}, "context_overflow")]
)
def test_without_room_a_turn_is_empty_and_not_recorded(limits: dict, reason: str):
    trajectory = play(custom("unhurried"), ["it is 42"], **limits)
    assert (trajectory.num_turns, trajectory.stop_reason) == (1, reason)
    # What the model would have read next is not kept.
    assert trajectory.model_mask[-1]
