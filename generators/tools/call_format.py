"""Call formats: how a model writes the calls of its tools, and how their results are shown to it."""

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from slipstream.configs.base import ConfigError
from slipstream.generators.errors import ToolError


class ToolCall(NamedTuple):
    """A call that the model wrote. Example: ToolCall("calculator", {"expression": "3 + 4"})."""

    name: str
    arguments: dict[str, Any]


ONLY = ""
"""Stands for the name of a tool's only parameter."""


class CallFormat(NamedTuple):
    """A form of calls."""

    parse: Callable[[str], list[ToolCall]]
    """Text of a turn -> calls in it, in order. Raises ToolError for one that cannot be read."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""
    is_text: bool = False
    """Whether results follow as plain text rather than as messages of the chat template."""


# Linear in the length of any text: a model may write blanks or beginnings of calls until it is stopped, and the parser
# runs where all answers of a generator do.
_REACT = re.compile(r"Action:[ \t]*(\S{1,200})[ \t]*\nAction Input:(.+?)(?:\nObservation:|$)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times: Hermes, Qwen 2.5 and 3."""
    # From the first mark before each end: an argument may hold the mark, too.
    parts = (part.partition("<tool_call>") for part in text.split("</tool_call>")[:-1])
    return [_from_json(body.strip()) for _, mark, body in parts if mark]


def parse_json(text: str) -> list[ToolCall]:
    """Read a text that is one call, or a list of calls, in JSON: Llama 3 (`parameters`), and models told to do so."""
    plain = text.strip().removeprefix("<|python_tag|>").strip()
    if not plain.startswith(("{", "[")):
        return []
    values = _json(plain)
    return [_from_json(value) for value in (values if isinstance(values, list) else [values])]


def parse_react(text: str) -> list[ToolCall]:
    """Read `Action: name` and `Action Input: argument`, the last one of the text; ReAct, arXiv:2210.03629.

    The argument is a JSON record, or the text of the tool's only parameter.
    """
    found = list(_REACT.finditer(text))
    if not found:
        return []
    name, argument = found[-1].group(1), found[-1].group(2).strip(" \t")
    return [ToolCall(name, _arguments(argument) if argument[:1] == "{" else {ONLY: argument})]


_FORMATS = {
    "hermes": CallFormat(parse_hermes),
    "json": CallFormat(parse_json),
    "react": CallFormat(parse_react, stop=("\nObservation:",), is_text=True),
}


def load_format(name: str, *, tokenizer: Any, setting: str) -> CallFormat:
    """Return the format of a name. Raises ConfigError."""
    if name in _FORMATS:
        return _FORMATS[name]
    library, _, parser = name.partition(":")
    if library != "vllm" or not parser:
        raise ConfigError(
            f"{setting}.format must be {', '.join(_FORMATS)} or vllm:NAME, such as vllm:qwen3_coder, got {name!r}."
        )
    return CallFormat(_vllm_parser(parser, tokenizer=tokenizer, setting=setting))


def _vllm_parser(name: str, *, tokenizer: Any, setting: str) -> Callable[[str], list[ToolCall]]:
    # Only now: the import takes seconds, and most formats need none of it.
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"{setting}.format must name a tool parser of vLLM's that fits the tokenizer, got {name!r}: {error}."
        ) from error
    # The parsers look at the request for nothing but the tools' schemas.
    request = SimpleNamespace(tools=None, tool_choice="auto", skip_special_tokens=False)

    def parse(text: str) -> list[ToolCall]:
        found = parser.extract_tool_calls(text, request)
        return [ToolCall(call.function.name, _arguments(call.function.arguments)) for call in found.tool_calls]

    return parse


def _from_json(value: Any) -> ToolCall:
    record = _json(value) if isinstance(value, str) else value
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise ToolError(f'a call must be {{"name": ..., "arguments": {{...}}}}, got {str(value)[:200]}')
    return ToolCall(record["name"], _arguments(record.get("arguments", record.get("parameters", {}))))


def _arguments(value: Any) -> dict[str, Any]:
    record = _json(value) if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise ToolError(f"arguments must be a record, got {str(value)[:200]}")
    return record


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    # Numbers of thousands of digits are no mistake of syntax.
    except (ValueError, RecursionError) as error:
        raise ToolError(f"a call must be JSON, got {text[:200]}: {error}") from error
