"""`slipstream explain step` and `version`, from a store and from an archive without a store."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.records import make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.base import ConfigError
from slipstream.observe.explain import explain_step, explain_version, find_entry, missing_store, table_of_step
from slipstream.observe.reader import RunReader
from tests.builders import make_finished, write_archive
from tests.memory_store.store import MemoryStore
from tests.recorded_run import append_rows, record_run, record_step


def make_store(*, is_retired: bool = False, clock: Callable[[], float] = lambda: 1.0) -> MemoryStore:
    return record_step(MemoryStore(clock=clock), run="run", is_retired=is_retired)


def read(store: MemoryStore, folder: Path = Path("nowhere")) -> RunReader:
    return RunReader(folder, store=store)


def on_step(reader: RunReader) -> str:
    entry = find_entry(reader, 1)
    members = reader.members(entry)
    cells = [cell for column in table_of_step(entry, members).columns for cell in column.cells]
    return "\n".join([*explain_step(reader, entry, members), *map(str, cells)])


def test_a_step_names_its_trajectories_and_the_weights_after_it():
    printed = on_step(read(make_store()))
    for part in (
        "2 trajectories in 1 groups, learner at version 0",
        "seed 7, settings cfg",
        "version 1 (checksum bbbb)",
        "test: 2 answers to 1 prompts, reward 0.5 (0.5 to 0.5), 6.0 tokens by the model",
        "made by: generator-0 2",
        "lag of the oldest token -> trajectories: 0: 2",
        "0-0-0",
        "0-0-1",
    ):
        assert part in printed


def test_a_step_lists_groups_that_were_reused_weighted_or_mixed_in():
    store = make_store()
    store.roll_back(to_step=0, to_version=0)
    claim = store.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    claim = msgspec.structs.replace(claim, weights=[0.5], reused=[True])
    names = {"version": 0, "seed": 7, "config_hash": "cfg", "mixed_group_ids": ["8", "9"]}
    store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), **names))
    printed = on_step(read(store))
    for line in ("used again: 0\n", "losses weighted: 0 x 0.5\n", "mixed in: 8, 9\n"):
        assert line in printed


def test_a_step_whose_trajectories_are_stored_no_more_is_explained_from_the_ledger():
    assert "2 of them: its tokens are stored no more" in on_step(read(make_store(is_retired=True)))


def test_trajectories_that_left_the_store_are_read_from_the_archive(tmp_path):
    write_archive(tmp_path / "archive", [make_finished("0", steps=[1])])
    assert "2 answers to 1 prompts" in on_step(read(make_store(is_retired=True), tmp_path))


def test_a_run_whose_store_is_gone_is_explained_from_its_folder(tmp_path):
    folder = record_run(tmp_path)
    archive = write_archive(folder / "archive", [make_finished("0", steps=[1])])
    LedgerWriter(archive, ManifestWriter(archive)).append(make_store().ledger())
    with RunReader(folder, starts_server=True) as reader:
        printed = on_step(reader)
        assert "2 answers to 1 prompts" in printed
        assert "weights after it: not known without the store" in printed
        assert (reader.events_by_step(reader.rows()), reader.versions()) == ({}, [])
        assert "it was deleted" in missing_store(reader)
        with pytest.raises(ConfigError, match=r"must be read from the store, .*, got 1\."):
            list(explain_version(reader, 1))


def test_a_version_names_its_step_and_checksum():
    assert [*explain_version(read(make_store()), 1)] == ["version 1: the weights after step 1, checksum bbbb"]


def test_an_event_is_told_with_the_step_in_which_it_happened(tmp_path):
    now = [1000.0]
    store = make_store(clock=lambda: now[0])
    folder = record_run(tmp_path, steps=0)
    rows = [{"step": step, "time_s": 10.0 * step, "times": {"steps": max(1, step - 1)}} for step in range(1, 5)]
    append_rows(folder, *rows)
    # The last step ended at 1000 s of the store's clock; step 1 was made by an earlier process.
    for now[0], text in ((975.0, "died"), (975.5, "restarted"), (1001.0, "later")):
        store.record_event("generator-0", text)
    assert read(store, folder).events_by_step(rows) == {2: ["generator-0: died", "generator-0: restarted"]}


@pytest.mark.parametrize(
    ("explain", "which", "sentence"),
    [
        (find_entry, 2, "step must be one of the ledger's, 1 to 1, got 2"),
        (explain_version, 5, "version must have been published by this run, got 5."),
    ],
)
def test_an_unknown_part_is_refused(explain, which, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        list(explain(read(make_store()), which))
