from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from slipstream.generators.tokenization import PromptEncoder
from slipstream.runtime.reasoning import Reasoning, find_reasoning
from tests.unit.generators.chat import make_chat_tokenizer

THINK = Reasoning("<think>", "</think>", "vocabulary")


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "rest"),
    [
        ("42", False, None, "42"),
        ("<think>\nA\n</think>\n\n42", False, "\nA\n", "\n\n42"),
        ("A</think>42", True, "A", "42"),
        ("A</think>42", False, "A", "42"),
        ("A", True, "A", ""),
        ("1<think>A", False, "A", "1"),
        ("1<think>A</think>2<think>B</think>3", False, "AB", "123"),
        ("<think>A<think>B</think>2</think>", False, "AB", "2</think>"),
        # A model that repeats the mark of the header.
        ("<think>A</think>2", True, "A", "2"),
    ],
)
def test_a_turn_is_split_into_reasoning_and_the_rest(text: str, is_open: bool, thought: str | None, rest: str):
    assert THINK.split(text, is_open=is_open) == (thought, rest)


@pytest.mark.parametrize("text", ["<think>" * 100_000, "</think>" * 100_000, "<think></think>" * 100_000])
def test_no_text_of_a_model_keeps_the_split_busy(text: str):
    thought, _ = THINK.split(text, is_open=False)
    assert not thought


@pytest.mark.parametrize(
    ("tokens", "template", "start", "source"),
    [
        (["[THINK]", "[/THINK]"], "", "[THINK]", "vocabulary"),
        (["<|START_THINKING|>", "<|END_THINKING|>"], "", "<|START_THINKING|>", "vocabulary"),
        ([], "{{ m.content.split('</seed:think>') }}", "<seed:think>", "chat template"),
        ([], "", "<think>", "default"),
    ],
)
def test_marks_are_chosen_from_vocabulary_or_template_and_logged(
    tokens: list[str], template: str, start: str, source: str
):
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = template
    with structlog.testing.capture_logs() as logged:
        found = find_reasoning(tokenizer)
    assert (found.start, found.source, found.is_separate) == (start, source, source != "default")
    assert [(entry["start"], entry["found_in"]) for entry in logged] == [(start, source)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("deepseek_r1", ("<think>", "</think>")),
        ("seed_oss", ("<seed:think>", "</seed:think>")),
        ("minimax_m3", ("<mm:think>", "</mm:think>")),
        ("gemma4", ("<|channel>thought", "<channel|>")),
    ],
)
def test_the_split_agrees_with_the_parsers_of_vllm(name: str, marks: tuple[str, str]):
    from vllm.reasoning import ReasoningParserManager

    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_tokens([*marks, "<|channel>"])
    parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    request: Any = SimpleNamespace(tools=None, include_reasoning=True, chat_template_kwargs=None)
    start, end = marks
    for text in (f"{start}\nA{end}42", f"{start}\nA"):
        thought, rest = Reasoning(start, end, "vocabulary").split(text, is_open=False)
        found = parser.extract_reasoning(text, request)
        assert ((thought or "").strip(), rest) == ((found[0] or "").strip(), found[1] or "")


@pytest.mark.parametrize(
    ("header", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("write <think> first<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_header_opens_the_reasoning_or_not(header: str, is_open: bool):
    tokenizer = make_chat_tokenizer("qwen3")
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=100)
    context, turn = (tokenizer.encode(text, add_special_tokens=False) for text in (header, "A<|im_end|>"))
    expected = ("A", "") if is_open else (None, "A")
    assert encoder.split_reasoning(turn, context=context, is_ended=True) == expected
