"""Conversations as pieces of text: the model's, and the chat template's around it."""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from slipstream.configs.base import ConfigError
from slipstream.runtime.model_files import Reasoning, find_reasoning
from slipstream.runtime.row_files import without_nulls

Message = dict[str, Any]
"""`role`, `content`, and other fields of the chat template."""
_Render = Callable[..., str]
_MARK = "SLIPSTREAM.TURN.OF.THE.MODEL"


class Piece(NamedTuple):
    """Text that is tokenized separately. Example: Piece("31284", is_model=True)."""

    text: str
    is_model: bool


def chat_pieces(
    messages: Sequence[Message],
    *,
    tokenizer: Any,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    end_ids: Collection[int] = (),
) -> list[Piece]:
    """Split a conversation at the start and end of each assistant turn.

    A template that rewrites earlier turns (Qwen 3 drops their reasoning) renders each turn as the last one, then the
    text up to the next, as generators do. Arguments of calls are records or JSON text. `tools`: schemas. `variables`:
    of the template. `end_ids`: end tokens of the model, which no call may follow. Empty without an assistant turn, or
    if one is empty. Raises ConfigError.
    """
    shown: list[Message] = without_nulls(list(messages))
    turns = [index for index, message in enumerate(shown) if message.get("role") == "assistant"]
    if not all(any(value for key, value in shown[index].items() if key != "role") for index in turns):
        return []

    def render(messages: Sequence[Message], *, opens_turn: bool) -> str:
        settings = {**(variables or {}), "add_generation_prompt": opens_turn, "tokenize": False}
        try:
            return str(tokenizer.apply_chat_template(list(messages), tools=tools, **settings))
        # A template is code and may raise anything.
        except Exception as error:
            raise ConfigError(f"the messages must fit the chat template: {error}") from error

    # The tokenizer may lack end tokens.
    ends = [end for end in tokenizer.convert_ids_to_tokens(list(end_ids)) if end]
    errors: list[ConfigError] = []
    # Some templates refuse records as arguments, or text with calls.
    forms = product((False, True), ({"content": ""}, {})) if any(m.get("tool_calls") for m in shown) else [(False, {})]
    for as_json, default in forms:
        given = [{**default, **_with_arguments(m, as_json=as_json)} if m.get("tool_calls") else m for m in shown]
        try:
            pieces = _pieces(given, turns, render=render, tokenizer=tokenizer)
            for index, piece in zip(turns, pieces[1::2], strict=True):
                _require_calls(given[index], piece.text, ends=ends, reasoning=find_reasoning(tokenizer))
            return pieces
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _with_arguments(message: Message, *, as_json: bool) -> Message:
    """Message with arguments of calls as records, or as JSON text. Raises ConfigError."""
    given, calls = message["tool_calls"], []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict):
            raise ConfigError(f"`tool_calls` must hold a list of records with `function`, a record, got {given!r:.60}.")
        arguments = function.get("arguments") or {}
        if as_json and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not as_json:
            with suppress(json.JSONDecodeError):
                arguments = json.loads(arguments)
        function = {**function, "arguments": arguments}
        calls.append({**call, **({} if "function" in call else function), "function": function})
    return {**message, "tool_calls": calls}


def _pieces(messages: list[Message], turns: list[int], *, render: _Render, tokenizer: Any) -> list[Piece]:
    reasoning = find_reasoning(tokenizer)
    names = [reasoning.start, reasoning.end, *(token.content for token in tokenizer.added_tokens_decoder.values())]
    # Up to the header, and up to the end, of each turn.
    texts = [render(messages[:end], opens_turn=end == index) for index in turns for end in (index, index + 1)]
    written = [
        _written(messages[index], opened, closed, names=names, reasoning=reasoning)
        for index, opened, closed in zip(turns, texts[::2], texts[1::2], strict=True)
    ]
    steps = list(enumerate(zip(["", *texts], texts, strict=False)))
    pieces = [Piece(text[len(start) :], bool(number % 2)) for number, (start, text) in steps]
    if all(text.startswith(start) for _, (start, text) in steps) and [text for text, _ in pieces[1::2]] == written:
        return pieces
    pieces = [Piece(texts[0], is_model=False)]
    for own, index, following in zip(written, turns, turns[1:], strict=False):
        known = [*messages[:index], _marked(messages[index])]
        _, _, ending = render(known, opens_turn=False).partition(_MARK)
        _, mark, rest = render([*known, *messages[index + 1 : following]], opens_turn=True).partition(_MARK)
        if not mark:
            raise ConfigError("the chat template must render texts and calls, but omits one: set model.chat_template.")
        shared = _shared(ending, rest, names=names)
        own_ending = ending[len(shared) :] if shared else ""
        is_part = re.sub("|".join(map(re.escape, names)), "", own_ending).strip() and messages[index].get("tool_calls")
        if is_part or not own.endswith(own_ending):
            raise ConfigError(
                f"the chat template must end every turn as the last one, but replaces {own_ending[-40:]!r}: provide "
                "the columns token_ids and model_mask."
            )
        pieces += [Piece(own.removesuffix(own_ending), is_model=True), Piece(rest[len(shared) :], is_model=False)]
    return [*pieces, Piece(written[-1], is_model=True)]


