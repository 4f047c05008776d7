"""McpServer: tools of an MCP server, which is restarted when it dies or hangs."""

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import structlog
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as Description

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import from_environment
from slipstream.generators.errors import ToolError

T = TypeVar("T")
_END_S = 5.0
log = structlog.get_logger(__name__)


class McpServer:
    """A server and its tools. Calls run concurrently, on a separate thread's event loop."""

    def __init__(
        self,
        *,
        command: list[str] | None = None,
        url: str = "",
        env: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        only: list[str] | None = None,
        start_timeout_s: float = 30.0,
        hang_s: float = 5.0,
    ) -> None:
        """Start the server and list its tools. Raises ConfigError.

        `command`: of a stdio server, which inherits only PATH, HOME, etc. `url`: of a streamable HTTP server. `env`,
        `headers`: may contain $NAME for environment variables. `only`: names of tools to offer. `hang_s`: time limit of
        a liveness probe.
        """
        if bool(command) == bool(url):
            raise ConfigError("an mcp tool requires either a `command` (a list) or a `url`, got both or none.")
        self.name = url or " ".join(command or [])[-80:]
        self._command, self._url = command or [], url
        self._env = from_environment(env or {}, found_in="env of an mcp tool")
        self._headers = from_environment(headers or {}, found_in="headers of an mcp tool")
        self._start_timeout_s, self._hang_s = start_timeout_s, hang_s
        self._connection: _Connection | None = None
        try:
            found = self.run(self._list()).result(start_timeout_s + _END_S)
        except Exception as error:
            raise ConfigError(
                f"an MCP server must start and list its tools within {start_timeout_s:g} s, got {_reason(error)} from "
                f"{self.name!r}."
            ) from None
        if missing := set(only or []) - {each.name for each in found}:
            raise ConfigError(f"the MCP server {self.name!r} has no tool {', '.join(sorted(missing))}.")
        self.tools = [McpTool(self, each) for each in found if only is None or each.name in only]

    def run(self, work: Coroutine[Any, Any, T]) -> Any:
        """Run on the separate loop. Returns a concurrent future."""
        return asyncio.run_coroutine_threadsafe(work, _event_loop())

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises ToolError if the server is lost; the next call restarts it."""
        connection = await self._connect()
        call = asyncio.create_task(connection.client.call_tool(name, arguments))
        try:
            while not (await asyncio.wait([call], timeout=self._hang_s / 2))[0]:
                await asyncio.shield(self._probe(connection))
            return call.result()
        except asyncio.CancelledError:
            self._probe(connection)
            raise
        except ToolError:
            raise
        except Exception as error:
            if connection is self._connection:
                await asyncio.shield(self._probe(connection))
            raise ToolError(_reason(error)) from None
        finally:
            call.cancel()

    async def _connect(self) -> "_Connection":
        if self._connection is None:
            self._connection = _Connection(self._open)
        connection = self._connection
        try:
            async with asyncio.timeout(self._start_timeout_s):
                # Other calls may wait for it.
                await asyncio.shield(connection.opened)
        except Exception as error:
            self._drop(connection)
            raise ToolError(f"the MCP server {self.name!r} cannot be reached: {_reason(error)}") from None
        return connection

    def _probe(self, connection: "_Connection") -> "asyncio.Task[None]":
        if connection.probe is None or connection.probe.done():
            connection.probe = asyncio.create_task(self._check(connection))
            # Retrieve the exception even if no call awaits the probe.
            connection.probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        return connection.probe

    async def _check(self, connection: "_Connection") -> None:
        try:
            await asyncio.wait_for(connection.client.list_tools(cache_mode="bypass"), self._hang_s)
        except Exception as error:
            self._drop(connection)
            raise ToolError(f"the MCP server {self.name!r} is lost: {_reason(error)}") from None

    def _drop(self, connection: "_Connection") -> None:
        connection.end.set()
        if connection is self._connection:
            self._connection = None
            log.warning("mcp_server_lost", server=self.name, next="the next call restarts it")

    async def _list(self) -> list[Description]:
        return (await (await self._connect()).client.list_tools(cache_mode="bypass")).tools

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Client]:
        if self._command:
            program, *arguments = self._command
            async with Client(StdioServerParameters(command=program, args=arguments, env=self._env)) as client:
                yield client
        else:
            http = create_mcp_http_client(headers=self._headers)
            async with http, Client(streamable_http_client(self._url, http_client=http)) as client:
                yield client


class _Connection:
    """A session in a task, which must open and close it."""

    def __init__(self, open_client: Callable[[], Any]) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end = asyncio.Event()
        self.probe: asyncio.Task[None] | None = None
        self.client: Client
        self._task = asyncio.create_task(self._hold(open_client))
        _held.add(self._task)
        self._task.add_done_callback(_held.discard)

    async def _hold(self, open_client: Callable[[], Any]) -> None:
        try:
            async with open_client() as self.client:
                self.opened.set_result(None)
                await self.end.wait()
        except Exception as error:
            if not self.opened.done():
                self.opened.set_exception(error)


class McpTool:
    """One tool of an MCP server."""

    def __init__(self, server: McpServer, description: Description) -> None:
        self._server = server
        self.name = description.name
        self.schema = {"description": description.description or "", "parameters": description.input_schema}

    async def __call__(self, **arguments: Any) -> str:
        result = await asyncio.wrap_future(self._server.run(self._server.call(self.name, arguments)))
        parts = (part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content)
        text = "\n".join(parts)
        if result.is_error:
            raise ToolError(text)
        return text


_held: set["asyncio.Task[None]"] = set()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    atexit.register(_end_servers, loop)
    return loop


def _end_servers(loop: asyncio.AbstractEventLoop) -> None:

    async def end() -> None:
        for task in _held:
            task.cancel()
        await asyncio.wait(_held, timeout=_END_S)

    if _held:
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), loop).result(_END_S + 1)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
