"""slipstream_harness: runs verifiers environments (0.4) in this process, with a chat loop instead of a program.

A verifiers plugin, found by name. Model calls carry the answer's key in a header, so that answers share one client.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from contextvars import ContextVar
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["SlipstreamHarness"]

TOOL_TIMEOUT_S = 8.0
_KEY_HEADER = "x-slipstream-key"
_key: ContextVar[str] = ContextVar("key")


class SlipstreamHarness(vf.Harness[vf.HarnessConfig]):
    """Chat loop with tools. No runtime has to start per answer."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    clients: dict[str, AsyncOpenAI] = {}

    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **_: Any,
    ) -> Any:
        """Chat until the model answers without a tool call, its context is full, or the environment stops it."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages += given
        if endpoint not in self.clients:
            self.clients[endpoint] = AsyncOpenAI(base_url=endpoint, api_key="of each session", max_retries=0)
        client = self.clients[endpoint].with_options(api_key=secret, default_headers={_KEY_HEADER: _key.get()})
        ask: Any = client.chat.completions.create
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await self._connect(mcp_urls, stack)
            more = {"tools": tools} if tools else {}
            while True:
                try:
                    message = (await ask(model=ctx.model, messages=messages, **more)).choices[0].message
                except APIStatusError as error:
                    # A full context and a stop condition are normal ends.
                    if trace.stop_condition is None and "context_length_exceeded" not in str(error):
                        raise
                    break
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = await self._call(call, dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _connect(self, urls: dict[str, str], stack: AsyncExitStack) -> tuple[list, dict, dict]:
        tools, dispatch, servers = list[Any](), dict[str, Any](), dict[str, Any]()
        for name, url in urls.items():
            spec = {"mcpServers": {name: {"url": url, "timeout": self.config.tool_timeout}}}
            try:
                found = await asyncio.wait_for(connect_mcp(spec, stack, set(dispatch)), TOOL_TIMEOUT_S)
            except TimeoutError:
                raise vf.ToolsetError(f"the tools {name!r} at {url} must answer within {TOOL_TIMEOUT_S:g} s") from None
            tools += found[0]
            dispatch |= found[1]
            servers |= found[2]
        return tools, dispatch, servers

    async def _call(self, call: Any, dispatch: dict, servers: dict) -> Any:
        name = call.function.name
        if name not in dispatch:
            return f"error: unknown tool {name!r}, available: {', '.join(dispatch)}"
        try:
            arguments = json.loads(call.function.arguments or "{}")
            return await asyncio.wait_for(call_mcp(servers, dispatch, name, arguments), self.config.tool_timeout)
        except json.JSONDecodeError as error:
            return f"error: arguments must be JSON: {error}"
        except TimeoutError:
            return f"error: the tool {name!r} must answer within {self.config.tool_timeout:g} s, but did not"


class VerifiersEnvironment:
    """A verifiers environment. A row has its task in `extra_info.task`, or its number in `extra_info.index`."""

    def __init__(self, ident: str, arguments: dict[str, Any], *, max_turns: int) -> None:
        harness = {"id": "slipstream_harness", "tool_timeout": TOOL_TIMEOUT_S}
        seat = {"harness": harness, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        config = {"taskset": {"id": ident, **arguments}, "agent": seat}
        self._env = load_environment(resolve_env_config(config))
        self._stack = AsyncExitStack()
        self._tasks: list[Any] = []

    async def open(self) -> None:
        await self._stack.enter_async_context(self._env.serving())

    def tasks(self, number: int) -> list[dict[str, Any]]:
        return [task.data.model_dump(mode="json", exclude_none=True) for task in islice(self._env.taskset, number)]

    async def play(self, row: dict[str, Any], model: dict[str, str]) -> dict[str, Any]:
        """Run one episode. Raises RuntimeError if it has errors."""
        _key.set(model["api_key"])
        client = vf.EvalClientConfig(base_url=model["base_url"], api_key_var="SLIPSTREAM_NO_KEY")
        ctx = ModelContext(client=client, model=model["model"], sampling=vf.SamplingConfig())
        task_type, extra = type(self._env.taskset).task_type(), row["extra_info"]
        if isinstance(extra.get("task"), str | dict):
            data = json.loads(extra["task"]) if isinstance(extra["task"], str) else extra["task"]
            task = task_type(task_type.data_type().model_validate(data), self._env.config.taskset.task)
        else:
            self._tasks = self._tasks or list(self._env.taskset)
            task = self._tasks[extra["index"]]
        (slot,) = self._env.slots(task)
        episode = await self._env.run_slot(slot, ctx)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
        parts, metrics = dict[str, float](), dict[str, float]()
        for trace in (each for each in episode.traces if each.agent.trainable):
            parts |= {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
            metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        reward = sum(parts.values())
        return {"reward": reward, "parts": parts, "metrics": metrics, "is_correct": reward >= 1}