def _require_calls(message: Message, text: str, *, ends: Sequence[str], reasoning: Reasoning) -> None:
    """Raise ConfigError if the template omits a call or its content, or ends the turn before."""
    calls = message.get("tool_calls") or []
    for end in ends:
        text = text.partition(end)[0]
    omitted = [name for call in calls if (name := str(call["function"].get("name"))) not in text]
    if calls and isinstance(content := message.get("content"), str):
        rest = reasoning.split(content, is_open=False)[1].strip()
        omitted += [] if content.strip() in text or rest in text else [rest[:40]]
    if omitted:
        raise ConfigError(
            "the chat template must render calls, and the content beside them, before the end token of a turn, but "
            f"omits {omitted[0]!r}: set model.chat_template to one that does, or empty such contents."
        )


def _marked(message: Message) -> Message:
    """Turn with a mark at its end."""
    marked = {name: value for name, value in message.items() if name != "reasoning_content"}
    if not (calls := marked.get("tool_calls")):
        return {**marked, "content": _MARK}
    # Calls follow the content, and some templates render them in its place.
    function, mark = calls[-1]["function"], {"mark": _MARK}
    arguments = json.dumps(mark) if isinstance(function["arguments"], str) else mark
    marked["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
    return marked | ({"content": ""} if marked.get("content") else {})


def _written(message: Message, opened: str, closed: str, *, names: list[str], reasoning: Reasoning) -> str:
    """Text of the model after `opened`, the text up to its turn's header. Raises ConfigError."""
    text = closed[len(opened) :]
    given, _ = reasoning.split(str(message.get("content") or ""), is_open=False)
    given = str(message.get("reasoning_content") or given or "").strip()
    thought, end, _ = text.partition(reasoning.end)
    is_complete = end and reasoning.start not in thought and given in thought
    if closed.startswith(opened) and (is_complete or not reasoning.is_opened_by(opened)):
        return text if given in text else _with_reasoning(text, given, message, reasoning=reasoning)
    shared = _shared(opened, closed, names=names)
    header = opened[len(shared) :].replace(reasoning.start, "").replace(reasoning.end, "")
    if header.strip():
        raise ConfigError(
            "the chat template must render a turn of the model with the header that it opens the turn with, but they "
            f"differ after {shared[-40:]!r}: tokenize the conversation yourself and provide the columns token_ids and "
            "model_mask."
        )
    # DeepSeek-R1's opens the reasoning in the header, and drops it from finished turns.
    rendered, rest = reasoning.split(closed[len(shared) :], is_open=False)
    if not reasoning.is_opened_by(opened):
        return rest.lstrip("\n")
    gap = opened[len(opened.rstrip()) :]
    return f"{given or (rendered or '').strip()}{gap}{reasoning.end}{gap * 2}{rest.lstrip()}".lstrip("\n")


def _with_reasoning(text: str, given: str, message: Message, *, reasoning: Reasoning) -> str:
    """Insert reasoning that the template omits, as Gemma 4's does. Raises ConfigError."""
    before, start, rest = text.partition(reasoning.start)
    blank, end, rest = rest.partition(reasoning.end)
    if end and not blank.strip():
        # Kimi K2: an empty one.
        middle = (len(blank) + 1) // 2
        return f"{before}{start}{blank[:middle]}{given}{blank[middle:]}{end}{rest}"
    content = str(message.get("content") or "").strip()
    answer = reasoning.split(content, is_open=False)[1].strip()
    has_marks = reasoning.end in content
    if has_marks and content.endswith(answer) and text.lstrip().startswith(answer):
        return content.removesuffix(answer) + text.lstrip()
    beside = (
        "" if has_marks else f", or write it at the start of `content`, between {reasoning.start} and {reasoning.end}"
    )
    raise ConfigError(
        f"the chat template must render the reasoning of a turn, but omits {given[:40]!r}: set model.chat_template to "
        f"one that does{beside}."
    )


def _shared(first: str, second: str, *, names: list[str]) -> str:
    """Common beginning, without a part of a special token."""
    shared = os.path.commonprefix([first, second])  # noqa: RUF071, texts rather than paths
    cuts = [
        start
        for text in (first, second)
        for name in names
        for start in range(max(0, len(shared) - len(name) + 1), len(shared))
        if text.startswith(name, start)
    ]
    return shared[: min(cuts, default=len(shared))]
