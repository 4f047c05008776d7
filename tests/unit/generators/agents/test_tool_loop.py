import json
import re
from typing import Any

import numpy as np
import pytest
import structlog

from slipstream.configs.base import ConfigError
from slipstream.generators.agents.loops import read_action
from slipstream.generators.errors import PromptError
from slipstream.generators.tools import call_format
from slipstream.generators.tools.call_format import CallFormat, ToolCall
from tests.builders import make_prompt
from tests.cases import cases
from tests.machines import needs_bubblewrap
from tests.unit.generators.agents import tools
from tests.unit.generators.agents.scene import QUESTION, RecordingScorer, WritingEngine, play, written
from tests.unit.generators.chat import make_chat_tokenizer

HERE = "tests.unit.generators.agents.tools"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


CALL = call("calculator", '{"expression": "12 + 30"}')


def observed(texts: list[str], agent: dict, **settings) -> str:
    trajectory = play({"kind": "tools", **agent}, texts, **settings)
    first, last = np.flatnonzero(trajectory.model_mask)[[0, -1]]
    between = trajectory.token_ids[first:last][~trajectory.model_mask[first:last]]
    return make_chat_tokenizer("chatml").decode(between)


def test_the_trajectory_of_a_call():
    seen: list[tuple[WritingEngine, RecordingScorer]] = []
    agent = {"kind": "tools", "tools": ["calculator"]}
    trajectory = play(agent, [CALL, "it is 42"], inspect=lambda *both: seen.append(both))
    ((engine, scorer),) = seen
    shown = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert written(trajectory) == [(f"{CALL}<|im_end|>", True), (shown, False), ("it is 42<|im_end|>", True)]
    first, second = (sampling for _, sampling, _ in engine.requests)
    assert first.seed != second.seed
    assert second.max_tokens == 400 - len(engine.tokenizer.encode(CALL + "<|im_end|>", add_special_tokens=False))
    (sample,) = scorer.samples
    assert sample.response == "it is 42"
    assert [message["role"] for message in sample.messages] == ["assistant", "tool", "assistant"]
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_failures"]) == (1, 0)


def test_calls_of_one_turn_are_answered_in_order_and_those_that_never_return_are_counted_and_bounded():
    text = "".join(call("slow", f'{{"seconds": {seconds}}}') for seconds in (0.05, 0.0, 0.0))
    agent = {"tools": ["calculator", {"function": f"{HERE}:slow"}], "max_parallel_calls": 2}
    shown = observed([text, "so"], agent)
    assert shown.count("done") == 2
    assert "error: a turn may have 2 calls, this one exceeds the limit" in shown
    stuck = {"function": f"{HERE}:stuck", "name": "mine", "timeout_s": 0.05, "max_concurrency": 2}
    texts = [call("mine", "{}") * 2] * 3 + ["so"]
    with structlog.testing.capture_logs() as logged:
        shown = observed(texts, {"tools": [stuck]}, max_tokens=2000, max_length=8000)
    assert shown.count("error: mine must answer within 0.05 s, but did not") == 4
    assert shown.count("error: mine accepts no more calls: too many earlier calls have not returned") == 2
    assert [entry["threads"] for entry in logged if entry["event"] == "tool_still_runs"] == [2, 2, 4, 4]


@cases(
    "text, answer",
    (call("weather", '{"city": "Bonn"}'), '{"city": "Bonn", "temperature": 21, "unit": "F"}'),
    (call("weather", '{"town": "Bonn"}'), "error: TypeError: weather() got an unexpected keyword argument 'town'"),
    (call("weather", '{"city": "Bonn", "unit": "C"}'), "error: weather has no parameter unit"),
    (call("whether", "{}"), "error: unknown tool 'whether', available: weather, calculator, slow, stuck, cut"),
    ("<tool_call>{oh}</tool_call>", "error: a call must be JSON, got {oh}"),
    (call("calculator", '{"expression": "2 ** 10 / 0"}'), "error: '2 ** 10 / 0' cannot be calculated: "),
    (call("calculator", '{"expression": "9 ** 9 ** 9"}'), "bases and exponents must be at most 1000"),
    (call("calculator", '{"expression": "exit()"}'), "only numbers, parentheses, and + - * / // % ** are"),
    (call("slow", '{"seconds": 9}'), "error: slow must answer within 0.05 s, but did not"),
    (call("stuck", "{}"), "error: stuck must answer within 0.05 s, but did not"),
    (call("cut", '{"kind": "keys"}'), "error: TypeError: keys must be str, int, float, bool or None, not tuple"),
    (call("cut", '{"kind": "half"}'), "half ?"),
    (call("cut", '{"kind": "time"}'), "error: TimeoutError: the page must load within 5 s"),
    (call("calculator", '"12 + 30"'), "error: a call must be JSON, got 12 + 30"),
    (call("calculator", "[12, 30]"), "error: arguments must be a record, got [12, 30]"),
)
def test_the_model_reads_the_answer_or_the_error_of_its_call(text: str, answer: str):
    limited = [{"function": f"{HERE}:{name}", "timeout_s": 0.05} for name in ("slow", "stuck")]
    weather = {"function": f"{HERE}:weather", "arguments": {"unit": "F"}}
    assert answer in observed([text, "so"], {"tools": [weather, "calculator", *limited, f"{HERE}:cut"]})


