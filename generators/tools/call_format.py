"""Call formats: how a model writes tool calls, and how it reads their results."""

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from slipstream.configs.base import ConfigError
from slipstream.generators.errors import ToolError


class ToolCall(NamedTuple):
    """A parsed tool call."""

    name: str
    arguments: dict[str, Any]


ONLY = ""
"""Placeholder for the name of a tool's only parameter."""


class CallFormat(NamedTuple):
    """A syntax of tool calls."""

    parse: Callable[[str], list[ToolCall]]
    """Turn without reasoning and end token -> its calls. Raises ToolError."""
    stop: tuple[str, ...] = ()
    is_text: bool = False
    """Whether results are plain text rather than chat messages."""


# Takes linear time even for long blanks and partial calls.
_REACT = re.compile(r"Action:[ \t]*(\S{1,200})[ \t]*\nAction Input:(.+?)(?:\nObservation:|$)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """Parse any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3."""
    # From the first mark, because an argument may contain it too.
    parts = (part.partition("<tool_call>") for part in text.split("</tool_call>")[:-1])
    return [_from_json(body.strip()) for _, mark, body in parts if mark]


def parse_json(text: str) -> list[ToolCall]:
    """Parse one call or a list of calls in JSON: Llama 3 (`parameters`), and models prompted for it."""
    plain = text.strip().removeprefix("<|python_tag|>").strip()
    values = _json(plain) if plain.startswith(("{", "[")) else []
    return [_from_json(value) for value in (values if isinstance(values, list) else [values])]


def parse_react(text: str) -> list[ToolCall]:
    """Parse the last `Action: name` with `Action Input: argument`, a JSON record or the value of the only parameter.

    Source: ReAct, arXiv:2210.03629.
    """
    if not (found := _REACT.findall(text)):
        return []
    name, argument = found[-1][0], found[-1][1].strip(" \t")
    return [ToolCall(name, _arguments(argument) if argument[:1] == "{" else {ONLY: argument})]


_FORMATS = {
    "hermes": CallFormat(parse_hermes),
    "json": CallFormat(parse_json),
    "react": CallFormat(parse_react, stop=("\nObservation:",), is_text=True),
}


def load_format(name: str, *, tokenizer: Any, setting: str) -> CallFormat:
    """Format with this name. Raises ConfigError."""
    if name in _FORMATS:
        return _FORMATS[name]
    library, _, parser = name.partition(":")
    if library != "vllm" or not parser:
        raise ConfigError(
            f"{setting}.tool_call_format must be {', '.join(_FORMATS)} or vllm:NAME, such as vllm:qwen3_coder, got "
            f"{name!r}."
        )
    return CallFormat(_vllm_parser(parser, tokenizer=tokenizer, setting=setting))


def _vllm_parser(name: str, *, tokenizer: Any, setting: str) -> Callable[[str], list[ToolCall]]:
    # Local import, because it takes seconds.
    from vllm.tool_parsers import ToolParserManager

    # The parsers read only these attributes.
    request = SimpleNamespace(tools=None, tool_choice="auto", skip_special_tokens=False)
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        # Some are stubs.
        parser.extract_tool_calls("", request)
    except Exception as error:
        raise ConfigError(
            f"{setting}.tool_call_format must name a vLLM tool parser that fits the tokenizer, got {name!r}: {error}."
        ) from error

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
    # ValueError also covers numbers with thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ToolError(f"a call must be JSON, got {text[:200]}: {error}") from error
