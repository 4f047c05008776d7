"""Agent loops: tools, search, simulated users, and functions."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from slipstream.broker.messages import Prompt
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import (
    AgentKind,
    CustomAgentConfig,
    EnvironmentAgentConfig,
    ExternalAgentConfig,
    InteractionAgentConfig,
    InteractionConfig,
    SearchAgentConfig,
    SingleTurnConfig,
    ToolConfig,
    ToolsAgentConfig,
)
from slipstream.generators.agents.agent_processes import SILENT_FRACTION, AnswerQueue, EnvironmentLoop
from slipstream.generators.agents.episode import AgentLoop, Episode, Turn
from slipstream.generators.errors import PromptError, ToolError
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.call_format import ONLY, ToolCall, load_format
from slipstream.generators.tools.tool import OpenTool, Tool, call_either, load_tools
from slipstream.runtime.import_path import find_function, load_function

Reply = Callable[[Episode], Awaitable[str | None]]
"""Replies to a turn without calls; None ends the conversation."""
_SHORTENED = "\n[... {left_out} characters left out ...]\n"


class ToolLoop:
    """Agent loop with tools. The model reads the error of a failed call as its result."""

    def __init__(self, config: ToolsAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        """`setting`: the config's key, for messages. Raises ConfigError."""
        self._config = config
        self._tools = load_tools(config.tools, setting=setting)
        self._format = load_format(config.tool_call_format, tokenizer=encoder.tokenizer, setting=setting)
        self._encoder = encoder
        is_text = self._format.is_text or not self._tools
        self._role = "" if is_text else encoder.result_role(setting=setting)

    def tools(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        return [tool.schema for tool in self._chosen(prompt)] or None

    async def run(self, episode: Episode) -> None:
        await self.converse(episode)

    async def converse(self, episode: Episode, reply: Reply | None = None) -> None:
        # Means must include answers without calls.
        episode.metrics.update(tool_calls=0, tool_failures=0)
        arguments = episode.prompt.extra_info.get("tools_kwargs") or {}
        opened: dict[str, OpenTool] = {}
        try:
            for tool in self._chosen(episode.prompt):
                opened[tool.name] = tool.open((arguments.get(tool.name) or {}).get("create_kwargs") or {})
            await self._converse(episode, opened, reply)
        finally:
            await asyncio.gather(*(tool.close() for tool in opened.values()))

    async def _converse(self, episode: Episode, tools: dict[str, OpenTool], reply: Reply | None) -> None:
        for number in range(1, self._config.max_turns + 1):
            turn = await episode.generate(stop=self._format.stop)
            # A truncated turn may end inside a call.
            if turn.stop_reason in ("length", "context_overflow"):
                return
            calls = self._calls(turn, episode) if self._tools else []
            text = await reply(episode) if reply and not calls else None
            if not calls and text is None:
                return
            if number == self._config.max_turns:
                episode.stop_reason = "turn_limit"
                return
            if text is None:
                results = await self._answer(episode, calls, tools)
                if self._format.is_text:
                    episode.observe(" " + "\n".join(results) + "\n")
                else:
                    episode.observe_messages([{"role": self._role, "content": result} for result in results])
            elif isinstance(episode.prompt.prompt, str):
                episode.observe(text)
            else:
                episode.observe_messages([{"role": "user", "content": text}])

    def _calls(self, turn: Turn, episode: Episode) -> list[ToolCall | ToolError]:
        before = episode.transcript.token_ids[: -len(turn.token_ids)]
        is_ended = turn.stop_reason == "stop"
        _, text = self._encoder.split_reasoning(turn.token_ids, context=before, is_ended=is_ended)
        try:
            return [*self._format.parse(text)]
        except ToolError as error:
            return [error]

    async def _answer(
        self, episode: Episode, calls: list[ToolCall | ToolError], tools: dict[str, OpenTool]
    ) -> list[str]:
        answered = calls[: self._config.max_parallel_calls]
        results = await asyncio.gather(*(self._result(call, tools) for call in answered))
        left_out = len(calls) - len(answered)
        episode.metrics["tool_calls"] += len(calls)
        episode.metrics["tool_failures"] += left_out + sum(is_failed for _, is_failed in results)
        limit = f"error: a turn may have {self._config.max_parallel_calls} calls, this one exceeds the limit"
        return [text for text, _ in results] + [limit] * left_out

    async def _result(self, call: ToolCall | ToolError, tools: dict[str, OpenTool]) -> tuple[str, bool]:
        try:
            if isinstance(call, ToolError):
                raise call
            if call.name not in tools:
                raise ToolError(f"unknown tool {call.name!r}, available: {', '.join(tools)}")
            return self._shortened(await tools[call.name].call(self._named(call))), False
        except ToolError as error:
            return self._shortened(f"error: {error}"), True

    def _named(self, call: ToolCall) -> dict[str, Any]:
        """Name an only argument, which some formats omit."""
        if set(call.arguments) != {ONLY}:
            return call.arguments
        tool = next(tool for tool in self._tools if tool.name == call.name)
        function: Any = tool.schema["function"]
        names = list(function["parameters"]["properties"])
        if len(names) != 1:
            raise ToolError(f"{call.name} needs a JSON record with {', '.join(names)}")
        return {names[0]: call.arguments[ONLY]}

    def _shortened(self, text: str) -> str:
        limit = self._config.max_result_characters
        if len(text) <= limit:
            return text
        half = limit // 2
        return text[:half] + _SHORTENED.format(left_out=len(text) - 2 * half) + text[len(text) - half :]

    def _chosen(self, prompt: Prompt) -> list[Tool]:
        selection = prompt.extra_info.get("tool_selection")
        return [tool for tool in self._tools if selection is None or tool.name in selection]


_END_S = 5.0
"""Time limit of `finalize_interaction`."""
_METHODS = ("start_interaction", "generate_response", "finalize_interaction")


class InteractionLoop(ToolLoop):
    """Agent loop with a simulated user. One object serves all answers."""

    def __init__(self, config: InteractionAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        super().__init__(config, encoder=encoder, setting=setting)
        if not config.interactions:
            raise ConfigError(f"{setting}.interactions must name at least one class, got none.")
        self._users: dict[str, Any] = {}
        for number, each in enumerate(config.interactions):
            user = InteractionConfig(function=each) if isinstance(each, str) else each
            key = f"{setting}.interactions[{number}].function"
            found = find_function(user.function, setting=key)
            try:
                built = found(user.arguments)
            except Exception as error:
                raise ConfigError(
                    f"{key} must name a class that is made with one record, got {user.function!r}: "
                    f"{type(error).__name__}: {error}."
                ) from error
            if missing := [method for method in _METHODS if not callable(getattr(built, method, None))]:
                raise ConfigError(f"{key} must have the methods {', '.join(_METHODS)}, but lacks {missing[0]}.")
            name = user.name or found.__name__
            if name in self._users:
                raise ConfigError(f"{setting}.interactions must have unique names, got {name} twice: set `name`.")
            self._users[name] = built

    async def run(self, episode: Episode) -> None:
        prompt = episode.prompt
        given = {"ground_truth": prompt.ground_truth} | (prompt.extra_info.get("interaction_kwargs") or {})
        name = given.get("name") or next(iter(self._users))
        if name not in self._users:
            raise PromptError(
                f"prompt {prompt.uid} names the interaction {name!r}, so the agent's `interactions` must have it, got "
                f"{', '.join(self._users)}: add it, or change interaction_kwargs.name"
            )
        user = self._users[name]
        found = await call_either(partial(user.start_interaction, episode.id, **given))
        own_id = found if isinstance(found, str) else episode.id
        try:
            await self.converse(episode, partial(_answer, user, own_id, given))
        finally:
            try:
                async with asyncio.timeout(_END_S):
                    await call_either(partial(user.finalize_interaction, own_id, **given))
            except TimeoutError:
                raise TimeoutError(f"finalize_interaction must end within {_END_S:g} s, but did not") from None
        _pay(episode, 0.0)


async def _answer(user: Any, own_id: str, given: dict[str, Any], episode: Episode) -> str | None:
    """Score and answer the last turn. None = the conversation has ended."""
    prompt = episode.prompt.prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = await call_either(partial(user.generate_response, own_id, [*asked, *episode.messages], **given))
    match found:
        case (bool() as is_over, str() as text, bool() | int() | float() as score, dict() as info):
            _pay(episode, float(score))
        case _:
            raise TypeError(
                f"generate_response must return (is it over, text, score, record), got {str(found)[:200]} from "
                f"{type(user).__name__}"
            )
    episode.metrics.update({str(key): value for key, value in info.items() if isinstance(value, int | float)})
    return None if is_over else text


def _pay(episode: Episode, score: float) -> None:
    """Add the last turn's score, and 0 for earlier turns with calls."""
    missing = episode.transcript.num_turns - len(episode.turn_rewards)
    episode.turn_rewards += [0.0] * (missing - 1) + [score] * (missing > 0)


class FunctionLoop(AgentLoop):
    """Agent loop that calls a coroutine function."""

    def __init__(self, function: Callable[[Episode], Awaitable[Any]]) -> None:
        self._function = function

    async def run(self, episode: Episode) -> None:
        await self._function(episode)


_STOPS = ("</search>", "</answer>")
_INFORMATION = "\n\n<information>{}</information>\n\n"


class SearchLoop(AgentLoop):
    """Agent loop that answers `<search>query</search>` with `<information>...</information>`, until `<answer>`.

    Source: Search-R1, arXiv:2503.09516.
    """

    def __init__(self, config: SearchAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        """Open the index. Raises ConfigError."""
        self._config = config
        self._shortened = encoder.shortened
        search = ToolConfig("search", arguments={"index": config.index, "topk": config.num_passages})
        self._search = Tool(search, setting=setting).open({})

    async def run(self, episode: Episode) -> None:
        episode.metrics.update(tool_calls=0, tool_failures=0, invalid_actions=0)
        for number in range(1, self._config.max_turns + 1):
            turn = await episode.generate(stop=_STOPS)
            action, query = read_action(turn.text)
            if episode.room <= 0 or action == "answer":
                return
            if number == self._config.max_turns:
                episode.stop_reason = "turn_limit"
            elif action:
                failure = None
                try:
                    text = await self._search.call({"query": query})
                except ToolError as error:
                    failure, text = error, f"error: {error}"
                episode.metrics.update(tool_calls=1, tool_failures=failure is not None)
                shown = self._shortened(text.strip(), self._config.max_observation_tokens)
                episode.observe(_INFORMATION.format(shown))
            elif self._config.invalid_action:
                episode.metrics["invalid_actions"] += 1
                episode.observe(self._config.invalid_action)
            else:
                return


def read_action(text: str) -> tuple[str, str]:
    """Name and content of the tag that ends a turn; empty without a complete tag."""
    for name in ("search", "answer"):
        # Takes linear time even with thousands of opening tags.
        before, end, _ = text.partition(f"</{name}>")
        _, start, body = before.partition(f"<{name}>")
        if start and end:
            return name, body.strip()
    return "", ""


def build_loop(
    config: AgentKind, *, encoder: PromptEncoder, setting: str, answer_timeout_s: float, queue: AnswerQueue | None
) -> AgentLoop:
    """Build the loop of an agent. Raises ConfigError."""
    match config:
        case SingleTurnConfig():
            return FunctionLoop(Episode.generate)
        case InteractionAgentConfig():
            return InteractionLoop(config, encoder=encoder, setting=setting)
        case ToolsAgentConfig():
            return ToolLoop(config, encoder=encoder, setting=setting)
        case SearchAgentConfig():
            return SearchLoop(config, encoder=encoder, setting=setting)
        case CustomAgentConfig():
            function = load_function(config.function, setting=setting, arguments=config.arguments)
            if not inspect.iscoroutinefunction(function):
                raise ConfigError(f"{setting}.function must be an `async def` function, got {config.function!r}.")
            return FunctionLoop(partial(function, **config.arguments))
        case EnvironmentAgentConfig():
            return EnvironmentLoop(config, setting=setting, answer_timeout_s=answer_timeout_s)
        case ExternalAgentConfig():
            if queue is None:
                raise ConfigError(
                    f"{setting} may be `external` only if the roles run as processes, got a run without a token, which "
                    "external agents need to authenticate."
                )
            return FunctionLoop(partial(queue.lend, silence_timeout_s=SILENT_FRACTION * answer_timeout_s))
