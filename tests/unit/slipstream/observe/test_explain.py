"""`slipstream explain`, on the folder of a run that is over, from a store, and from an archive without a store."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.records import make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.base import ConfigError
from slipstream.observe import explain as explain_module
from slipstream.observe.explain import explain, explain_step, explain_version, find_entry
from slipstream.observe.reader import RunReader
from tests.builders import make_finished, write_archive
from tests.memory_store.store import MemoryStore
from tests.recorded_run import append_rows, make_row, record_run, record_step


def test_health_names_metrics_that_mean_the_same_together_with_the_runs_figures(tmp_path, capsys):
    folder = record_run(tmp_path, staleness={"max_lag": 7})
    append_rows(folder, make_row(31, **{"learner/ess": 0.1, "learner/chi2": 3.0, "learner/failed_fraction": 0.5}))
    explain("health", [str(folder)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "After step 31, outside of its healthy range: 3 of 24 watched metrics."
    ess = "1. learner/ess: 0.1, healthy is >= 0.3, since step 31; learner/chi2 3, healthy is <= 1, since step 31"
    assert ess in lines
    assert any("max_lag (now 7, mean lag 1.4)" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "answer"), [("slow", "The largest part of a step"), ("reward", "The reward did not fall")]
)
def test_a_question_is_answered_from_the_folder_alone_and_says_what_is_missing(tmp_path, capsys, kind, answer):
    explain(kind, [str(record_run(tmp_path))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(answer)
    assert lines[-1].startswith("events and versions must be read from the store, which is not there")


def test_a_supervised_run_says_what_to_look_at(tmp_path, capsys):
    folder = record_run(tmp_path, steps=0, mode="sft", sft={"train_path": "demonstrations.jsonl"})
    append_rows(folder, {"step": 1, "time_s": 0.1, "learner/loss": 2.0})
    for kind, answer in {"reward": "has no reward: its measures are", "slow": "records no shares of its time:"}.items():
        explain(kind, [str(folder)])
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"A run with mode=sft {answer} learner/")


def test_names_of_tasks_are_text(tmp_path, capsys):
    folder, key = record_run(tmp_path, steps=0), "learner/by_source/[red]a\x1b[2J/stop_length"
    falls = {"learner/reward_mean": 0.1, key: 0.9}
    append_rows(folder, *(make_row(step, **(falls if step > 30 else {key: 0.0})) for step in range(1, 61)))
    explain("reward", [str(folder)])
    assert "1. learner/by_source/[red]a\\x1b[2J/stop_length: rose from 0 to 0.9" in capsys.readouterr().out


def test_wrong_words_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"which has none, got 3: events and versions .* store"):
        explain("step", ["3", str(record_run(tmp_path))])
    with pytest.raises(ConfigError, match="takes one run, got 'mine' and 'yours'"):
        explain("slow", ["mine", "yours"])
    for words in ([], ["mine"]):
        with pytest.raises(ConfigError, match="step must be followed by its number"):
            explain("step", words)


def test_lines_are_wrapped_between_words_in_a_terminal_alone(tmp_path, capsys, monkeypatch):
    folder = str(record_run(tmp_path))
    explain("slow", [folder])
    piped = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    explain("slow", [folder])
    shown = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 80
    assert all(len(line) <= 80 or " " not in line.strip() for line in shown.splitlines()), "only a word may be longer"
    assert shown.split() == piped.split()


def make_store(*, is_retired: bool = False, clock: Callable[[], float] = lambda: 1.0) -> MemoryStore:
    return record_step(MemoryStore(clock=clock), run="run", is_retired=is_retired)


def read(store: MemoryStore, folder: Path = Path("nowhere")) -> RunReader:
    return RunReader(folder, store=store)


def on_step(reader: RunReader) -> str:
    entry = find_entry(reader, 1)
    members = reader.members(entry)
    cells = [cell for column in explain_module.table_of_step(entry, members).columns for cell in column.cells]
    return "\n".join([*explain_step(reader, entry, members), *map(str, cells)])


def test_a_step_names_its_trajectories_and_the_weights_after_it_and_a_version_its_step():
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
    reader = read(make_store())
    assert [*explain_version(reader, 1)] == ["version 1: the weights after step 1, checksum bbbb"]
    with pytest.raises(ConfigError, match=re.escape("version must have been published by this run, got 5.")):
        list(explain_version(reader, 5))
    with pytest.raises(ConfigError, match="step must be one of the ledger's, 1 to 1, got 2"):
        find_entry(reader, 2)


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


def test_trajectories_that_left_the_store_are_read_from_the_archive_or_else_the_ledger(tmp_path):
    reader = read(make_store(is_retired=True), tmp_path)
    assert "2 of them: its tokens are stored no more" in on_step(reader)
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
        with pytest.raises(ConfigError, match=r"must be read from the store, .*it was deleted.*, got 1\."):
            list(explain_version(reader, 1))


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
