"""Conversations with templates that don't render a turn the same way in every place."""

import json
from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.learner.sft.conversation import chat_pieces
from slipstream.learner.sft.dataset import tokenize
from tests.builders import make_prompt
from tests.unit.generators.chat import TEMPLATES, make_chat_tokenizer

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
QWEN3 = TEMPLATES["qwen3"][0]
# Drops the reasoning of every finished turn, which its header opens.
DEEPSEEK_R1 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
) + HEADER
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
THINK = "<think>\n"


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        (QWEN3, [OPENED, "<think>\nA\n</think>\n\n2<|im_end|>\n", BETWEEN, "<think>\n\n</think>\n\n4<|im_end|>\n"]),
        (DEEPSEEK_R1, [OPENED + THINK, "A\n</think>\n\n2<|im_end|>\n", BETWEEN + THINK, "</think>\n\n4<|im_end|>\n"]),
        (
            PHI,
            [
                "<|user|>\n1<|im_end|>\n<|assistant|>\n",
                "2<|im_end|>\n",
                "<|user|>\n3<|im_end|>\n<|assistant|>\n",
                "4<|im_end|>\n</s>",
            ],
        ),
        (
            GPT_OSS,
            [
                "<|im_start|>user<|header|>1<|im_end|><|im_start|>assistant<|header|>",
                "2<|/turn|>",
                "<|im_end|><|im_start|>user<|header|>3<|im_end|><|im_start|>assistant<|header|>",
                "4<|/turn|>",
            ],
        ),
    ],
    ids=["qwen3", "deepseek-r1", "phi", "gpt-oss"],
)
def test_each_turn_is_rendered_as_the_last_one(template: str, pieces: list[str]):
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = template
    messages = MESSAGES
    if template in (PHI, GPT_OSS):
        messages = [m | {"content": m["content"].split("\n")[-1]} for m in MESSAGES]
    found = chat_pieces(messages, tokenizer=tokenizer)
    assert [piece.text for piece in found] == pieces
    assert [piece.is_model for piece in found] == [False, True, False, True]


def test_a_turn_without_reasoning_ends_the_reasoning_that_its_header_opens():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = NEMOTRON
    found = chat_pieces([MESSAGES[0], MESSAGES[3]], tokenizer=tokenizer)
    assert [piece.text for piece in found] == [OPENED + THINK, "</think>\n\n4<|im_end|>\n"]
    reasoned = {**MESSAGES[3], "reasoning_content": "B"}
    found = chat_pieces([MESSAGES[0], reasoned], tokenizer=tokenizer)
    assert found[1].text == "B\n</think>\n\n4<|im_end|>\n"


OPENS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
CLOSES = "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + HEADER
LAST = "{{ m.content.split('</think>')[-1] | trim }}"


@pytest.mark.parametrize("is_field", [False, True])
@pytest.mark.parametrize(
    ("finished", "no_thought"),
    [
        (LAST, "</think>\n\n"),  # Nemotron Nano 2: without reasoning
        ("\n</think>\n\n{{ m.content }}", "\n</think>\n\n"),  # Qwen 3 Thinking: with an empty one before it
        ("\n</think>\n\n" + LAST, "\n</think>\n\n"),
        ("<think></think>" + LAST, "</think>\n\n"),  # opened again
    ],
)
def test_a_finished_turn_that_lacks_the_reasoning_its_header_opens_gets_it(
    finished: str, no_thought: str, is_field: bool
):
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = OPENS + finished + CLOSES
    messages = MESSAGES
    if is_field:
        messages = [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "A", "content": "2"}, *MESSAGES[2:]]
    for known in (messages, messages[:2]):
        found = [piece.text for piece in chat_pieces(known, tokenizer=tokenizer)]
        expected = [OPENED + THINK, "A\n</think>\n\n2<|im_end|>\n", BETWEEN + THINK, f"{no_thought}4<|im_end|>\n"]
        assert found == expected[: len(known)]


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Kimi K2 Thinking: a finished turn has an empty reasoning, which its header does not open.
EMPTY = (
    HEAD.replace("\n", "") + "{% if m.role == 'assistant' %}<think></think>{% endif %}" + LAST + TAIL.replace("\n", "")
)
# Gemma 4: a finished turn has none.
STRIPPED = HEAD + LAST + TAIL


@pytest.mark.parametrize("is_field", [False, True])
def test_the_reasoning_that_a_template_empties_is_put_back(is_field: bool):
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = EMPTY
    reasoned = {**MESSAGES[1], "reasoning_content": "A", "content": "2"} if is_field else MESSAGES[1]
    found = [piece.text for piece in chat_pieces([MESSAGES[0], reasoned, *MESSAGES[2:]], tokenizer=tokenizer)]
    assert found[1::2] == ["<think>A</think>2<|im_end|>", "<think></think>4<|im_end|>"]
    assert "think" not in found[0] + found[2]


def test_the_reasoning_that_a_template_strips_is_kept_as_written_or_refused():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = STRIPPED
    written = {**MESSAGES[1], "content": "<think>\nA\n</think>2"}
    found = [piece.text for piece in chat_pieces([MESSAGES[0], written, *MESSAGES[2:]], tokenizer=tokenizer)]
    assert found == [OPENED, "<think>\nA\n</think>2<|im_end|>\n", BETWEEN, "4<|im_end|>\n"]
    with pytest.raises(ConfigError, match=r"reasoning of a turn, but omits 'A': .*, or write it at the start"):
        chat_pieces([MESSAGES[0], {**MESSAGES[3], "reasoning_content": "A"}], tokenizer=tokenizer)


