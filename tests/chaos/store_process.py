"""StoreProcess: the embedded Redis server as something to be hit."""

import signal
from contextlib import suppress

import psutil

from slipstream.buffer.redis.embedded import EmbeddedRedis
from tests.chaos.warm_process import last_line


class StoreProcess:
    """One server at a time; `start` again after its end, on the same data."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server
        self._process: psutil.Process | None = None

    @property
    def pid(self) -> int:
        """Of the newest server."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative = the signal it died of."""
        return 0 if self._process is None else self.wait(timeout_s=0)

    @property
    def last_line(self) -> str:
        """Of its log."""
        return last_line(self._server.log_path)

    def start(self) -> None:
        """Block until it has loaded its data and answers. Raises StoreUnavailableError."""
        self._server.start()
        assert self._server.pid is not None
        self._process = psutil.Process(self._server.pid)

    def send(self, number: signal.Signals) -> None:
        """A signal; nothing happens to a server that is gone."""
        with suppress(psutil.NoSuchProcess):
            if self._process:
                self._process.send_signal(number)

    def wait(self, *, timeout_s: float) -> int | None:
        """Block until it ends, at most `timeout_s`; returns the exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s) or 0
        except psutil.TimeoutExpired:
            return None
