"""One logger of one run of one process, whose rows are in a file."""

import errno
import importlib.util
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from slipstream.broker.archiver import Archiver
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.cluster import observers
from slipstream.cluster.observers import Observers, check_observers, role_of
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import LoggingConfig
from slipstream.configs.buffer import ArchiveConfig
from slipstream.observe.loggers import __main__ as logger_main
from slipstream.observe.loggers import feed as feed_module
from slipstream.observe.loggers.__main__ import LoggerProcess
from slipstream.observe.loggers.feed import SAMPLE_COLUMNS, Bookmark, Delivery, Feed
from slipstream.observe.loggers.logger import Entry, LoggedRun, as_text, make_logger, numbers_of
from slipstream.observe.reader import RunReader
from tests.builders import make_run
from tests.cases import cases
from tests.contract.stores import checkpoint, claim, commit, make_ready, open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore
from tests.recorded_run import record_run
from tests.runs import until

WAIT_S = 10.0
ACCUMULATOR = "tensorboard.backend.event_processing.event_accumulator"


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


def test_each_row_comes_once_with_a_position_and_those_that_the_store_dropped_are_counted(store, make_feed):
    feed, kept = make_feed(FakeClock(0.0))
    for step in (1, 2):
        store.append_metrics(row(step))
    feed.turn()
    store.append_metrics(row(3))
    feed.turn()
    feed.turn()
    assert [(entry.step, entry.cursor) for entry in kept.of("log")] == [(1, 0), (2, 2), (3, 3)]
    for step in range(4, 1014):
        store.append_metrics({"step": step})
    feed.turn()
    assert feed.num_lost == 10


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
    name, columns, (answer, _) = kept.of("table")[0].arguments
    assert (name, columns, len(answer)) == ("samples", SAMPLE_COLUMNS, len(SAMPLE_COLUMNS))


def test_numbers_of_a_row_are_flat_and_a_bookmark_outlives_the_process_and_a_file_that_was_cut_short(tmp_path: Path):
    times = {"steps": 3, "step_s": 0.5, "roles": [{"role": "learner", "count": 1, "shares": {"waiting": 0.25}}]}
    found = numbers_of(row(4, **{"lag/histogram": {"0": 12}, "times": times}))
    assert not {"step", "lag/histogram"} & found.keys()
    assert found["times/learner/waiting"] == 0.25
    path = tmp_path / "loggers" / "logger-wandb.json"
    first = Bookmark(path)
    first.save(17)
    assert (Bookmark(path).cursor, Bookmark(path).id) == (17, first.id)
    path.write_text('{"id": "a')
    assert Bookmark(path).cursor == 0


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


def test_a_method_that_a_logger_lacks_has_nothing_to_do_and_one_that_cannot_start_is_known_by_its_error():
    delivery = Delivery(Recorder, max_queue=10)
    for kind in ("image", "table"):
        delivery.put(Entry(1, kind, ("name", b"")))
    assert delivery.close(timeout_s=WAIT_S)
    assert counts(delivery) == (2, 0, 0, 0)

    def refuse() -> Recorder:
        raise RuntimeError("no network")

    delivery = Delivery(refuse, max_queue=2)
    assert delivery.close(timeout_s=WAIT_S)
    assert str(delivery.error) == "no network"


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


LOGGER = """
class Kept:
    def __init__(self, run):
        self.file = (run.folder / "kept.txt").open("a")

    def log(self, step, metrics):
        print(step, file=self.file, flush=True)
"""


class Scene:
    def __init__(self, folder: Path) -> None:
        (folder / "kept_logger.py").write_text(LOGGER)
        self.name = f"{folder}/kept_logger.py:Kept"
        serial = {"mode": "serial", "weights": {"transport": "memory"}}
        logging = {"backends": [self.name]}
        self.folder = record_run(folder, steps=0, logging=logging, **serial)

    def write(self, *steps: int) -> None:
        rows = [json.dumps({"step": step, "time_s": step, "learner/reward_mean": 0.5}) + "\n" for step in steps]
        (self.folder / "metrics.jsonl").write_text("".join(rows))

    def start(self) -> LoggerProcess:
        return LoggerProcess(self.name, RunReader(self.folder))

    def kept(self) -> list[int]:
        file = self.folder / "kept.txt"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(logger_main, "_MAX_QUEUE", 2)
    return Scene(tmp_path)


