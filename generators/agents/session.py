"""Session: maps an agent's requests at the model server to contexts of one episode."""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from slipstream.configs.base import ConfigError
from slipstream.generators.agents.episode import Episode, Transcript, Turn
from slipstream.generators.engines.engine import Completion
from slipstream.generators.errors import PromptError, ToolError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.call_format import ToolCall, load_format

Message = dict[str, Any]
Messages = list[Message]


class ChatForm:
    """Converts between chat messages with tool calls and the model's text."""

    def __init__(self, name: str, *, encoder: PromptEncoder, setting: str) -> None:
        self.encoder = encoder
        # Ids may have gaps.
        self.vocabulary_size = max(encoder.tokenizer.get_vocab().values()) + 1
        self._setting = setting
        self._format = load_format(name, tokenizer=encoder.tokenizer, setting=setting)
        self._reasoning = encoder.reasoning
        if self._format.is_text:
            raise ConfigError(f"{setting}.tool_call_format must put calls into messages, got {name!r}: use hermes.")

    def rendered(self, message: Message) -> Message:
        role = message["role"]
        role = "system" if role == "developer" else self._result_role if role == "tool" else role
        shown = {**message, "role": role, "content": text_of(message)}
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _decoded(call["function"].get("arguments"))}}
                for call in calls
            ]
        return shown

    def answer(self, turn: Turn, *, context: list[int], has_tools: bool, stop: Sequence[str]) -> Message:
        """Convert a turn after `context`. A malformed call stays text."""
        is_ended = turn.stop_reason == "stop"
        thought, rest = self.encoder.split_reasoning(turn.token_ids, context=context, is_ended=is_ended)
        shown: Message = {"role": "assistant"}
        text = turn.text
        if thought is not None and self._reasoning.is_separate:
            text = self.encoder.without_special_tokens(rest).lstrip()
            shown["reasoning_content"] = self.encoder.without_special_tokens(thought).strip()
        # The stop string stays in the context.
        text = text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]
        calls: list[ToolCall] = []
        # A truncated turn may end inside a call.
        if has_tools and turn.stop_reason != "length":
            with suppress(ToolError):
                calls = self._format.parse(rest)
        if not calls:
            return {**shown, "content": text}
        before, mark, _ = text.partition("<tool_call>")
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
        shown["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": each} for each in functions
        ]
        return {**shown, "content": (before.strip() if mark else "") or None}

    @cached_property
    def _result_role(self) -> str:
        try:
            return self.encoder.result_role(setting=self._setting)
        except ConfigError as error:
            raise PromptError(str(error)) from None


class Written(NamedTuple):
    """A model turn and its message."""

    turn: Turn
    completion: Completion
    message: Message
    num_prompt_tokens: int


class NoRoomError(Exception):
    """The model's context or the answer's token budget is full."""


class Context:
    """One conversation, as messages and as tokens."""

    def __init__(self, transcript: Transcript, tools: Messages | None, num_given: int) -> None:
        """`num_given`: messages in the request that opened it."""
        self.transcript = transcript
        self.tools = tools
        self.num_given = num_given
        self.messages: Messages = []
        self.ends: list[tuple[int, int]] = []
        """(messages, tokens) at the end of each model turn."""
        self.is_busy = False

    def shared_end(self, messages: Messages, tools: Messages | None) -> tuple[int, int]:
        """Latest turn end where all earlier `messages` match, or (0, 0)."""
        if tools != self.tools:
            return (0, 0)
        known, asked = ([compared(message) for message in each] for each in (self.messages, messages))
        return next((end for end in reversed(self.ends) if known[: end[0]] == asked[: end[0]]), (0, 0))


