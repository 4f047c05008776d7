import json
from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.learner.sft.conversation import Piece, chat_pieces
from slipstream.learner.sft.dataset import tokenize
from tests.builders import make_prompt
from tests.cases import cases
from tests.unit.generators.chat import TEMPLATES, make_chat_tokenizer

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
QWEN3 = TEMPLATES["qwen3"][0]
# Drops the reasoning of every finished turn, which its header opens.
DEEPSEEK_R1 = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
DEEPSEEK_R1 += "{% endfor %}" + HEADER
# A finished turn without reasoning has an empty one on the same line.
NEMOTRON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
) + HEADER
# Ends a finished conversation with the end of the text.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
# Ends the last turn with another token than the earlier ones.
GPT_OSS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|header|>{{ m.content }}"
    "{{ '<|/turn|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|header|>{% endif %}"
)
# As a turn that the model could not have written after its header.
OTHER = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "<think>\nA\n</think>\n\n2"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "4"},
]
OPENED = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
THINK, THOUGHT = "<think>\n", "A\n</think>\n\n2<|im_end|>\n"


def pieces_of(template: str, messages: list[dict[str, Any]], **settings: Any) -> list[Piece]:
    """Pieces of a conversation with this template and Qwen's tokens."""
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = template
    return chat_pieces(messages, tokenizer=tokenizer, **settings)


def texts_of(template: str, messages: list[dict[str, Any]], **settings: Any) -> list[str]:
    return [piece.text for piece in pieces_of(template, messages, **settings)]


OPENS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
CLOSES = "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + HEADER
LAST = "{{ m.content.split('</think>')[-1] | trim }}"
AS_FIELD = [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "A", "content": "2"}, *MESSAGES[2:]]


@pytest.mark.parametrize("messages", [MESSAGES, AS_FIELD], ids=["text", "field"])
@cases(
    "finished, no_thought",
    (LAST, "</think>\n\n"),  # Nemotron Nano 2: without reasoning
    ("\n</think>\n\n{{ m.content }}", "\n</think>\n\n"),  # Qwen 3 Thinking: with an empty one before it
    ("\n</think>\n\n" + LAST, "\n</think>\n\n"),
    ("<think></think>" + LAST, "</think>\n\n"),  # opened again
)
def test_a_finished_turn_that_lacks_the_reasoning_its_header_opens_gets_it(finished: str, no_thought: str, messages):
    for known in (messages, messages[:2]):
        expected = [OPENED + THINK, THOUGHT, BETWEEN + THINK, f"{no_thought}4<|im_end|>\n"]
        assert texts_of(OPENS + finished + CLOSES, known) == expected[: len(known)]


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Kimi K2 Thinking: a finished turn has an empty reasoning, which its header does not open.
EMPTY = HEAD.strip("\n") + "{% if m.role == 'assistant' %}<think></think>{% endif %}" + LAST + TAIL.replace("\n", "")
# Gemma 4: a finished turn has none.
STRIPPED = HEAD + LAST + TAIL


REASONED = {**MESSAGES[3], "reasoning_content": "A"}
WITHOUT = [m | {"content": m["content"].split("\n")[-1]} for m in MESSAGES]
KEPT = [MESSAGES[0], {**MESSAGES[1], "content": "<think>\nA\n</think>2"}, *MESSAGES[2:]]
# DeepSeek V3.1: a finished turn has only the end of the reasoning, and its header no line end.
INLINE = OPENS.replace("<think>\n", "</think>") + LAST + CLOSES.replace("<think>\n", "<think>")
PHI_HEADER, GPT_HEADER = "<|im_end|>\n<|assistant|>\n", "<|im_end|><|im_start|>assistant<|header|>"
EMPTIED = [
    "<|im_start|>user1<|im_end|><|im_start|>assistant", "<think>A</think>2<|im_end|>",
    "<|im_start|>user3<|im_end|><|im_start|>assistant", "<think></think>4<|im_end|>",
]  # fmt: skip


