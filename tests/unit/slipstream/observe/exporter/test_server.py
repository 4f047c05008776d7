import http.client
from collections.abc import Iterator

import pytest

from slipstream.configs.base import ConfigError
from slipstream.observe.exporter.__main__ import MetricsServer
from slipstream.observe.exporter.families import unreachable

TOKEN = "a token of thirty-two characters"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    found = MetricsServer("127.0.0.1", 0, token=TOKEN)
    found.set(unreachable("mine"))
    yield found
    found.close()


def ask(port: int, path: str = "/metrics", *, method: str = "GET", at: str = "127.0.0.1", **headers: str):
    """(status, body)."""
    connection = http.client.HTTPConnection(at, port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_only_the_token_opens_it_and_only_for_metrics(server):
    given = {"Authorization": f"Bearer {TOKEN}"}
    status, body = ask(server.port, **given)
    assert status == 200
    assert 'slipstream_up{run="mine"} 0.0' in body
    assert ask(server.port)[0] == 401
    assert ask(server.port, Authorization=f"Bearer {TOKEN[:-1]}")[0] == 401
    assert ask(server.port, "/", **given)[0] == 404
    assert ask(server.port, "/metrics/../../etc/passwd", **given)[0] == 404
    assert ask(server.port, method="POST", **given)[0] == 405


def test_a_port_in_use_is_one_sentence(server):
    with pytest.raises(ConfigError, match=f"metrics.prometheus_port must be free at 127.0.0.1, got {server.port}"):
        MetricsServer("127.0.0.1", server.port, token="")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("127.0.0.1:9400", 200), ("localhost", 200), ("127.0.0.9", 200), ("[::1]:1", 200), ("[::1]", 200)],
        *[("evil.example:{port}", 400), ("127.evil.example:{port}", 400), ("127.0.0.1.evil.example:{port}", 400)],
    ],
)
def test_on_a_loopback_address_a_foreign_name_is_a_page_in_a_browser(host, status):
    server = MetricsServer("127.0.0.1", 0, token="")
    try:
        assert ask(server.port, Host=host.format(port=server.port))[0] == status
    finally:
        server.close()
