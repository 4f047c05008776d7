"""python -m slipstream.observe.loggers LOGGER [RUN]: pass the metrics of a run on to a logger, until SIGTERM.

Consumes: rows of metrics and answers in the run's store, or its metrics.jsonl.
Produces: calls of the logger; the gauges of the role `logger-NAME`; `loggers/` in the run folder.
Invariant: no role sends it anything or waits for it, so that the logger may do what it likes.
"""

import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

import structlog

from slipstream.buffer.errors import ReplayBufferError, RunConflictError, StoreUnavailableError
from slipstream.cluster.observers import LOGGERS, check_loggers, role_of
from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import RunConfig, read_config
from slipstream.observe.loggers.feed import Bookmark, Delivery, Feed
from slipstream.observe.loggers.logger import LoggedRun, make_logger
from slipstream.observe.loggers.sources import RowSource, open_rows
from slipstream.runtime.command_line import TRY_AGAIN, exit_after_help, exit_with_error, fail_cleanly
from slipstream.runtime.credentials import TOKEN_VARIABLE, without_secrets
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import on_stop_signal
from slipstream.runtime.run_folder import find_run

_POLL_EVERY_S = 1.0
_REPORT_EVERY_S = 5.0
_REPORT_TIME_S = 1.0
"""Part of `logging.close_timeout_s` for the last report."""
_NICENESS = 10
"""Below the roles, which share the machine's cores with it."""

log = structlog.get_logger(__name__)


@fail_cleanly(ReplayBufferError)
def main(arguments: list[str]) -> None:
    """Run until SIGTERM or SIGINT, then until the logger has taken what waits for it."""
    exit_after_help(arguments, __doc__)
    if not arguments or "=" in arguments[0]:
        raise ConfigError(f"the first word must name a logger: {', '.join(LOGGERS)} or module:Class.")
    name, *words = arguments
    is_stopping = on_stop_signal(lambda: None)
    # A logger is not the run's code: it has no use for the run's secret.
    os.environ.pop(TOKEN_VARIABLE, None)
    os.nice(_NICENESS)
    configure_logs(role_of(name))
    folder = find_run(words, command="loggers")
    run = read_config(folder)
    check_loggers(run)
    with open_rows(run, folder, timeout_s=run.buffer.retry_timeout_s) as source:
        passing = Passing(name, run, folder, source)
        while not is_stopping():
            passing.turn()
            time.sleep(_POLL_EVERY_S)
        is_whole = passing.close()
    if not is_whole:
        # Its thread would keep this process alive.
        os._exit(TRY_AGAIN)


class Passing:
    """One logger of one run. Life: turn* -> close."""

    def __init__(self, name: str, run: RunConfig, folder: Path, source: RowSource) -> None:
        self._name = name
        self._run = run
        self._folder = folder
        self._source = source
        self._role = role_of(name)
        self._bookmark = Bookmark(folder / "loggers" / f"{self._role}.json")
        self._bookmark.save(self._bookmark.cursor)
        self._delivery: Delivery | None = None
        self._feed: Feed | None = None
        self._report_at = 0.0

    def turn(self, *, is_last: bool = False) -> None:
        """Read what is new, pass it on, report. An outage of the store passes by; ends the process without a logger."""
        try:
            if self._feed is None:
                self._start()
            if self._feed:
                self._feed.turn(is_last=is_last)
            if time.monotonic() >= self._report_at:
                self._report_at = time.monotonic() + _REPORT_EVERY_S
                self._report("ready")
        # The store is away, or does not know the run before the broker has begun it.
        except (StoreUnavailableError, RunConflictError) as error:
            log.info("waiting", reason=str(error))
        if self._delivery is None:
            return
        if self._delivery.error:
            self._give_up(self._delivery.error)
        self._keep(self._delivery.cursor or self._bookmark.cursor)

    def _start(self) -> None:
        """Build the logger once there is a row, with whose step it begins."""
        run, news = self._run, self._source.read(self._bookmark.cursor)
        if not news.rows:
            # A resume has cut the rows: those that come again are told apart from the ones that were passed on.
            self._keep(news.cursor)
            return
        cursor = self._bookmark.cursor
        settings, identity = without_secrets(to_plain(run)), f"{run.name}-{self._bookmark.id}"
        logged = LoggedRun(run.name, identity, self._folder.resolve(), settings, news.rows[0]["step"])
        options = run.logging.options.get(self._name, {})
        make = partial(make_logger, self._name, logged, options)
        # The rows of before wait in any case: they come at once, and say nothing of how fast the logger is.
        self._delivery = Delivery(make, max_queue=run.logging.max_queue + len(news.rows))
        self._feed = Feed(self._source, self._delivery, config=run.logging, name=run.name, cursor=cursor)

    def _keep(self, cursor: int) -> None:
        if cursor != self._bookmark.cursor:
            self._bookmark.save(cursor)

    def close(self) -> bool:
        """Pass on the last rows and close the logger within its time; return whether it did."""
        ends_at = time.monotonic() + self._run.logging.close_timeout_s - _REPORT_TIME_S
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
        self._source.report(self._role, where | gauges | {"lost": self._feed.num_lost if self._feed else 0})

    def _give_up(self, error: Exception | SystemExit) -> None:
        if isinstance(error, ConfigError | TypeError):
            raise ConfigError(f"logging.options must fit logger {self._name!r}: {error}.") from None
        exit_with_error(f"logger {self._name!r} cannot start: {type(error).__name__}: {error}", code=TRY_AGAIN)


if __name__ == "__main__":
    main(sys.argv[1:])
