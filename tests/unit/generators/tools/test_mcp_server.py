import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import ToolConfig
from slipstream.generators.errors import ToolError
from slipstream.generators.tools.tool import Tool, load_tools
from tests.cases import cases
from tests.unit.generators.agents.scene import play
from tests.unit.generators.chat import make_chat_tokenizer

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("mcp_tools.py"))
LIMITS = {"hang_s": 2.5}


@pytest.fixture(scope="module")
def tools() -> dict[str, Tool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_KEY", "s3cret")
        patch.setenv("OTHER_KEY", "not given")
        return load({"command": [sys.executable, PROGRAM], "env": {"KEY": "$MY_KEY"}, **LIMITS}, name="t")


def load(arguments: dict[str, Any], **settings: Any) -> dict[str, Tool]:
    found = load_tools([ToolConfig(function="mcp", arguments=arguments, **settings)], setting="agent")
    return {tool.name.removeprefix("t_"): tool for tool in found}


async def call(tools: dict[str, Tool], name: str, **arguments: Any) -> str:
    return await tools[name].open({}).call(arguments)


def test_tools_are_listed_at_the_start_with_their_schemas_and_calls_are_concurrent(tools: dict[str, Tool]):
    assert sorted(tools) == ["add", "die", "hang", "secret", "wait"]
    described = tools["add"].schema["function"]
    assert (described["name"], described["description"]) == ("t_add", "Add two numbers.")
    assert described["parameters"]["required"] == ["left", "right"]

    async def many() -> list[str]:
        return await asyncio.gather(*(call(tools, "wait", seconds=0.5) for _ in range(50)))

    started = time.monotonic()
    assert asyncio.run(many()) == ["waited"] * 50
    assert time.monotonic() - started < 5


def test_wrong_arguments_are_the_models_and_secrets_reach_the_server_by_its_environment_alone(tools: dict[str, Tool]):
    with pytest.raises(ToolError, match="right"):
        asyncio.run(call(tools, "add", left=1))
    assert asyncio.run(call(tools, "add", left=1, right=2)) == "3"
    assert asyncio.run(call(tools, "secret", function="KEY")) == "s3cret"
    assert asyncio.run(call(tools, "secret", function="OTHER_KEY")) == "none"
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            assert not any("s3cret" in word for word in child.cmdline())


@pytest.mark.parametrize("name", ["die", "hang"])
def test_a_server_that_is_lost_is_named_and_started_again(tools: dict[str, Tool], name: str):
    async def calls() -> list[Any]:
        return await asyncio.gather(call(tools, name), call(tools, "wait", seconds=30), return_exceptions=True)

    started = time.monotonic()
    for failure in asyncio.run(calls()):
        assert isinstance(failure, ToolError)
        assert "mcp_tools.py" in str(failure) or "onnection" in str(failure)
    assert time.monotonic() - started < 10
    assert asyncio.run(call(tools, "add", left=1, right=2)) == "3"


def test_a_call_that_is_given_up_before_the_server_is_found_to_hang(tools: dict[str, Tool]):
    found = load({"command": [sys.executable, PROGRAM], **LIMITS}, timeout_s=0.3)

    async def calls() -> str:
        with pytest.raises(ToolError, match=r"hang must answer within 0.3 s, but did not"):
            await call(found, "hang")
        for _ in range(40):
            try:
                return await call(found, "add", left=1, right=2)
            except ToolError:
                await asyncio.sleep(0.2)
        return "never"

    assert asyncio.run(calls()) == "3"


def test_the_model_calls_them():
    agent = {"kind": "tools", "tools": [{"function": "mcp", "arguments": {"command": [sys.executable, PROGRAM]}}]}
    calls = [{"name": "add", "arguments": {"left": 12, "right": 30}}, {"name": "die", "arguments": {}}]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    trajectory = play(agent, [text, "so"], max_length=4000, max_tokens=2000)
    assert "error: " in make_chat_tokenizer("chatml").decode(trajectory.token_ids)
    assert trajectory.metrics["tool_failures"] in (1, 2)  # both calls, if the server died before it added


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_server_by_http(address: str):
    deadline = time.monotonic() + 30
    while True:
        try:
            found = load({"url": address, "headers": {"x-key": "a"}, "only": ["add", "die"], **LIMITS})
            break
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert sorted(found) == ["add", "die"]
    assert asyncio.run(call(found, "add", left=1, right=2)) == "3"
    started = time.monotonic()
    with pytest.raises(ToolError, match=r"the MCP server .http://127.0.0.1"):
        asyncio.run(call(found, "die"))
    with pytest.raises(ToolError, match=r"the MCP server .* cannot be reached"):
        asyncio.run(call(found, "add", left=1, right=2))
    assert time.monotonic() - started < 10


@cases(
    "arguments, complaint",
    ({}, r"requires either a `command` \(a list\) or a `url`, got both or none"),
    ({"command": ["/no/such/program"]}, "an MCP server must start and list its tools within 30 s, got ToolError"),
    ({"command": ["sleep", "9"], "start_timeout_s": 0.5}, "cannot be reached: TimeoutError from 'sleep 9'"),
    ({"command": ["sleep", "9"], "env": {"A": "$NO_SUCH_VARIABLE"}}, "that is set in"),
    ({"command": ["x"], "color": 1}, r"agent.tools\[0\].arguments must fit 'mcp', got command, color"),
)
def test_what_is_no_server_is_refused_at_the_start(arguments: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load(arguments)
