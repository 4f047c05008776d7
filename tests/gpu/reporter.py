"""pytest plugin of `make gpu-check`: reports each test as it is collected, starts, and ends, one line of JSON each."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

EVENTS_VARIABLE = "SLIPSTREAM_TEST_EVENTS"
"""File that the lines are appended to."""


def limit_s(item: pytest.Item) -> float:
    """The test's own limit, or that of the command line or pyproject.toml, seconds."""
    marker = item.get_closest_marker("timeout")
    common = item.config.getoption("timeout") or item.config.getini("timeout")
    return float(marker.args[0] if marker else common or 300)


def _report(**event: object) -> None:
    with Path(os.environ[EVENTS_VARIABLE]).open("a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        is_skipped = item.get_closest_marker("skip") or any(True in mark.args for mark in item.iter_markers("skipif"))
        is_alone = not is_skipped and item.get_closest_marker("own_process") is not None
        _report(event="collected", test=item.nodeid, limit_s=limit_s(item), own_process=is_alone)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _report(event="broken", test=report.nodeid, message=_last_line(report.longreprtext))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _report(event="start", test=item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # Now, because a process that a later test ends prints no summary.
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
    # A failed teardown comes after a passed call, and is the result.
    if report.failed or report.skipped or report.when == "call":
        message = report.longrepr[2] if isinstance(report.longrepr, tuple) else _last_line(report.longreprtext)
        _report(event="result", test=report.nodeid, outcome=report.outcome, message=message)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _report(event="end", test=nodeid)


def _last_line(text: str) -> str:
    """The line of a failure's report that states the error."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return (errors or text.strip().splitlines() or [""])[0]
