import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from slipstream.broker.archiver import Archiver
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.configs.broker import LoggingConfig
from slipstream.configs.buffer import ArchiveConfig
from slipstream.observe.loggers import feed as feed_module
from slipstream.observe.loggers.feed import SAMPLE_COLUMNS, Bookmark, Delivery, Feed
from slipstream.observe.loggers.logger import Entry, numbers_of
from slipstream.observe.reader import RunReader
from tests.contract.stores import checkpoint, claim, commit, make_ready, open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore
from tests.recorded_run import record_run


class Kept:
    """In place of a Delivery: keeps the entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "time_s": float(step), "learner/reward_mean": 0.5, "lag/mean": 1.0, "lag/max": 2.0} | more


@pytest.fixture
def store() -> MemoryStore:
    found = MemoryStore(clock=FakeClock(1000.0))
    open_run(found)
    return found


@pytest.fixture
def make_feed(tmp_path: Path, store: MemoryStore) -> Callable[..., tuple[Feed, Kept]]:
    folder = record_run(tmp_path, steps=0)

    def make(clock: FakeClock, *, cursor: int = 0, of: MemoryStore = store, **config: Any) -> tuple[Feed, Kept]:
        kept, reader = Kept(), RunReader(folder, store=of)
        every = LoggingConfig(**config).samples_every_steps
        return Feed(reader, kept, samples_every=every, cursor=cursor, clock=clock), kept

    return make


def test_each_row_comes_once_and_the_last_one_carries_the_position(store, make_feed):
    feed, kept = make_feed(FakeClock(0.0))
    for step in (1, 2):
        store.append_metrics(row(step))
    feed.turn()
    store.append_metrics(row(3))
    feed.turn()
    feed.turn()
    assert [(entry.step, entry.cursor) for entry in kept.of("log")] == [(1, 0), (2, 2), (3, 3)]


def test_a_restarted_logger_gets_only_what_it_lacks_and_a_curve_of_all(store, make_feed):
    for step in (1, 2, 3):
        store.append_metrics(row(step))
    clock = FakeClock(0.0)
    feed, kept = make_feed(clock, cursor=2)
    clock.now = 61.0
    feed.turn()
    assert [entry.step for entry in kept.of("log")] == [3]
    (curve,) = kept.of("image")
    assert curve.arguments[0] == "curve"
    assert curve.arguments[1].startswith(b"\x89PNG")
    assert len(feed._curve._rows) == 3
    store.append_metrics(row(4))
    clock.now = 119.0
    feed.turn()
    assert len(kept.of("image")) == 1, "at most so often"
    for _ in range(2):
        feed.turn(is_last=True)
        assert len(kept.of("image")) == 2, "at the end, unless nothing is new"


def test_a_store_that_goes_away_before_the_samples_leaves_no_hole_in_the_curve(store, make_feed, monkeypatch):
    feed, kept = make_feed(FakeClock(0.0), samples_every_steps=1)
    store.append_metrics(row(1))
    gone = StoreUnavailableError("gone")
    with monkeypatch.context() as patch:
        patch.setattr(feed_module, "read_samples", lambda *_, **__: (_ for _ in ()).throw(gone))
        with pytest.raises(StoreUnavailableError):
            feed.turn()
    feed.turn(is_last=True)
    assert [entry.step for entry in kept.of("log")] == [entry.step for entry in kept.of("image")] == [1]


def test_a_table_holds_the_answers_of_a_step_as_they_are(store, make_feed, monkeypatch):
    monkeypatch.setattr(feed_module, "_NUM_SAMPLES", 1)
    make_ready(store, 2)
    commit(store, claim(store, 1, 2))
    store.append_metrics(row(1))
    feed, kept = make_feed(FakeClock(0.0), samples_every_steps=1)
    feed.turn()
    (table,) = kept.of("table")
    name, columns, (answer,) = table.arguments
    assert (table.step, name, columns, len(answer)) == (1, "samples", SAMPLE_COLUMNS, len(SAMPLE_COLUMNS))


def test_samples_of_a_step_that_left_the_store_come_from_the_archive(make_feed):
    store = MemoryStore(clock=FakeClock(1000.0))
    open_run(store, keeps_finished=True)
    make_ready(store, 4)
    feed, kept = make_feed(FakeClock(0.0), of=store, samples_every_steps=1)
    with closing(Archiver(store, feed._reader.folder / "archive", ArchiveConfig())) as archiver:
        for step in (1, 2):
            commit(store, claim(store, step, 2))
            checkpoint(store, step)
            archiver.flush()
            # The second time, the archive has grown since it was opened.
            store.append_metrics(row(step))
            feed.turn()
    assert store.ledger() == []
    assert [(table.step, len(table.arguments[2])) for table in kept.of("table")] == [(1, 2), (2, 2)]


def test_rows_that_the_store_dropped_are_counted(store, make_feed):
    feed, _ = make_feed(FakeClock(0.0))
    for step in range(1, 1011):
        store.append_metrics({"step": step})
    feed.turn()
    assert feed.num_lost == 10


def test_numbers_of_a_row_are_flat():
    times = {"steps": 3, "step_s": 0.5, "roles": [{"role": "learner", "count": 1, "shares": {"waiting": 0.25}}]}
    found = numbers_of(row(4, **{"lag/histogram": {"0": 12}, "times": times}))
    assert not {"step", "lag/histogram"} & found.keys()
    assert found["times/learner/waiting"] == 0.25


def test_a_bookmark_outlives_the_process_and_a_file_that_was_cut_short(tmp_path: Path):
    path = tmp_path / "loggers" / "logger-wandb.json"
    first = Bookmark(path)
    first.save(17)
    assert (Bookmark(path).cursor, Bookmark(path).id) == (17, first.id)
    path.write_text('{"id": "a')
    assert Bookmark(path).cursor == 0


WAIT_S = 10.0


class Recorder:
    """A logger that keeps what it is given, has `log` and `close` alone, and raises an error for some steps."""

    def __init__(self, errors: Mapping[int, BaseException] = MappingProxyType({})) -> None:
        self.errors = errors
        self.steps: list[int] = []
        self.is_closed = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step in self.errors:
            raise self.errors[step]
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


def put(delivery: Delivery, steps: Sequence[int]) -> None:
    for step in steps:
        delivery.put(Entry(step, "log", ({},), cursor=step))


def counts(delivery: Delivery) -> tuple[Any, ...]:
    found = delivery.gauges()
    return tuple(found[name] for name in ("sent", "failed", "dropped", "queued"))


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
        ({}, list(range(1, 11))),
    ],
    ids=["full disk", "ends its thread", "sound"],
)
def test_entries_arrive_in_order_and_a_logger_that_fails_costs_entries_and_nothing_else(errors, kept):
    logger = Recorder(errors)
    delivery = Delivery(lambda: logger, max_queue=100)
    put(delivery, range(1, 11))
    assert delivery.close(timeout_s=WAIT_S)
    assert (logger.steps, logger.is_closed) == (kept, True)
    assert (counts(delivery), delivery.cursor) == ((len(kept), len(errors), 0, 0), 10)


def test_a_logger_that_cannot_start_is_known_by_its_error():
    def refuse() -> Recorder:
        raise RuntimeError("no network")

    delivery = Delivery(refuse, max_queue=2)
    assert delivery.close(timeout_s=WAIT_S)
    assert str(delivery.error) == "no network"
