"""Tool: a function or class that the model may call, with its schema and its limits."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from transformers.utils import get_json_schema

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import ToolConfig
from slipstream.generators.tools.built_in import BUILT_IN, ToolError
from slipstream.runtime.import_path import find_function

_CLOSE_S = 5.0


class Tool:
    """A tool as it is configured, shared by all answers of a generator."""

    def __init__(self, config: ToolConfig, *, setting: str) -> None:
        """Import the function. Raises ConfigError."""
        self._config = config
        self._function = BUILT_IN.get(config.function) or find_function(config.function, setting=setting)
        # Classes get their arguments at creation, and the model calls their instances.
        self._is_class = inspect.isclass(self._function)
        called = _called(self._function, setting=setting) if self._is_class else self._function
        try:
            inspect.signature(self._function).bind_partial(**config.arguments)
        except TypeError as error:
            raise ConfigError(
                f"{setting}.arguments must fit {config.function!r}, got {config.arguments}: {error}."
            ) from error
        if self._is_class and config.function in BUILT_IN:
            # What it needs must be there at the start, not at the first call.
            self._function(**config.arguments)
        self.name = config.name or (config.function if config.function in BUILT_IN else self._function.__name__)
        self.schema = _schema(called, name=self.name, bound=() if self._is_class else config.arguments, setting=setting)
        self._slots = asyncio.Semaphore(config.max_concurrency)

    def open(self, arguments: dict[str, Any]) -> "OpenTool":
        """The tool of one answer; `arguments` come from its row and precede the configured ones.

        Raises ToolError for those of a built-in tool: a row must not choose an address.
        """
        if arguments and self._config.function in BUILT_IN:
            raise ToolError(f"{self.name} takes its arguments from the settings alone, got {arguments} from the row")
        if not self._is_class:
            return OpenTool(self.name, partial(self._function, **self._config.arguments), self._config, self._slots)
        instance = self._function(**(self._config.arguments | arguments))
        return OpenTool(self.name, instance, self._config, self._slots)


class OpenTool:
    """A tool within one answer. Life: call* -> close."""

    def __init__(self, name: str, function: Callable[..., Any], config: ToolConfig, slots: asyncio.Semaphore) -> None:
        self._name = name
        self._function = function
        self._config = config
        self._slots = slots
        self._num_calls = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the result as text. Raises ToolError, within the tool's time limit."""
        self._num_calls += 1
        if self._config.max_calls is not None and self._num_calls > self._config.max_calls:
            raise ToolError(f"{self._name} may be called {self._config.max_calls} times, this is one more")
        async with self._slots:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    result = await call_either(self._function, **arguments)
            except TimeoutError as error:
                raise ToolError(f"{self._name} must answer within {self._config.timeout_s:g} s, it did not") from error
            except ToolError:
                raise
            except Exception as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    async def close(self) -> None:
        """Close an instance that can be closed."""
        close = getattr(self._function, "close", None)
        if close is not None:
            with suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await call_either(close)


async def call_either(function: Callable[..., Any], *values: Any, **arguments: Any) -> Any:
    """Call a function of the user's, a coroutine function or another one."""
    called = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__):
        return await function(*values, **arguments)
    return await _in_thread(partial(function, *values, **arguments))


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call a function that may wait, without holding up the engine and the other answers.

    A thread of its own, not of a pool: one that never returns must not keep others waiting, nor the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def resolve(result: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def call() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        except SystemExit as error:
            failure = ToolError(f"it called sys.exit({error.code!r})")
        # The loop may be closed by the time a late call returns.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=call, name="tool", daemon=True).start()
    return await answer


def load_tools(configs: list[ToolConfig | str], *, setting: str) -> list[Tool]:
    """Import the tools. Raises ConfigError for one that cannot be imported, and for two of one name."""
    tools = [
        Tool(ToolConfig(function=config) if isinstance(config, str) else config, setting=f"{setting}.tools[{number}]")
        for number, config in enumerate(configs)
    ]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{setting}.tools must have different names, got {', '.join(twice)} more than once: set `name`."
        )
    return tools


def _called(cls: Any, *, setting: str) -> Callable[..., Any]:
    bases = (base for base in cls.__mro__ if "__call__" in vars(base))
    found: Callable[..., Any] | None = next((vars(base)["__call__"] for base in bases), None)
    if found is None:
        raise ConfigError(
            f"{setting}.function must name a class whose instances can be called, got {cls.__qualname__}."
        )
    return found


def _schema(function: Callable[..., Any], *, name: str, bound: Any, setting: str) -> dict[str, Any]:
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{setting}.function must have annotated parameters and a docstring with a line for each under `Args:`, "
            f"got {function.__qualname__}: {error}."
        ) from error
    described = schema["function"]
    described["name"] = name
    parameters = described["parameters"]
    parameters["properties"] = {key: value for key, value in parameters["properties"].items() if key not in bound}
    parameters["required"] = [key for key in parameters.get("required", []) if key not in bound]
    return schema
