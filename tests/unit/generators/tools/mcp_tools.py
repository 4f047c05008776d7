"""An MCP server for tests: python mcp_tools.py [PORT]."""

import asyncio
import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("tests", log_level="ERROR")


@server.tool()
async def add(left: int, right: int) -> str:
    """Add two numbers."""
    return str(left + right)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait without holding up other calls."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
async def hang() -> str:
    """Hold up everything."""
    time.sleep(60)  # noqa: ASYNC251
    return "late"


@server.tool()
async def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
async def secret(function: str) -> str:
    """Show a variable of the environment; the parameter's name is a trap."""
    return os.environ.get(function, "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
