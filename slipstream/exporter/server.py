"""MetricsServer: answers Prometheus, on a loopback address anybody of this machine, elsewhere holders of the token."""

import hmac
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer

from slipstream.broker.transport.endpoints import is_loopback
from slipstream.configs.base import ConfigError

_TIMEOUT_S = 10.0
"""Longest wait for a request, so that one that never comes holds no thread for ever."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves `/metrics` in threads of its own. Life: set* -> close; `set` may be called by one thread."""

    def __init__(self, host: str, port: int, *, token: str) -> None:
        """Listen; port 0 chooses one. An empty `token` asks for none. Raises ConfigError."""
        self._metrics: list[Metric] = []
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        application = guarded(make_wsgi_app(registry), token=token, is_local=ip_address(host).is_loopback)
        try:
            self._server = make_server(host, port, application, _ServerV6 if ":" in host else _Server, _Handler)
        except OSError as error:
            raise ConfigError(
                f"exporter.port must be free at {host}, got {port}: {error.strerror}; choose another."
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def set(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return what is answered now; for the registry."""
        return self._metrics

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def guarded(application: Application, *, token: str, is_local: bool) -> Application:
    """Let through GET of /metrics alone; with the token, or by a local name: other pages in a browser are strangers."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = _refusal(environ, token=token, is_local=is_local)
        if refusal is None:
            return application(environ, start_response)
        start_response(refusal, [("Content-Type", "text/plain"), ("Content-Length", "0")])
        return []

    return answer


def _refusal(environ: dict[str, Any], *, token: str, is_local: bool) -> str | None:
    given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        return "401 Unauthorized"
    if is_local and not is_loopback(_host_of(environ)):
        return "400 Bad Request"
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return "405 Method Not Allowed"
    return None if environ["PATH_INFO"] == "/metrics" else "404 Not Found"


def _host_of(environ: Mapping[str, Any]) -> str:
    """Name by which the server was asked, without its port; empty for one that cannot be."""
    with suppress(ValueError):
        return urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname or ""
    return ""


class _Server(ThreadingWSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a request every few seconds is no event."""