@cases(
    "template, messages, pieces",
    (QWEN3, MESSAGES, [OPENED, f"<think>\n{THOUGHT}", BETWEEN, "<think>\n\n</think>\n\n4<|im_end|>\n"]),
    (DEEPSEEK_R1, MESSAGES, [OPENED + THINK, THOUGHT, BETWEEN + THINK, "</think>\n\n4<|im_end|>\n"]),
    (PHI, WITHOUT, [f"<|user|>\n1{PHI_HEADER}", "2<|im_end|>\n", f"<|user|>\n3{PHI_HEADER}", "4<|im_end|>\n</s>"]),
    (GPT_OSS, WITHOUT, [
        f"<|im_start|>user<|header|>1{GPT_HEADER}", "2<|/turn|>",
        f"<|im_end|><|im_start|>user<|header|>3{GPT_HEADER}", "4<|/turn|>",
    ]),
    (NEMOTRON, MESSAGES[::3], [OPENED + THINK, "</think>\n\n4<|im_end|>\n"]),
    (NEMOTRON, [MESSAGES[0], REASONED], [OPENED + THINK, "A\n</think>\n\n4<|im_end|>\n"]),
    (INLINE, MESSAGES, [OPENED + "<think>", "A</think>2<|im_end|>\n", BETWEEN + "<think>", "</think>4<|im_end|>\n"]),
    (STRIPPED, KEPT, [OPENED, "<think>\nA\n</think>2<|im_end|>\n", BETWEEN, "4<|im_end|>\n"]),
    *((EMPTY, messages, EMPTIED) for messages in (MESSAGES, AS_FIELD)),
)  # fmt: skip
def test_each_turn_is_rendered_as_the_last_one_with_its_reasoning(template, messages, pieces):
    found = [(piece.text, piece.is_model) for piece in pieces_of(template, messages)]
    assert found == [*zip(pieces, [False, True] * 2, strict=False)]


def test_variables_and_tools_reach_the_template():
    tools: list[Any] = [{"type": "function", "function": {"name": "add"}}]
    off = texts_of(QWEN3, MESSAGES, tools=tools, variables={"enable_thinking": False})
    assert off[0].startswith('<|im_start|>system\n[{"type": "function", ')
    assert off[2].endswith("<think>\n\n</think>\n\n")
    assert off[3] == "4<|im_end|>\n"


# Qwen: arguments are records
EACH = "{% for c in m.tool_calls %}<tool_call>"
CALLS = HEAD + "{{ '' + m.content }}" + EACH + "{{ c.function | tojson }}{% endfor %}" + TAIL
# DeepSeek V3: arguments are text
TEXTS = (
    (HEAD + "{{ m.content }}" + EACH)
    + """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}' }}{% endfor %}"""
    + TAIL
)
# As templates that take either a text or calls
EITHER = (
    "{% for m in messages %}{% if m.tool_calls and m.content is defined and m.content is not none %}"
    "{{ raise_exception('either') }}{% endif %}{% endfor %}"
) + CALLS.replace("'' + m.content", "m.content or ''")
ADD: dict[str, Any] = {"name": "add", "arguments": {"a": "ä", "b": None}}
ADD_TEXT = ADD | {"arguments": json.dumps(ADD["arguments"])}
RESULT = [{"role": "tool", "content": "3"}, MESSAGES[3]]


@pytest.mark.parametrize("function", [ADD_TEXT, {"name": "add", "arguments": {"a": "ä"}}], ids=["text", "record"])
@pytest.mark.parametrize("template", [CALLS, TEXTS, EITHER], ids=["records", "texts", "either"])
def test_arguments_of_calls_are_text_or_records_and_the_text_beside_them_may_be_null(template: str, function: Any):
    calling = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    found = texts_of(template, [MESSAGES[0], calling, *RESULT])
    written = found[1].removeprefix("<tool_call>").removesuffix("<|im_end|>\n")
    assert json.loads(written) == (ADD if function is ADD_TEXT else function)
    assert found[2] == "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


