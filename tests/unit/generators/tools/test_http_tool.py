"""An address as a tool, at a real server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.generators import ToolConfig
from slipstream.generators.errors import ToolError
from slipstream.generators.tools.tool import Tool
from tests.unit.generators.servers import Handler, serve

CITY = {"type": "string", "description": "Name of the city."}
DAYS = {"type": "integer", "description": "How many."}


class Weather(Handler):
    """Replies with the request, or with the next status in `failures`."""

    failures: list[int] = []

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        status = self.failures.pop() if self.failures else 200
        seen = {"path": self.path, "key": self.headers.get("X-Key"), "body": body, "method": self.command}
        text = json.dumps(seen) if status == 200 and "big" not in self.path else "x" * 5000
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Location", "http://127.0.0.1:9/")
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve(Weather) as found:
        yield found


def make(url: str, **arguments: Any) -> Tool:
    given = {"url": url, "description": "Look the weather up.", "parameters": {"city": CITY, "days": DAYS}, **arguments}
    config = ToolConfig(function="http", name="weather", arguments=given)
    return Tool(config, setting="agent.tools[0]")


def call(tool: Tool, **arguments: Any) -> Any:
    return asyncio.run(tool.open({}).call(arguments))


def test_its_schema_is_that_of_the_settings():
    described = make("http://127.0.0.1:9", required=["city"]).schema["function"]
    assert (described["name"], described["description"]) == ("weather", "Look the weather up.")
    properties = {"city": CITY, "days": DAYS}
    assert described["parameters"] == {"type": "object", "properties": properties, "required": ["city"]}


def test_arguments_go_into_path_query_or_body(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEATHER_KEY", "s3cret")
    tool = make(address + "/{city}/now", headers={"X-Key": "$WEATHER_KEY"})
    found = json.loads(call(tool, city="Köln/../?x", days=3))
    assert (found["path"], found["key"], found["method"]) == ("/K%C3%B6ln%2F..%2F%3Fx/now?days=3", "s3cret", "GET")
    found = json.loads(call(make(address + "/now", method="POST"), city="Bonn", days=3))
    assert (found["path"], json.loads(found["body"])) == ("/now", {"city": "Bonn", "days": 3})
    found = json.loads(call(make(address + "/now?unit=C", required=["city"]), city="Bonn"))
    assert found["path"] in ("/now?unit=C&city=Bonn", "/now?city=Bonn")
    Weather.failures[:] = [503]
    assert call(make(address), city="a", days=1), "a passing failure is retried"


@pytest.mark.parametrize(
    ("failures", "settings", "arguments", "complaint"),
    [
        ([404], {}, {"city": "a", "days": 1}, "the server answered 404: xxx"),
        ([302], {}, {"city": "a", "days": 1}, "the server answered 302: xxx"),
        ([503, 503], {}, {"city": "a", "days": 1}, "the server answered 503: xxx"),
        ([503], {"method": "POST"}, {"city": "a", "days": 1}, "the server answered 503: xxx"),
        ([], {"max_bytes": 100}, {"city": "big", "days": 1}, "must answer with at most 100 bytes, but sent more"),
        ([], {}, {"city": "..", "days": 1}, r"a parameter in the address must be a name, got '\.\.'"),
        ([], {}, {"city": "a"}, "the parameter days is required"),
        ([], {}, {"city": "a", "days": 1, "host": "x"}, "unknown parameter host, available:"),
        ([], {"url": "http://127.0.0.1:9/{city}"}, {"city": "a", "days": 1}, "the server did not answer: ConnectError"),
    ],
)
def test_failures_are_named(address: str, failures: list, settings: dict, arguments: dict, complaint: str):
    Weather.failures[:] = failures
    with pytest.raises(ToolError, match=complaint):
        call(make(**{"url": address + "/{city}", **settings}), **arguments)
    assert not Weather.failures


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"url": "ftp://a"}, r"must have a url http\(s\)://host/"),
        ({"url": "http://{city}/a"}, r"must have a url http\(s\)://host/"),
        ({"url": "http://user:pass@host/a"}, r"must have a url http\(s\)://host/"),
        ({"url": "http://a/{town}"}, "must describe all required parameters, .* without town"),
        ({"url": "http://a/{city}", "required": []}, "including those in its url, .* without city"),
        ({"url": "http://a", "headers": {"k": "$NO_SUCH_VARIABLE"}}, "that is set in .* 'NO_SUCH_VARIABLE'"),
        ({"url": "http://a", "color": 1}, r"agent.tools\[0\].arguments must fit 'http', got url, .*color"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(arguments: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        make(**arguments)