class Session:
    """Maps requests to contexts, without encoding the model's tokens again.

    - A request that repeats all messages of a context, including the model's, continues it.
    - A request that repeats only some of them (a fork), or finds the context in use, opens a context with a copy of the
      shared tokens. The copy carries no loss, so no token is trained on twice.
    - A request that repeats none of the model's messages (a sub-agent, a compaction) opens a context with its own text.
    """

    def __init__(self, episode: Episode, form: ChatForm) -> None:
        self.episode = episode
        self._form = form
        self._contexts: list[Context] = []

    def decode(self, token_ids: list[int]) -> str:
        return self._form.encoder.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None,
        max_tokens: int | None,
        stop: Sequence[str],
        variables: Mapping[str, Any] | None = None,
    ) -> Written:
        """`variables`: of the chat template. Raises NoRoomError, PromptError, EngineError."""
        variables = self._form.encoder.row_variables(self.episode.prompt, asked=variables)
        context, observed = self._continued(messages, tools, variables)
        return await self._write(context, observed, messages=messages, max_tokens=max_tokens, stop=stop)

    async def complete(self, token_ids: list[int], *, max_tokens: int | None, stop: Sequence[str]) -> Written:
        """Continue the longest idle context that `token_ids` begins with, or begin one.

        Raises NoRoomError, PromptError, EngineError.
        """
        context = Context(Transcript([]), None, 0)
        for one in self._contexts:
            known = one.transcript.token_ids
            if not one.is_busy and len(known) > len(context.transcript.token_ids) and token_ids[: len(known)] == known:
                context = one
        observed = token_ids[len(context.transcript.token_ids) :]
        # An invalid id would crash the engine. The model's own tokens may exceed the tokenizer's vocabulary.
        if stranger := next((each for each in observed if not 0 <= each < self._form.vocabulary_size), None):
            raise PromptError(f"token_ids must be below {self._form.vocabulary_size}, got {stranger}")
        return await self._write(context, observed, messages=[], max_tokens=max_tokens, stop=stop)

    def _continued(
        self, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]
    ) -> tuple[Context, list[int]]:
        """Known or new context, and the tokens to add to it."""
        shared = [(context.shared_end(messages, tools), context) for context in self._contexts]
        (num_messages, num_tokens), found = max(shared, key=lambda each: each[0], default=((0, 0), None))
        rendered = [self._form.rendered(message) for message in messages[num_messages:]]
        encoder = self._form.encoder
        if found is None or not num_messages:
            opened = encoder.encode_messages(rendered, tools=tools, variables=variables)
            return Context(Transcript([]), tools, len(messages)), opened
        tokens = found.transcript.token_ids[:num_tokens]
        between = encoder.encode_between_turns(rendered, last_token_id=tokens[-1], variables=variables)
        if found.is_busy or found.ends[-1][1] != num_tokens:
            return Context(Transcript([]), tools, found.num_given), [*tokens, *between]
        return found, between

    async def _write(
        self, context: Context, observed: list[int], *, messages: Messages, max_tokens: int | None, stop: Sequence[str]
    ) -> Written:
        episode, transcript = self.episode, context.transcript
        prompt = [*transcript.token_ids, *observed]
        if (room := episode.room_after(prompt)) <= 0:
            episode.stop_reason = episode.reason_of_no_room(prompt)
            raise NoRoomError(episode.stop_reason)
        context.is_busy = True
        try:
            limit = room if max_tokens is None else min(max_tokens, room)
            completion = await episode.sample(prompt, max_tokens=limit, stop=stop)
        finally:
            context.is_busy = False
        if not transcript.token_ids:
            self._contexts.append(context)
            episode.contexts.append(transcript)
        else:
            episode.metrics["observation_tokens"] += len(observed)
        transcript.add_observation(observed)
        turn = episode.record(transcript, completion)
        stop = [*stop, *(each for each in episode.stop if isinstance(each, str))]
        message = self._form.answer(turn, context=prompt, has_tools=bool(context.tools), stop=stop)
        context.messages = [*messages, message]
        context.ends.append((len(context.messages), len(transcript.token_ids)))
        episode.messages = context.messages[context.num_given :]
        return Written(turn, completion, message, len(prompt))


def text_of(message: Message) -> str:
    """Raises PromptError for parts other than text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    kinds = [part["type"] for part in content]
    if any(kind != "text" for kind in kinds):
        raise PromptError(f"messages must contain only text, got parts of the kinds {kinds}")
    return "".join(part.get("text", "") for part in content)


def compared(message: Message) -> tuple[Any, ...]:
    """Fields that identify a message: clients change others."""
    functions = [call.get("function", {}) for call in message.get("tool_calls") or []]
    calls = [(each.get("name"), _decoded(each.get("arguments"))) for each in functions]
    text = text_of(message)
    return message["role"], text.strip() if message["role"] == "assistant" else text, calls


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments
