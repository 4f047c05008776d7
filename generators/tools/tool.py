"""Tool: a function or class that the model may call, with its schema and limits."""

import ast
import asyncio
import inspect
import json
import operator
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import structlog
from transformers.utils import get_json_schema

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import ToolConfig, from_environment
from slipstream.generators.errors import ToolError
from slipstream.generators.sandbox import Limits, LocalSandbox, RemoteSandbox, Sandbox, SandboxError
from slipstream.generators.tools.search import Search
from slipstream.runtime.import_path import find_function
from slipstream.runtime.process import run_in_thread

# --- arithmetic ------------------------------------------------------------------------------------------------------
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION = 200
_LARGEST_POWER = 1000
_LARGEST_NUMBER = 10**300


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as (3 + 4) * 12.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"an expression must have at most {_LONGEST_EXPRESSION} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, OverflowError, ZeroDivisionError, RecursionError) as error:
        raise ToolError(f"{expression!r} cannot be calculated: {error}") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    """Raises ValueError for anything but numbers and operators."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and not (abs(second) <= _LARGEST_POWER and abs(first) <= _LARGEST_POWER):
                raise ValueError(f"bases and exponents must be at most {_LARGEST_POWER}")
            result = _OPERATORS[type(op)](first, second)
            if isinstance(result, complex) or abs(result) > _LARGEST_NUMBER:
                raise ValueError("the result must be a real number with at most 300 digits")
            return result
    raise ValueError("only numbers, parentheses, and + - * / // % ** are allowed")


# --- code ------------------------------------------------------------------------------------------------------------
@cache
def _sandbox(address: str) -> Sandbox:
    """Cached, because the local sandbox's probe takes seconds. Raises ConfigError."""
    return RemoteSandbox(address) if address else LocalSandbox()


class Python:
    """Runs Python code in a local or remote sandbox. Runs share no state."""

    def __init__(self, *, address: str = "", time_s: float = 5.0, memory_mib: int = 512) -> None:
        """`address`: service with SandboxFusion's API; empty = local sandbox. Raises ConfigError."""
        self._sandbox = _sandbox(address)
        self._limits = Limits(time_s=time_s, cpu_s=max(1, round(time_s)), memory_mib=memory_mib)

    async def __call__(self, code: str) -> str:
        """Run Python code and read what it prints.

        Args:
            code: A whole program; only what it prints is shown.
        """
        try:
            found = await self._sandbox.run(code, limits=self._limits)
        except SandboxError as error:
            raise ToolError(str(error)) from error
        if found.status == "timeout":
            raise ToolError(f"the code must end within {self._limits.time_s:g} s, but did not")
        if found.status == "output":
            raise ToolError(f"the code must print at most {self._limits.output_bytes} bytes, but printed more")
        if found.status == "error":
            raise ToolError(found.stderr.strip().rpartition("\n")[2] or f"exit code {found.exit_code}")
        return found.stdout.strip() or "(nothing was printed)"


# --- HTTP -----------------------------------------------------------------------------------------------------------
_PLACE = re.compile(r"\{(\w+)\}")
_PASSING = (429, 502, 503, 504)
"""HTTP statuses worth a retry."""
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
_FIRST_PAUSE_S = 0.2
_MAX_SHOWN = 200


class HttpTool:
    """Sends its arguments to a URL and returns the response. Does not follow redirects."""

    def __init__(
        self,
        *,
        url: str,
        description: str,
        method: str = "GET",
        parameters: dict[str, dict[str, Any]] | None = None,
        required: list[str] | None = None,
        headers: dict[str, str] | None = None,
        retries: int = 1,
        max_bytes: int = 2**16,
    ) -> None:
        """`url`: may contain {name} for parameters in path or query. `parameters`: JSON schema of each. Those outside
        the URL are sent as query, or as JSON body with POST, PUT, and PATCH. `required`: default all. `headers`: may
        contain $NAME for environment variables. Raises ConfigError.
        """
        self._url, self._method = url, method.upper()
        self._parameters = parameters or {}
        self._required = list(self._parameters) if required is None else required
        parts = urlsplit(url)
        in_url = set(_PLACE.findall(url))
        if parts.scheme not in ("http", "https") or not parts.netloc or "{" in parts.netloc or "@" in parts.netloc:
            raise ConfigError(f"an http tool must have a url http(s)://host/..., without user and {{}}, got {url!r}.")
        if missing := (in_url | set(self._required)) - set(self._parameters) | (in_url - set(self._required)):
            raise ConfigError(
                f"an http tool must describe all required parameters, including those in its url, got {url!r} without "
                f"{', '.join(sorted(missing))}."
            )
        self._headers = from_environment(headers or {}, found_in="headers of an http tool")
        self._retries, self._max_bytes = retries, max_bytes
        # `Tool` limits number and time of calls.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        shape = {"type": "object", "properties": self._parameters, "required": self._required}
        self.schema = {"description": description, "parameters": shape}

    async def __call__(self, **arguments: Any) -> str:
        if unknown := set(arguments) - set(self._parameters):
            raise ToolError(f"unknown parameter {', '.join(sorted(unknown))}, available: {list(self._parameters)}")
        if missing := [name for name in self._required if name not in arguments]:
            raise ToolError(f"the parameter {missing[0]} is required")
        for number in range(self._retries + 1):
            is_last = number == self._retries or self._method not in _REPEATABLE
            try:
                return await self._send(arguments)
            except httpx.HTTPStatusError as error:
                if is_last or error.response.status_code not in _PASSING:
                    text = error.response.text[:_MAX_SHOWN].strip()
                    raise ToolError(f"the server answered {error.response.status_code}: {text}") from None
            except httpx.HTTPError as error:
                if is_last:
                    raise ToolError(f"the server did not answer: {type(error).__name__}: {error}") from None
            await asyncio.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _send(self, arguments: dict[str, Any]) -> str:
        rest = dict(arguments)
        url = _PLACE.sub(lambda found: _quoted(rest.pop(found.group(1), "")), self._url)
        has_body = self._method in ("POST", "PUT", "PATCH")
        given: dict[str, Any] = {"json": rest} if has_body else {"params": rest} if rest else {}
        async with self._client.stream(self._method, url, headers=self._headers, **given) as answer:
            body = bytearray()
            async for data in answer.aiter_bytes():
                body += data
                if len(body) > self._max_bytes:
                    raise ToolError(f"the server must answer with at most {self._max_bytes} bytes, but sent more")
            text = body.decode(answer.encoding or "utf-8", errors="replace")
            if not answer.is_success:
                shown = httpx.Response(answer.status_code, text=text, request=answer.request)
                raise httpx.HTTPStatusError("", request=answer.request, response=shown)
            return text


def _quoted(value: Any) -> str:
    """Quote a value, so that it cannot change a URL's path."""
    text = str(value)
    if text in (".", "..", ""):
        raise ToolError(f"a parameter in the address must be a name, got {text!r}")
    return quote(text, safe="")


# --- configured tools -------------------------------------------------------------------------------------------------
_CLOSE_S = 5.0
_MOST_THREADS = 2
"""Maximum threads, as a multiple of `max_concurrency`. Threads of hanging calls cannot be killed."""
log = structlog.get_logger(__name__)


BUILT_IN: dict[str, Any] = {"calculator": calculator, "python": Python, "search": Search, "http": HttpTool}
"""Tools that a config names without a module, like `mcp`: all tools of a server."""


class Tool:
    """A configured tool, shared by all answers of a generator."""

    def __init__(self, config: ToolConfig, *, setting: str, shared: Any = None) -> None:
        """`shared`: object with a schema, instead of the function. Raises ConfigError."""
        self._config = config
        self._is_built_in = shared is not None or config.function in BUILT_IN
        self._slots = asyncio.Semaphore(config.max_concurrency)
        path = config.function
        function: Any = shared or BUILT_IN.get(path) or find_function(path, setting=f"{setting}.function")
        # The model calls instances of a class. One of a built-in class serves all answers. It is created now, so that
        # missing requirements fail at startup.
        is_class = inspect.isclass(function)
        called = function
        if is_class:
            called = next((vars(base)["__call__"] for base in function.__mro__ if "__call__" in vars(base)), None)
            if called is None:
                must = "name a class with callable instances"
                raise ConfigError(f"{setting}.function must {must}, got {function.__qualname__}.")
        if shared is None:
            check_arguments(function, config, setting=setting)
            if is_class and self._is_built_in:
                shared = function(**config.arguments)
        self._shared = shared or (None if is_class else partial(function, **config.arguments))
        self._class = function
        self.name = config.name or (config.function if self._is_built_in else function.__name__)
        self.schema: dict[str, Any]
        if described := getattr(shared, "schema", None):
            self.schema = {"type": "function", "function": {"name": self.name, **described}}
        else:
            self.schema = _schema(called, name=self.name, bound=() if is_class else config.arguments, setting=setting)

    def open(self, arguments: dict[str, Any]) -> "OpenTool":
        """Create the tool for one answer. `arguments`: the row's, which override the configured ones.

        Raises ToolError for those of a built-in tool, because rows must not choose addresses.
        """
        if arguments and self._is_built_in:
            raise ToolError(f"{self.name} takes arguments only from the settings, got {arguments} from the row")
        called = self._shared or self._class(**(self._config.arguments | arguments))
        return OpenTool(self.name, called, self._config, self._slots)


class OpenTool:
    """A tool within one answer. Life cycle: call* -> close."""

    def __init__(self, name: str, function: Callable[..., Any], config: ToolConfig, slots: asyncio.Semaphore) -> None:
        self._name = name
        self._function = function
        self._config = config
        self._slots = slots
        self._num_calls = 0
        self._thread = f"tool {name}"

    async def call(self, arguments: dict[str, Any]) -> str:
        """Result as text, within the time limit. Raises ToolError."""
        self._num_calls += 1
        if self._config.max_calls is not None and self._num_calls > self._config.max_calls:
            raise ToolError(f"{self._name} may be called {self._config.max_calls} times, this call exceeds the limit")
        if isinstance(self._function, partial) and (bound := set(arguments) & set(self._function.keywords)):
            raise ToolError(f"{self._name} has no parameter {', '.join(sorted(bound))}")
        async with self._slots:
            if _count_threads(self._thread) >= _MOST_THREADS * self._config.max_concurrency:
                raise ToolError(f"{self._name} accepts no more calls: too many earlier calls have not returned")
            limit = asyncio.timeout(self._config.timeout_s)
            try:
                async with limit:
                    result = await call_either(partial(self._function, **arguments), thread=self._thread)
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            except ToolError:
                raise
            except Exception as error:
                if not limit.expired():
                    raise ToolError(f"{type(error).__name__}: {error}") from error
                if threads := _count_threads(self._thread):
                    log.warning("tool_still_runs", tool=self._name, threads=threads)
                raise ToolError(f"{self._name} must answer within {self._config.timeout_s:g} s, but did not") from error
        # JSON may contain lone surrogates, which cannot be tokenized.
        return text.encode(errors="replace").decode()

    async def close(self) -> None:
        if close := getattr(self._function, "close", None):
            with suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await call_either(close)


async def call_either(function: Callable[[], Any], *, thread: str = "user") -> Any:
    """Await a coroutine function, or call another function in a thread."""
    called: Any = function
    while isinstance(called, partial):
        called = called.func
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__):
        return await function()
    try:
        return await asyncio.wrap_future(run_in_thread(function, name=thread))
    except SystemExit as error:
        raise ToolError(f"it called sys.exit({error.code!r})") from None


def _count_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def load_tools(configs: list[ToolConfig | str], *, setting: str) -> list[Tool]:
    """Import the tools and start MCP servers. Raises ConfigError."""
    tools: list[Tool] = []
    for number, each in enumerate(configs):
        config, key = ToolConfig(function=each) if isinstance(each, str) else each, f"{setting}.tools[{number}]"
        tools += _tools_of_a_server(config, setting=key) if config.function == "mcp" else [Tool(config, setting=key)]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{setting}.tools must have unique names, got {', '.join(twice)} more than once: set `name`.")
    return tools


def _tools_of_a_server(config: ToolConfig, *, setting: str) -> list[Tool]:
    # Local import, because it takes a second.
    try:
        from slipstream.generators.tools.mcp_server import McpServer
    except ImportError as error:
        raise ConfigError(f"{setting} requires the package mcp: pip install 'mcp>=2,<3' ({error}).") from error

    check_arguments(McpServer, config, setting=setting)
    prefix = f"{config.name}_" if config.name else ""
    return [
        Tool(msgspec.structs.replace(config, name=prefix + tool.name), setting=setting, shared=tool)
        for tool in McpServer(**config.arguments).tools
    ]


def check_arguments(function: Callable[..., Any], config: ToolConfig, *, setting: str) -> None:
    """Raises ConfigError unless the function accepts the configured arguments."""
    try:
        signature = inspect.signature(function)
        # The model gives functions the remaining arguments, and the row gives them to user classes.
        is_whole = inspect.isclass(function) and ":" not in config.function
        (signature.bind if is_whole else signature.bind_partial)(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"{setting}.arguments must fit {config.function!r}, got {', '.join(config.arguments) or 'none'}: {error}."
        ) from error


def _schema(function: Callable[..., Any], *, name: str, bound: Any, setting: str) -> dict[str, Any]:
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{setting}.function must have annotated parameters, and a docstring that describes each under `Args:`, "
            f"got {function.__qualname__}: {error}."
        ) from error
    schema["function"]["name"] = name
    parameters = schema["function"]["parameters"]
    parameters["properties"] = {key: value for key, value in parameters["properties"].items() if key not in bound}
    parameters["required"] = [key for key in parameters.get("required", []) if key not in bound]
    return schema