def test_a_header_without_a_line_end_is_followed_by_reasoning_without_one():
    tokenizer = make_chat_tokenizer("qwen3")
    # DeepSeek V3.1: a finished turn has only the end of the reasoning.
    finished = OPENS.replace("<think>\n", "</think>") + LAST + CLOSES.replace("<think>\n", "<think>")
    tokenizer.chat_template = finished
    found = [piece.text for piece in chat_pieces(MESSAGES, tokenizer=tokenizer)]
    assert found[1::2] == ["A</think>2<|im_end|>\n", "</think>4<|im_end|>\n"]
    assert found[::2] == [OPENED + "<think>", BETWEEN + "<think>"]


def test_variables_and_tools_reach_the_template():
    tokenizer = make_chat_tokenizer("qwen3")
    tools: list[Any] = [{"type": "function", "function": {"name": "add"}}]
    off = chat_pieces(MESSAGES, tokenizer=tokenizer, tools=tools, variables={"enable_thinking": False})
    assert off[0].text.startswith('<|im_start|>system\n[{"type": "function", ')
    assert off[2].text.endswith("<think>\n\n</think>\n\n")
    assert off[3].text == "4<|im_end|>\n"


def test_a_turn_that_does_not_follow_its_header_is_refused():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = OTHER
    with pytest.raises(ConfigError, match="with the header that it opens the turn with, but they differ after"):
        chat_pieces(MESSAGES, tokenizer=tokenizer)


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
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = template
    calling = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    found = chat_pieces([MESSAGES[0], calling, *RESULT], tokenizer=tokenizer)
    written = found[1].text.removeprefix("<tool_call>").removesuffix("<|im_end|>\n")
    assert json.loads(written) == (ADD if function is ADD_TEXT else function)
    assert found[2].text == "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


# Mistral, Llama 3.1: calls take the place of the text, and the earlier turns end with another token
INSTEAD = (
    HEAD + "{% if m.tool_calls %}" + EACH + "{{ c.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|turn|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}


def test_a_turn_with_calls_is_followed_by_the_text_after_its_last_call():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = INSTEAD
    found = chat_pieces([MESSAGES[0], CALL, *RESULT], tokenizer=tokenizer)
    assert json.loads(found[1].text.removeprefix("<tool_call>").removesuffix("<|turn|>"))["name"] == "add"
    assert found[2].text == "<|im_end|><|im_start|>tool\n3<|im_end|><|im_start|>assistant\n"


def test_a_call_that_another_message_shortens_is_refused():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = INSTEAD.replace("{% else %}", "{{ ';' if loop.last }}{% else %}")
    with pytest.raises(ConfigError, match=r"every turn as the last one, but replaces ';<.turn.>': provide the columns"):
        chat_pieces([MESSAGES[0], CALL, *RESULT], tokenizer=tokenizer)


def test_an_end_that_depends_on_the_text_of_the_turn_is_refused():
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = GPT_OSS.replace("'<|/turn|>'", "('.!' if m.content | length > 9 else '.') ~ '<|/turn|>'")
    tokenizer.chat_template = tokenizer.chat_template.replace("else '<|im_end|>'", "else '.<|im_end|>'")
    with pytest.raises(
        ConfigError, match=r"every turn as the last one, but replaces '!<./turn.>': provide the columns"
    ):
        chat_pieces([MESSAGES[0], MESSAGES[3], *MESSAGES[2:]], tokenizer=tokenizer)


@pytest.mark.parametrize("calls", ["[]", ["add"], [{"function": "add"}]])
def test_calls_that_are_no_records_are_named(calls: Any):
    with pytest.raises(ConfigError, match="`tool_calls` must hold a list of records with `function`, a record, got"):
        chat_pieces([MESSAGES[0], CALL | {"tool_calls": calls}], tokenizer=make_chat_tokenizer("qwen3"))


@pytest.mark.parametrize("call", [{"function": {"name": "add"}}, {"name": "add", "arguments": "{}"}])
def test_a_call_may_lack_arguments_or_the_field_function(call: Any):
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = CALLS
    found = chat_pieces([MESSAGES[0], CALL | {"tool_calls": [call]}], tokenizer=tokenizer)
    assert found[1].text == """<tool_call>{"name": "add", "arguments": {}}<|im_end|>\n"""


CHATML = TEMPLATES["chatml"][0]


@pytest.mark.parametrize("rest", [[], RESULT], ids=["last turn", "earlier turn"])
@pytest.mark.parametrize(
    ("template", "content", "complaint"),
    [
        (CHATML, "", "before the end token of a turn, but omits 'add': set model.chat_template"),
        (GPT_OSS, "", "omits ('add'|one)"),
        # Nemotron Nano 2: ends the turn between its text and its calls
        (CALLS.replace("{% for c", "{{ '<|turn|>\n' if m.content }}{% for c"), "12", "omits 'add'"),
        (INSTEAD, "<think>\nA\n</think>\n\n12", "the reasoning of a turn, but omits 'A': set model.chat_template"),
    ],
)
def test_a_template_that_omits_calls_or_the_text_beside_them_is_refused(
    template: str, content: str, complaint: str, rest: list[Any]
):
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.chat_template = template
    end_ids = [9999, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn|>")]
    with pytest.raises(ConfigError, match=complaint):
        chat_pieces([MESSAGES[0], CALL | {"content": content}, *rest], tokenizer=tokenizer, end_ids=end_ids)


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