def test_a_logger_that_starts_before_a_resume_cuts_its_rows_gets_the_steps_that_come_again(scene):
    scene.write(*range(1, 7))
    process = scene.start()
    process.turn()
    assert process.close()
    process = scene.start()
    process.turn()
    scene.write(1, 2)
    process.turn()
    scene.write(1, 2, 3)
    process.turn()
    until(lambda: scene.kept() == [1, 2, 3, 4, 5, 6, 3], what="the steps that come again")
    process.turn()
    scene.write(1, 2, 3, 4)
    # Its process ends without taking leave.
    again = scene.start()
    again.turn()
    until(lambda: scene.kept() == [1, 2, 3, 4, 5, 6, 3, 4], what="the step after them")
    assert (process.close(), again.close()) == (True, True)


def test_the_rows_before_a_logger_was_named_do_not_overflow_its_queue(scene):
    scene.write(*range(1, 50))
    process = scene.start()
    process.turn()
    assert process.close()
    assert scene.kept() == list(range(1, 50))


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(header))


def test_what_is_logged_is_what_tensorboard_reads_and_markup_of_a_model_stays_text(tmp_path):
    accumulator = pytest.importorskip(ACCUMULATOR, reason="the package tensorboard is not installed")
    logger = make_logger("tensorboard", LoggedRun("mine", "mine-1", tmp_path, {}, 1), {})
    # Steps that are trained again replace those before.
    for step, value in ((1, 0.125), (2, 0.25), (3, 0.5), (2, 0.75)):
        logger.log(step, {"learner/reward_mean": value, "lag/max": 1.0})
    logger.image(2, "curve", png(30, 20))
    logger.table(2, "samples", ("step", "answer"), [[2, "<b>x</b> **1**\n|"]])
    logger.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("learner/reward_mean")] == [(1, 0.125), (2, 0.75)]
    (image,) = found.Images("curve")
    assert (image.width, image.height, image.step) == (30, 20, 2)
    (table,) = found.Tensors("samples")
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert cells == ["step", "answer", "2", as_text("<b>x</b> **1**\n|")]
    assert [each.size for each in table.tensor_proto.tensor_shape.dim] == [2, 2]
    shown = as_text("<script>alert(1)</script> [a](b) *c* `d`\n# e")
    assert not set("<>[]*`#\n") & set(shown.replace("&#", "").replace("<br>", ""))


OWN = """
class Mine:
    def __init__(self, run, *, color="red"):
        self.log = print

    log = print


class Mute:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@cases(
    "settings, sentence",
    ({"logging": {"backends": ["wandb"]}}, "`pip install wandb`"),
    ({"logging": {"backends": ["mlflow"]}}, "must name trackio, wandb, tensorboard or a class as"),
    ({"logging": {"backends": ["nowhere:Mine"]}}, "logging.backends must name a module that can be imported"),
    ({"logging": {"backends": ["OWN:Nine"]}}, "Did you mean 'Mine'"),
    ({"logging": {"backends": ["OWN:Mute"]}}, "with a method log"),
    ({"logging": {"backends": {"OWN:Mine": {"size": 1}}}}, "the arguments in logging.backends must fit"),
)
def test_a_logger_that_cannot_work_is_refused_before_anything_starts(settings, sentence, own, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(observers, "find_spec", lambda each: None if each == "wandb" else find(each))
    filled = make_run(**json.loads(json.dumps(settings).replace("OWN", str(own))))
    with pytest.raises(ConfigError, match="log") as refusal:
        check_observers(filled)
    assert sentence in str(refusal.value)


def test_a_logger_of_ones_own_is_accepted_and_one_named_twice_or_a_port_that_is_taken_is_refused(own):
    check_observers(make_run(logging={"backends": {f"{own}:Mine": {"color": "blue"}}}))
    assert role_of("my/own.py:Mine") == "logger-my-own.py-Mine"
    with pytest.raises(msgspec.ValidationError, match="name each once"):
        make_run(logging={"backends": ["wandb", "wandb"]})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.prometheus_port must be free .* got {port}"):
            check_observers(make_run(metrics={"prometheus_port": port}))


def test_an_observer_that_keeps_dying_is_given_up_and_ends_nothing(tmp_path):
    run = make_run(name="nowhere", runs_dir=str(tmp_path), logging={"backends": ["tensorboard"]})
    found = Observers(run, logs=tmp_path)
    found.start()
    (process,) = found._processes
    # It finds no run folder, which is its own verdict.
    until(lambda: not process.is_running, what="the observer's end", timeout_s=60.0)
    (sentence,) = found.poll()
    assert "the run continues without logger-tensorboard" in sentence
    assert found.poll() == []
    assert found.stop() == []
