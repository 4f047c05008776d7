"""python -m slipstream.exporter [RUN]: serve the metrics of a run to Prometheus, and send its recorded steps as spans.

Consumes: the run's store; profile/trace.json.gz of its folder.
Produces: `/metrics` at `exporter.port`; spans at `exporter.otlp_endpoint`.
Invariant: a scrape reads nothing but memory: it costs neither the store nor a role anything.
"""

import os
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import structlog
from prometheus_client.core import Metric

from slipstream.broker.credentials import find_token
from slipstream.broker.status.run_status import StatusReader
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S, open_run_store, store_url
from slipstream.buffer.store import Store
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig, read_config
from slipstream.exporter.families import Context, metrics_of, unreachable
from slipstream.exporter.server import MetricsServer
from slipstream.exporter.spans import send_trace
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

_POLL_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 15.0
"""Time for spans that are on their way when the exporter ends."""
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
    config = run.exporter
    if not config.is_wanted:
        raise ConfigError("exporter.port or exporter.otlp_endpoint must be set for the exporter, got neither.")
    server = None
    if config.port is not None:
        server = MetricsServer(config.host, config.port, token=find_token(run) if config.is_open else "")
        log.info("serving", address=f"http://{config.host}:{server.port}/metrics", needs_token=config.is_open)
    url = store_url(run, folder)
    timeout_s = run.buffer.retry_timeout_s
    with (
        open_run_store(url, run.name, timeout_s=timeout_s, answer_timeout_s=COMMAND_TIMEOUT_S) as store,
        closing(Outbox(folder, run)) as outbox,
    ):
        reader = Reader(store, run)
        while not is_stopping():
            if server:
                server.set(reader.read())
            outbox.poll()
            time.sleep(_POLL_EVERY_S)
    if server:
        server.close()


class Reader:
    """Reads the state of a run as metrics."""

    def __init__(self, store: Store, run: RunConfig) -> None:
        self._store = store
        self._run = run
        self._reader = StatusReader(store, run)
        self._accepted = -1
        self._arrived_at = time.monotonic()

    def read(self) -> list[Metric]:
        """Return the metrics of now; without an answer of the store, that alone."""
        try:
            status, roles = self._reader.read(), self._store.roles()
        except ReplayBufferError:
            return unreachable(self._run.name)
        if status.counts.accepted != self._accepted:
            self._accepted, self._arrived_at = status.counts.accepted, time.monotonic()
        return metrics_of(status, Context(self._run, roles, time.monotonic() - self._arrived_at))


class Outbox:
    """Sends each recorded trace once, on a thread: a slow receiver makes no metric old. Life: poll* -> close."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self._path = folder / "profile" / "trace.json.gz"
        self._run = run
        self._sent_at = 0
        self._sending: threading.Thread | None = None

    def poll(self) -> None:
        """Begin to send the trace of the run's folder if it is new, and the one before has been sent."""
        endpoint = self._run.exporter.otlp_endpoint
        if not endpoint or not self._path.is_file() or self._path.stat().st_mtime_ns == self._sent_at:
            return
        if self._sending and self._sending.is_alive():
            return
        self._sent_at = self._path.stat().st_mtime_ns
        self._sending = threading.Thread(target=self._send, args=(endpoint,), name="spans", daemon=True)
        self._sending.start()

    def _send(self, endpoint: str) -> None:
        """Send the trace; an error is a line of the log, and not tried again."""
        try:
            num_spans, is_whole = send_trace(self._path, run=self._run.name, endpoint=endpoint)
            log.info("spans_sent" if is_whole else "spans_refused", spans=num_spans, endpoint=endpoint)
        # Also what the transport of the library raises: the next trace may find its receiver again.
        except Exception as error:
            log.warning("spans_not_sent", error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Send what was recorded of the last steps: it is written as the learner ends."""
        ends_at = time.monotonic() + _CLOSE_TIMEOUT_S
        for _ in range(2):
            self.poll()
            if self._sending:
                self._sending.join(max(0.0, ends_at - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1:])