@pytest.mark.slow
@needs_bubblewrap
def test_python_runs_in_the_sandbox():
    programs = ["print(sum(range(9)))", "x = 1", "1 / 0", "while True: pass", "print('a' * 10**6)"]
    text = "".join(call("python", json.dumps({"code": program})) for program in programs)
    agent = {"tools": [{"function": "python", "arguments": {"time_s": 2.0}}], "max_parallel_calls": 8}
    shown = observed([text, "so"], agent, max_tokens=2000, max_length=8000)
    results = [part.split("<|im_end|>")[0] for part in shown.split("<|im_start|>tool\n")[1:]]
    assert results == [
        "36",
        "(nothing was printed)",
        "error: ZeroDivisionError: division by zero",
        "error: the code must end within 2 s, but did not",
        "error: the code must print at most 65536 bytes, but printed more",
    ]


def test_an_instance_belongs_to_one_answer_and_is_closed():
    text = call("Counter", '{"step": 2}')
    tools.closed.clear()
    agent = {"tools": [{"function": f"{HERE}:Counter", "arguments": {"start": 1}}]}
    kwargs = {"tools_kwargs": {"Counter": {"create_kwargs": {"start": 10}}}}
    shown = observed([text, text, "so"], agent, prompt=make_prompt(QUESTION, extra_info=kwargs))
    assert re.findall(r"(\d+)<", shown) == ["12", "14"]
    assert tools.closed == ["at 14"]
    # Also if another one cannot be made.
    agent["tools"].append({"function": f"{HERE}:Counter", "name": "other"})
    kwargs = {"tools_kwargs": {"other": {"create_kwargs": {"begin": 10}}}}
    with pytest.raises(PromptError, match="unexpected keyword argument 'begin'"):
        observed([], agent, prompt=make_prompt(QUESTION, extra_info=kwargs))
    assert tools.closed == ["at 14", "at 1"]


def test_a_long_result_loses_its_middle_and_a_row_chooses_its_tools():
    agent = {"tools": ["calculator"], "max_result_characters": 10}
    shown = observed([call("calculator", '{"expression": "10 ** 40"}'), "so"], agent)
    assert "10000\n[... 31 characters left out ...]\n00000" in shown
    prompt = make_prompt(QUESTION, extra_info={"tool_selection": ["calculator"]})
    agent = {"tools": ["calculator", {"function": f"{HERE}:weather"}]}
    shown = observed([call("weather", '{"city": "Bonn"}'), "so"], agent, prompt=prompt)
    assert "unknown tool 'weather', available: calculator" in shown


def test_calls_may_be_marked_by_special_tokens(monkeypatch: pytest.MonkeyPatch):
    # The tokenizer of this family has [RESULT] among its special tokens, which the text of a turn leaves out.
    def parse(text: str) -> list[ToolCall]:
        return [ToolCall("calculator", {"expression": found}) for found in re.findall(r"\[RESULT\](.*)$", text)]

    monkeypatch.setattr(call_format, "_FORMATS", {"hermes": CallFormat(parse)})
    trajectory = play({"kind": "tools", "tools": ["calculator"]}, ["[RESULT]12 + 30", "42"], family="mistral")
    assert trajectory.metrics["tool_failures"] == 0


@pytest.mark.parametrize("format_name", ["hermes", "json", "react", "vllm:hermes"])
@pytest.mark.parametrize("family", ["qwen3", "chatml"])
def test_a_call_inside_the_reasoning_is_not_executed(format_name: str, family: str):
    if format_name == "vllm:hermes":
        pytest.importorskip("vllm")
    plain = '{"name": "calculator", "arguments": {"expression": "12 + 30"}}'
    calls = {"json": plain, "react": "Action: calculator\nAction Input: 12 + 30"}
    said = calls.get(format_name, CALL)
    agent = {"kind": "tools", "tools": ["calculator"], "tool_call_format": format_name}
    thought = f"<think>\nI could write\n{said}\n</think>\n\n"
    prompt = make_prompt(QUESTION if format_name != "react" else "what is 12 + 30?")
    for text, count in ((thought + "it is 42", 0), (thought + said, 1), (f"<think>{said}", 0)):
        trajectory = play(agent, [text, "42"], prompt=prompt, family=family)
        assert trajectory.metrics["tool_calls"] == count, text


