from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.configs.base import ConfigError
from slipstream.observe.dashboard.viewed_run import ViewedRun
from slipstream.observe.reader import RunReader
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_finished, write_archive
from tests.memory_store.store import MemoryStore
from tests.recorded_run import append_rows, make_config, make_row, record_run, record_step

STEPS = 5


class Scene(NamedTuple):
    """A run on disk, and what a reader must find in it."""

    phase: str
    source: str = ""
    """Records that hold step 1: store, archive, or none."""
    problem: str = ""
    """Part of the reason why the store is not read."""
    is_readable: bool = True
    """Whether config.yaml can be read."""
    is_live: bool = False
    """Whether a process on this machine holds the run, as its broker does."""


SCENES = {
    "live": Scene("starting", source="store", is_live=True),
    "broker elsewhere": Scene("starting", source="store"),
    "finished": Scene("finished", source="store"),
    "store gone": Scene("finished", problem="it was deleted"),
    "archive only": Scene("finished", source="archive", problem="it was deleted"),
    "damaged": Scene("stopped", problem="must be a run configuration of this version", is_readable=False),
}


def record(folder: Path, *, phase: str, keeps_running: bool) -> EmbeddedRedis:
    """Record a step and a phase in the embedded store of a run."""
    server = EmbeddedRedis(folder / "store", max_memory_mib=64)
    server.start(timeout_s=20)
    with open_run_store(server.url, "mine", timeout_s=5) as store:
        record_step(store)
        store.set_phase(phase)
        if phase == "starting":
            store.report_role("generator-0", {})
    if not keeps_running:
        server.stop()
    return server


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Scene]]:
    name, expected = request.param, SCENES[request.param]
    folder = record_run(tmp_path, steps=STEPS)
    held, server = RunFolder(make_config(tmp_path)), None
    if expected.source == "store":
        server = record(folder, phase=expected.phase, keeps_running=expected.phase == "starting")
    if expected.source == "archive":
        archive = write_archive(folder / "archive", [make_finished("0", steps=[1])])
        LedgerWriter(archive, ManifestWriter(archive)).append(record_step(MemoryStore()).ledger())
    if expected.phase != "finished":
        (folder / "summary.json").unlink()
    if expected.is_live:
        held.lock()
    if name == "damaged":
        (folder / "config.yaml").write_text("nosuch: 1")
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(b'\0\0\0\n{"step": 6, "ver')
    yield folder, expected
    held.unlock()
    if server:
        server.stop()


@pytest.fixture
def reader(scene: tuple[Path, Scene]) -> Iterator[ViewedRun]:
    with ViewedRun(scene[0], run_id="mine") as found:
        yield found


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "store" not in path.parts)
    return {str(path): path.read_bytes() for path in paths}


def test_every_question_about_a_run_is_answered_and_its_folder_stays_unchanged(scene, reader, monkeypatch):
    folder, expected = scene
    before = contents(folder)
    reader.poll()
    view = reader.view()
    assert (view.phase, view.step, view.num_rows, view.is_live) == (expected.phase, STEPS, STEPS, expected.is_live)
    assert (view.status is not None) == (expected.source == "store")
    assert view.max_steps == (40 if expected.is_readable else None)
    assert expected.problem in view.problem
    assert bool(view.problem) == bool(expected.problem)

    # Steps come from the store or else from the archive; versions and events need a store.
    entry = reader.find_step(1)
    assert (entry is not None) == bool(expected.source)
    if entry:
        assert reader.find_step(2) is None
        assert sorted(reader.members(entry)) == ["0-0-0", "0-0-1"]
    checksums = [entry.checksum for entry in reader.versions()]
    assert checksums == (["aaaa", "bbbb"] if expected.source == "store" else [])
    assert reader.events_by_step(reader.rows()) == {}
    assert expected.problem in reader.problem

    # Changes come from the store, or its error is raised.
    if expected.problem:
        with pytest.raises(ConfigError, match=expected.problem):
            reader.changes(after=0)
    else:
        reader.store.append_metrics(make_row(1))
        first = reader.changes(after=0)
        reader.store.append_metrics(make_row(2))
        second = reader.changes(after=first.position)
        assert [[row["step"] for row in each.rows] for each in (first, second)] == [[1], [2]]

    # A list needs the folder alone.
    assert [row["step"] for row in reader.rows()] == list(range(1, STEPS + 1))
    monkeypatch.setattr(reader, "open_store", None)
    line = reader.line()
    assert (line.step, line.mode) == (STEPS, "async" if expected.is_readable else "")
    of_folder = "running" if expected.is_live else "stopped"
    assert line.phase == (of_folder if expected.phase == "starting" else expected.phase)
    reader.steps()
    assert contents(folder) == before


def test_a_reader_follows_a_run_that_is_resumed_with_other_settings(tmp_path):
    folder = record_run(tmp_path, steps=STEPS)
    with ViewedRun(folder, run_id="mine") as reader:
        reader.poll()
        assert reader.view().status is None
        server = record(folder, phase="starting", keeps_running=True)
        held = RunFolder(make_config(tmp_path, learner={"max_steps": 80}))
        held.lock()
        try:
            record_run(tmp_path, steps=0, learner={"max_steps": 80})
            append_rows(folder, make_row(STEPS + 1))
            reader.poll()
            view = reader.view()
            assert (view.step, view.max_steps, view.is_live) == (STEPS + 1, 80, True)
            assert view.status is not None
            assert view.problem == ""
        finally:
            reader.close()
            held.unlock()
            server.stop()


def test_a_server_that_was_started_to_be_read_stops_with_the_reader(tmp_path):
    server = record(record_run(tmp_path, steps=STEPS), phase="finished", keeps_running=False)
    with RunReader(tmp_path / "mine", starts_server=True) as reader:
        assert reader.find_store()
        assert server.is_listening
    assert not server.is_listening


def test_a_reader_that_starts_before_the_broker_has_begun_the_run_reads_it_afterwards(tmp_path):
    folder = record_run(tmp_path, steps=0)
    server = EmbeddedRedis(folder / "store", max_memory_mib=64)
    server.start(timeout_s=20)
    try:
        with RunReader(folder).connect() as reader:
            with pytest.raises(RunConflictError):
                reader.changes(after=0)
            with open_run_store(server.url, "mine", timeout_s=5) as store:
                record_step(store).append_metrics(make_row(1))
            assert [row["step"] for row in reader.changes(after=0).rows] == [1]
    finally:
        server.stop()
