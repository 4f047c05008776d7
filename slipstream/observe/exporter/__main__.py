"""python -m slipstream.observe.exporter [RUN]: serve a run's metrics to Prometheus and send its steps as spans.

Consumes: the run's store; profile/trace.json.gz in its folder.
Produces: `/metrics` at `metrics.prometheus_port`; spans at `metrics.otlp_endpoint`.
Invariant: a scrape reads memory only, so it does not load the store or a role.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.exporter.families import Context, metrics_of, unreachable
from slipstream.observe.exporter.spans import send_trace
from slipstream.observe.reader import RunReader
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.credentials import find_token, host_of, is_equal, is_loopback
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

_TIMEOUT_S = 10.0
"""Request limit: idle connections hold no thread."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves `/metrics` on its own threads. Life: set* -> close."""

    def __init__(self, host: str, port: int, *, token: str) -> None:
        """Listen on `port`; 0 chooses a free one. An empty `token` disables authentication. Raises ConfigError."""
        self._metrics: list[Metric] = []
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        application = guarded(make_wsgi_app(registry), token=token, is_local=ip_address(host).is_loopback)
        try:
            self._server = make_server(host, port, application, ThreadingWSGIServer, _Handler)
        except OSError as error:
            raise ConfigError(
                f"metrics.prometheus_port must be free at {host}, got {port}: {error.strerror}; choose another."
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def set(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def guarded(application: Application, *, token: str, is_local: bool) -> Application:
    """Admit only GET /metrics with the token and, locally, a local host name (DNS rebinding)."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = _refusal(environ, token=token, is_local=is_local)
        if refusal is None:
            return application(environ, start_response)
        start_response(refusal, [("Content-Type", "text/plain"), ("Content-Length", "0")])
        return []

    return answer


def _refusal(environ: dict[str, Any], *, token: str, is_local: bool) -> str | None:
    given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
    if token and not is_equal(given, token):
        return "401 Unauthorized"
    if is_local and not is_loopback(host_of(environ.get("HTTP_HOST", ""))):
        return "400 Bad Request"
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return "405 Method Not Allowed"
    return None if environ["PATH_INFO"] == "/metrics" else "404 Not Found"


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes arrive every few seconds."""


_POLL_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 15.0
"""Limit for sending the last spans when the exporter stops."""
_NICENESS = 10

log = structlog.get_logger(__name__)


@fail_cleanly(ReplayBufferError)
def main(arguments: list[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    exit_after_help(arguments, __doc__)
    is_stopping = on_stop_signal(lambda: None)
    os.nice(_NICENESS)
    configure_logs("exporter")
    folder = find_run(arguments, command="exporter")
    run = read_config(folder)
    config = run.metrics
    if not config.is_wanted:
        raise ConfigError("metrics.prometheus_port or metrics.otlp_endpoint must be set for the exporter, got neither.")
    server = None
    if config.prometheus_port is not None:
        host, token = run.metrics_host, find_token(run) if run.cluster.is_open else ""
        server = MetricsServer(host, config.prometheus_port, token=token)
        log.info("serving", address=f"http://{host}:{server.port}/metrics", needs_token=bool(token))
    reader = RunReader(folder, timeout_s=run.broker.store_timeout_s, answer_timeout_s=COMMAND_TIMEOUT_S)
    with reader.connect(), closing(Outbox(folder, run)) as outbox:
        scraped = RunMetrics(reader)
        while not is_stopping():
            if server:
                server.set(scraped.read())
            outbox.poll()
            time.sleep(_POLL_EVERY_S)
    if server:
        server.close()


class RunMetrics:
    """Reads the state of a run as Prometheus metrics."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._accepted, self._checkpoint = -1, ""
        self._arrived_at = self._saved_at = time.monotonic()

    def read(self) -> list[Metric]:
        """Current metrics; only `up 0` while the store does not answer."""
        run = self._reader.config
        try:
            status, roles = self._reader.status(), self._reader.store.roles()
        except ReplayBufferError:
            return unreachable(run.name)
        if status.counts.accepted != self._accepted:
            self._accepted, self._arrived_at = status.counts.accepted, time.monotonic()
        if status.checkpoint and status.checkpoint.name != self._checkpoint:
            self._checkpoint, self._saved_at = status.checkpoint.name, time.monotonic()
        now, free = time.monotonic(), shutil.disk_usage(self._reader.folder).free
        return metrics_of(status, Context(run, roles, now - self._arrived_at, now - self._saved_at, free))


class Outbox:
    """Sends each recorded trace once, on its own thread. Life: poll* -> close."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self._path = folder / "profile" / "trace.json.gz"
        self._run = run
        self._sent_at = 0
        self._sending: threading.Thread | None = None

    def poll(self) -> None:
        endpoint = self._run.metrics.otlp_endpoint
        if not endpoint or not self._path.is_file() or self._path.stat().st_mtime_ns == self._sent_at:
            return
        if self._sending and self._sending.is_alive():
            return
        self._sent_at = self._path.stat().st_mtime_ns
        self._sending = threading.Thread(target=self._send, args=(endpoint,), name="spans", daemon=True)
        self._sending.start()

    def _send(self, endpoint: str) -> None:
        try:
            num_spans, is_whole = send_trace(self._path, run=self._run.name, endpoint=endpoint)
            log.info("spans_sent" if is_whole else "spans_refused", spans=num_spans, endpoint=endpoint)
        except Exception as error:  # the transport may raise anything
            log.warning("spans_not_sent", error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Send the trace that the learner writes when it ends."""
        ends_at = time.monotonic() + _CLOSE_TIMEOUT_S
        for _ in range(2):
            self.poll()
            if self._sending:
                self._sending.join(max(0.0, ends_at - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1:])