# Mistral, Llama 3.1: calls take the place of the text, and the earlier turns end with another token
INSTEAD = (
    HEAD + "{% if m.tool_calls %}" + EACH + "{{ c.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|turn|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}


def test_calls_are_followed_by_the_text_after_the_last_and_may_lack_arguments_or_the_field_function():
    found = texts_of(INSTEAD, [MESSAGES[0], CALL, *RESULT])
    assert json.loads(found[1].removeprefix("<tool_call>").removesuffix("<|turn|>"))["name"] == "add"
    assert found[2] == "<|im_end|><|im_start|>tool\n3<|im_end|><|im_start|>assistant\n"
    for call in ({"function": {"name": "add"}}, {"name": "add", "arguments": "{}"}):
        found = texts_of(CALLS, [MESSAGES[0], CALL | {"tool_calls": [call]}])
        assert found[1] == """<tool_call>{"name": "add", "arguments": {}}<|im_end|>\n"""


SHORTENED = INSTEAD.replace("{% else %}", "{{ ';' if loop.last }}{% else %}")
LENGTHENED = GPT_OSS.replace("'<|/turn|>'", "('.!' if m.content | length > 9 else '.') ~ '<|/turn|>'")
LENGTHENED = LENGTHENED.replace("else '<|im_end|>'", "else '.<|im_end|>'")
NO_RECORDS = "`tool_calls` must hold a list of records with `function`, a record, got"


@cases(
    "template, turns, complaint",
    (STRIPPED, [REASONED], r"reasoning of a turn, but omits 'A': .*, or write it at the start"),
    (OTHER, MESSAGES[1:], "with the header that it opens the turn with, but they differ after"),
    (SHORTENED, [CALL, *RESULT], r"every turn as the last one, but replaces ';<.turn.>': provide the columns"),
    # The end depends on the text of the turn.
    (LENGTHENED, MESSAGES[3:] + MESSAGES[2:], r"as the last one, but replaces '!<./turn.>': provide the columns"),
    *((QWEN3, [CALL | {"tool_calls": calls}], NO_RECORDS) for calls in ("[]", ["add"], [{"function": "add"}])),
)
def test_what_a_template_cannot_render_is_refused(template: str, turns: list[dict[str, Any]], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        pieces_of(template, [MESSAGES[0], *turns])


CHATML = TEMPLATES["chatml"][0]


@pytest.mark.parametrize("rest", [[], RESULT], ids=["last turn", "earlier turn"])
@cases(
    "template, content, complaint",
    (CHATML, "", "before the end token of a turn, but omits 'add': set model.chat_template"),
    (GPT_OSS, "", "omits ('add'|one)"),
    # Nemotron Nano 2: ends the turn between its text and its calls
    (CALLS.replace("{% for c", "{{ '<|turn|>\n' if m.content }}{% for c"), "12", "omits 'add'"),
    (INSTEAD, "<think>\nA\n</think>\n\n12", "the reasoning of a turn, but omits 'A': set model.chat_template"),
)
def test_a_template_that_omits_calls_or_the_text_beside_them_is_refused(template, content, complaint, rest):
    tokenizer = make_chat_tokenizer("qwen3")
    end_ids = [9999, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn|>")]
    with pytest.raises(ConfigError, match=complaint):
        pieces_of(template, [MESSAGES[0], CALL | {"content": content}, *rest], end_ids=end_ids)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_demonstration_has_the_tokens_of_a_generator(family: str):
    tokenizer, end = make_chat_tokenizer(family), TEMPLATES[family][1]
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=1000)
    messages = [m | {"content": m["content"].split("\n")[-1]} for m in MESSAGES]
    found = tokenize(chat_pieces(messages, tokenizer=tokenizer), tokenizer=tokenizer, end_ids=[tokenizer.eos_token_id])
    expected, _ = encoder.encode(make_prompt(messages[:1]))
    thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    for number, text in enumerate(("2", "4")):
        expected += encoder.encode_text(f"{thought}{text}{end}", special_tokens=True)
        if not number:
            expected += encoder.encode_between_turns(messages[2:3], last_token_id=expected[-1])
    # A demonstration also has the template's text after the last end token, untrained.
    assert found.token_ids[: len(expected)].tolist() == expected
    trained = tokenizer.decode(found.token_ids[found.model_mask])
    assert trained == f"{thought}2{end}{thought}4{end}"
