"""python -m slipstream.observe.loggers LOGGER [RUN]: pass the metrics of a run to a logger until SIGTERM.

Consumes: metrics rows and answers from the run's store, or its metrics.jsonl.
Produces: calls to the logger; gauges of the role `logger-NAME`; `loggers/` in the run folder.
Invariant: no role sends to it or waits for it, so a logger may hang or crash without affecting the run.
"""

import os
import socket
import sys
import time
from functools import partial

import structlog

from slipstream.buffer.errors import ReplayBufferError, RunConflictError, StoreUnavailableError
from slipstream.buffer.redis.run_store import COMMAND_TIMEOUT_S
from slipstream.cluster.observers import LOGGER_TIMEOUT_S, LOGGERS, check_loggers, role_of
from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import read_config
from slipstream.observe.loggers.feed import Bookmark, Delivery, Feed
from slipstream.observe.loggers.logger import LoggedRun, make_logger
from slipstream.observe.reader import RunReader
from slipstream.runtime.command_line import TRY_AGAIN, exit_after_help, exit_with_error, fail_cleanly
from slipstream.runtime.credentials import TOKEN_VARIABLE, without_secrets
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

_POLL_EVERY_S = 1.0
_REPORT_EVERY_S = 5.0
_REPORT_TIME_S = 1.0
"""Part of `LOGGER_TIMEOUT_S` reserved for the last report."""
_NICENESS = 10
_MAX_QUEUE = 1000
"""Entries queued for a slow logger, besides rows from before its start; then the oldest is dropped."""

log = structlog.get_logger(__name__)


@fail_cleanly(ReplayBufferError)
def main(arguments: list[str]) -> None:
    """Run until SIGTERM or SIGINT, then deliver the queued entries."""
    exit_after_help(arguments, __doc__)
    if not arguments or "=" in arguments[0]:
        raise ConfigError(f"the first word must name a logger: {', '.join(LOGGERS)} or module:Class.")
    name, *words = arguments
    is_stopping = on_stop_signal(lambda: None)
    # Third-party code must not get the run's secret.
    os.environ.pop(TOKEN_VARIABLE, None)
    os.nice(_NICENESS)
    configure_logs(role_of(name))
    folder = find_run(words, command="loggers")
    run = read_config(folder)
    check_loggers(run)
    reader = RunReader(folder, timeout_s=run.broker.store_timeout_s, answer_timeout_s=COMMAND_TIMEOUT_S)
    with reader.connect():
        process = LoggerProcess(name, reader)
        while not is_stopping():
            process.turn()
            time.sleep(_POLL_EVERY_S)
        is_whole = process.close()
    if not is_whole:
        # The logger's thread would keep this process alive.
        os._exit(TRY_AGAIN)


class LoggerProcess:
    """One logger of one run. Life: turn* -> close."""

    def __init__(self, name: str, reader: RunReader) -> None:
        self._name = name
        self._reader = reader
        self._run = reader.config
        self._role = role_of(name)
        self._bookmark = Bookmark(reader.folder / "loggers" / f"{self._role}.json")
        self._bookmark.save(self._bookmark.cursor)
        self._delivery: Delivery | None = None
        self._feed: Feed | None = None
        self._report_at = 0.0

    def turn(self, *, is_last: bool = False) -> None:
        """Pass on new rows and report. Exits if the logger cannot start."""
        try:
            if self._feed is None:
                self._start()
            if self._feed:
                self._feed.turn(is_last=is_last)
            if time.monotonic() >= self._report_at:
                self._report_at = time.monotonic() + _REPORT_EVERY_S
                self._report("ready")
        # The store is down, or the broker has not begun the run yet.
        except (StoreUnavailableError, RunConflictError) as error:
            log.info("waiting", reason=str(error))
        if self._delivery is None:
            return
        if error := self._delivery.error:
            if isinstance(error, ConfigError | TypeError):
                raise ConfigError(f"the arguments in logging.backends must fit {self._name!r}: {error}.") from None
            exit_with_error(f"logger {self._name!r} cannot start: {type(error).__name__}: {error}", code=TRY_AGAIN)
        self._keep(self._delivery.cursor or self._bookmark.cursor)

    def _start(self) -> None:
        """Build the logger once the first row, and its step, is known."""
        run, changes = self._run, self._reader.changes(after=self._bookmark.cursor)
        if not changes.rows:
            # A resume may have truncated the file: move back to log repeated steps.
            self._keep(changes.position)
            return
        cursor = self._bookmark.cursor
        settings, identity = without_secrets(to_plain(run)), f"{run.name}-{self._bookmark.id}"
        logged = LoggedRun(run.name, identity, self._reader.folder.resolve(), settings, changes.rows[0]["step"])
        make = partial(make_logger, self._name, logged, run.logging.arguments.get(self._name, {}))
        # Make room for the backlog, which arrives in one read.
        self._delivery = Delivery(make, max_queue=_MAX_QUEUE + len(changes.rows))
        every = run.logging.samples_every_steps
        self._feed = Feed(self._reader, self._delivery, samples_every=every, cursor=cursor)

    def _keep(self, cursor: int) -> None:
        if cursor != self._bookmark.cursor:
            self._bookmark.save(cursor)

    def close(self) -> bool:
        """Pass on the last rows; return whether the logger closed in time."""
        ends_at = time.monotonic() + LOGGER_TIMEOUT_S - _REPORT_TIME_S
        self.turn(is_last=True)
        is_whole, gauges = True, {}
        if self._delivery:
            is_whole = self._delivery.close(timeout_s=max(0.0, ends_at - time.monotonic()))
            gauges = self._delivery.gauges()
            self._keep(self._delivery.cursor or self._bookmark.cursor)
        log.info("closed" if is_whole else "did_not_close", **gauges)
        try:
            self._report("gone")
        except ReplayBufferError as error:
            log.info("not_reported", reason=str(error))
        return is_whole

    def _report(self, state: str) -> None:
        where = {"role": "logger", "state": state, "host": socket.gethostname(), "pid": os.getpid()}
        gauges = self._delivery.gauges() if self._delivery else {"reason": "waiting for the first step"}
        lost = {"lost": self._feed.num_lost if self._feed else 0}
        if self._reader.has_store:
            self._reader.store.report_role(self._role, where | gauges | lost)


if __name__ == "__main__":
    main(sys.argv[1:])
