import errno
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.observe.loggers.feed import Delivery
from slipstream.observe.loggers.logger import Entry
from tests.fakes import FakeClock

WAIT_S = 10.0


class Recorder:
    """A logger that keeps what it is given, and has `log` and `close` alone."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


class Hanging(Recorder):
    """A logger whose first call does not return before `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.entered.set()
        self.released.wait(WAIT_S)
        super().log(step, metrics)


class Failing(Recorder):
    """A logger that raises an error for some steps."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__()
        self.errors = errors

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step in self.errors:
            raise self.errors[step]
        super().log(step, metrics)


def put(delivery: Delivery, steps: Sequence[int]) -> None:
    for step in steps:
        delivery.put(Entry(step, "log", ({},), cursor=step))


def counts(delivery: Delivery) -> tuple[Any, ...]:
    found = delivery.gauges()
    return tuple(found[name] for name in ("sent", "failed", "dropped", "queued"))


def test_entries_arrive_in_order_and_the_logger_is_closed():
    logger = Recorder()
    delivery = Delivery(lambda: logger, max_queue=10)
    put(delivery, range(1, 6))
    assert delivery.close(timeout_s=WAIT_S)
    assert (logger.steps, logger.is_closed) == ([1, 2, 3, 4, 5], True)
    assert (counts(delivery), delivery.cursor) == ((5, 0, 0, 0), 5)


def test_a_method_that_a_logger_lacks_has_nothing_to_do():
    delivery = Delivery(Recorder, max_queue=10)
    for kind in ("image", "table"):
        delivery.put(Entry(1, kind, ("name", b"")))
    assert delivery.close(timeout_s=WAIT_S)
    assert counts(delivery) == (2, 0, 0, 0)


def test_a_hanging_logger_blocks_nobody_and_the_oldest_entries_are_dropped_and_counted():
    logger, clock = Hanging(), FakeClock(0.0)
    delivery = Delivery(lambda: logger, max_queue=3, clock=clock)
    put(delivery, [1])
    assert logger.entered.wait(WAIT_S)
    put(delivery, range(2, 102))
    assert counts(delivery) == (0, 0, 97, 3)
    clock.now = 60.0
    assert delivery.gauges()["reason"] == "log has taken 60 s so far; 97 entries dropped, 0 failed"
    assert not delivery.close(timeout_s=0.01), "it still hangs"
    logger.released.set()
    assert delivery.close(timeout_s=WAIT_S)
    assert logger.steps == [1, 99, 100, 101]


@pytest.mark.parametrize(
    ("errors", "kept"),
    [
        (dict.fromkeys(range(4, 11), OSError(errno.ENOSPC, "No space left on device")), [1, 2, 3]),
        ({1: SystemExit(1)}, list(range(2, 11))),
    ],
    ids=["full disk", "ends its thread"],
)
def test_a_logger_that_fails_costs_entries_and_nothing_else(errors, kept):
    logger = Failing(errors)
    delivery = Delivery(lambda: logger, max_queue=100)
    put(delivery, range(1, 11))
    assert delivery.close(timeout_s=WAIT_S)
    assert (logger.steps, logger.is_closed) == (kept, True)
    assert counts(delivery) == (len(kept), len(errors), 0, 0)


def test_a_logger_that_cannot_start_is_known_by_its_error():
    def refuse() -> Recorder:
        raise RuntimeError("no network")

    delivery = Delivery(refuse, max_queue=2)
    assert delivery.close(timeout_s=WAIT_S)
    assert str(delivery.error) == "no network"