ASKED = "what is 12 + 30?\n"
SAID = "I see.\nAction: calculator\nAction Input: 12 + 30\nObservation:"


@cases(
    "settings, question, call, stop, text",
    ({"tool_call_format": "react"}, ASKED, SAID, ("\nObservation:",), f"{ASKED}{SAID} 42\nit is 42<|/turn|>"),
    ({}, QUESTION, CALL, (), "<|/turn|>\n<|turn|>user\n42<|/turn|>\n<|turn|>model\nit is 42<|/turn|>"),
)
def test_tools_need_no_template_for_results(settings: dict, question: Any, call: str, stop: tuple, text: str):
    seen: list[WritingEngine] = []
    agent = {"kind": "tools", "tools": ["calculator"], **settings}
    prompt = make_prompt(question)
    answer = [call, "it is 42"]
    trajectory = play(agent, answer, prompt=prompt, family="gemma", inspect=lambda engine, _: seen.append(engine))
    assert seen[0].stops == [stop] * 2
    assert seen[0].tokenizer.decode(trajectory.token_ids).endswith(text)


def test_a_template_that_shows_results_only_after_tool_calls_takes_no_tools():
    for family in ("gpt-oss", "gemma4"):
        with pytest.raises(ConfigError, match="only after a message with `tool_calls`"):
            play({"kind": "tools", "tools": ["calculator"]}, [], family=family)
        agent = {"kind": "tools", "tools": ["calculator"], "tool_call_format": "react"}
        assert play(agent, [SAID, "42"], prompt=make_prompt(ASKED), family=family).metrics["tool_calls"] == 1


def test_limits_of_calls_turns_and_tokens():
    agent = {"kind": "tools", "tools": [{"function": "calculator", "max_calls": 1}], "max_turns": 3}
    trajectory = play(agent, [CALL, CALL, CALL])
    assert (trajectory.num_turns, trajectory.stop_reason) == (3, "turn_limit")
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_failures"]) == (2, 1)
    cut_off = play(agent, [CALL], max_tokens=20)
    assert (cut_off.num_turns, cut_off.stop_reason, int(cut_off.model_mask.sum())) == (1, "length", 20)


NOTES = [ToolCall("note", {"text": note}) for note in ("<tool_call> opens a call", "so")]
FIRST, SECOND = (call("note", json.dumps(note.arguments)) for note in NOTES)


@cases(
    "parse, text, calls",
    (call_format.parse_hermes, f"I call {FIRST} </tool_call> and {SECOND}<tool_call>", NOTES),
    (call_format.parse_hermes, "<tool_call>" + "\n" * 100_000, []),
    (call_format.parse_hermes, "<tool_call>" * 50_000, []),
    (call_format.parse_react, "Action:" * 50_000, []),
    (call_format.parse_react, "Action: a\nAction Input: 1" + " " * 100_000 + "\n", [ToolCall("a", {"": "1"})]),
    (read_action, "<search>" * 50_000, ("", "")),
)
def test_calls_may_contain_their_mark_and_no_text_of_a_model_keeps_its_parser_busy(parse, text, calls):
    assert parse(text) == calls


@cases(
    "agent, complaint",
    ({"tools": ["calculator_2"]}, "generators.agent.tools\\[0\\].function must look like `module:function`"),
    ({"tools": ["calculator", "calculator"]}, "must have unique names, got calculator more than once"),
    ({"tools": [f"{HERE}:without_a_docstring"]}, "must have annotated parameters, and a docstring"),
    ({"tools": ["calculator"], "tool_call_format": "xml"}, "tool_call_format must be hermes, json, react or vllm:"),
)
def test_what_cannot_be_a_tool_is_refused(agent: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        play({"kind": "tools", **agent}, [])


PARAMETER = "<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4</parameter></function></tool_call>"


@pytest.mark.slow
@cases(
    "name, text",
    ("hermes", call("calculator", '{"expression": "3 + 4"}')),
    ("qwen3_coder", PARAMETER),
    ("pythonic", '[calculator(expression="3 + 4")]'),
)
def test_parsers_of_vllms_read_calls(name: str, text: str):
    tokenizer = make_chat_tokenizer("chatml")
    vllm_format = call_format.load_format(f"vllm:{name}", tokenizer=tokenizer, setting="generators.agent")
    assert vllm_format.parse(text) == [ToolCall("calculator", {"expression": "3 + 4"})]
    assert vllm_format.parse("Seven, without any call.") == []


@pytest.mark.slow
def test_a_parser_of_vllms_without_content_is_refused():
    with pytest.raises(ConfigError, match=r"must name a vLLM tool parser .* got 'openai': .* is a stub"):
        call_format.load_format("vllm:openai", tokenizer=make_chat_tokenizer("chatml"), setting="generators.agent")
