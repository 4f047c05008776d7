"""ToolLoop: the model calls tools, reads their results, and goes on until it answers without a call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slipstream.broker.messages import Prompt
from slipstream.configs.generators import ToolsAgentConfig
from slipstream.generators.agents.episode import Episode, Turn
from slipstream.generators.tokenization import PromptEncoder
from slipstream.generators.tools.built_in import ToolError
from slipstream.generators.tools.call_format import ONLY, ToolCall, load_format
from slipstream.generators.tools.tool import OpenTool, Tool, load_tools

_SHORTENED = "\n[... {left_out} characters left out ...]\n"


class ToolLoop:
    """Agent loop with tools.

    A call that fails (unknown name, arguments that do not fit, an exception, a time limit) is answered with its error,
    which the model reads, and counted in `tool_failures`.
    """

    def __init__(self, config: ToolsAgentConfig, *, encoder: PromptEncoder, setting: str) -> None:
        """Import the tools; `setting` is the config's key. Raises ConfigError."""
        self._config = config
        self._tools = load_tools(config.tools, setting=setting)
        self._format = load_format(config.format, tokenizer=encoder.tokenizer, setting=setting)
        self._decode = encoder.tokenizer.decode
        is_text = self._format.is_text or not self._tools
        self._role = "" if is_text else encoder.result_role(setting=setting)

    def tools(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Schemas of the tools that this row may call, if any."""
        return [tool.schema for tool in self._chosen(prompt)] or None

    async def run(self, episode: Episode) -> None:
        await self.converse(episode, _silence)

    async def converse(self, episode: Episode, answer: Callable[[Episode], Awaitable[str | None]]) -> None:
        """Run the loop; `answer` reads a turn without calls, and returns a text, or None for the end."""
        # Also of an answer without a call, so that means are over all answers.
        episode.metrics.update(tool_calls=0, tool_failures=0)
        arguments = episode.prompt.extra_info.get("tools_kwargs") or {}
        opened: dict[str, OpenTool] = {}
        try:
            for tool in self._chosen(episode.prompt):
                opened[tool.name] = tool.open((arguments.get(tool.name) or {}).get("create_kwargs") or {})
            await self._converse(episode, opened, answer)
        finally:
            await asyncio.gather(*(tool.close() for tool in opened.values()))

    async def _converse(
        self, episode: Episode, tools: dict[str, OpenTool], answer: Callable[[Episode], Awaitable[str | None]]
    ) -> None:
        for number in range(1, self._config.max_turns + 1):
            turn = await episode.generate(stop=self._format.stop)
            # Of a turn that was cut off no call is whole, and nobody answers it.
            if turn.stop_reason in ("length", "context_overflow"):
                return
            calls = self._calls(turn) if self._tools else []
            text = None if calls else await answer(episode)
            if not calls and text is None:
                return
            if number == self._config.max_turns:
                episode.stop_reason = "turn_limit"
                return
            if text is None:
                self._observe(episode, await self._answer(episode, calls, tools))
            elif isinstance(episode.prompt.prompt, str):
                episode.observe(text)
            else:
                episode.observe_messages([{"role": "user", "content": text}])

    def _calls(self, turn: Turn) -> list[ToolCall | ToolError]:
        # With special tokens, some of which mark calls, but without the one that ended the turn.
        own = turn.token_ids[:-1] if turn.stop_reason == "stop" else turn.token_ids
        try:
            return [*self._format.parse(self._decode(own, skip_special_tokens=False))]
        except ToolError as error:
            return [error]

    async def _answer(
        self, episode: Episode, calls: Sequence[ToolCall | ToolError], tools: dict[str, OpenTool]
    ) -> list[str]:
        answered = calls[: self._config.max_parallel_calls]
        results = await asyncio.gather(*(self._result(call, tools) for call in answered))
        left_out = len(calls) - len(answered)
        episode.metrics["tool_calls"] += len(calls)
        episode.metrics["tool_failures"] += left_out + sum(is_failed for _, is_failed in results)
        limit = f"error: a turn may have {self._config.max_parallel_calls} calls, this is one more"
        return [text for text, _ in results] + [limit] * left_out

    async def _result(self, call: ToolCall | ToolError, tools: dict[str, OpenTool]) -> tuple[str, bool]:
        """Text for the model, and whether the call failed."""
        try:
            if isinstance(call, ToolError):
                raise call
            if call.name not in tools:
                raise ToolError(f"there is no tool {call.name!r}, only {', '.join(tools)}")
            return self._shortened(await tools[call.name].call(self._named(call))), False
        except ToolError as error:
            return self._shortened(f"error: {error}"), True

    def _named(self, call: ToolCall) -> dict[str, Any]:
        """The arguments, of which a format may leave the name of the only one out."""
        if set(call.arguments) != {ONLY}:
            return call.arguments
        tool = next(tool for tool in self._tools if tool.name == call.name)
        names = list(tool.schema["function"]["parameters"]["properties"])
        if len(names) != 1:
            raise ToolError(f"{call.name} needs a JSON record with {', '.join(names)}")
        return {names[0]: call.arguments[ONLY]}

    def _observe(self, episode: Episode, results: list[str]) -> None:
        if self._format.is_text:
            episode.observe(" " + "\n".join(results) + "\n")
        else:
            episode.observe_messages([{"role": self._role, "content": result} for result in results])

    def _shortened(self, text: str) -> str:
        limit = self._config.max_result_characters
        if len(text) <= limit:
            return text
        half = limit // 2
        return text[:half] + _SHORTENED.format(left_out=len(text) - 2 * half) + text[len(text) - half :]

    def _chosen(self, prompt: Prompt) -> list[Tool]:
        selection = prompt.extra_info.get("tool_selection")
        return [tool for tool in self._tools if selection is None or tool.name in selection]


async def _silence(episode: Episode) -> None:
    """Nobody answers a turn without calls."""
