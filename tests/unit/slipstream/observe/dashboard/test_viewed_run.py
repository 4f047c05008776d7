"""ViewedRun without a store, its health, the list of runs, and the settings' origins."""

import shutil
import threading

import pytest

from slipstream.configs.load import load, provenance
from slipstream.observe.dashboard import app as module_of_runs
from slipstream.observe.dashboard import viewed_run
from slipstream.observe.dashboard.app import Runs
from slipstream.observe.dashboard.payloads import read_settings
from slipstream.observe.dashboard.viewed_run import ViewedRun
from slipstream.observe.metrics_rows import read_tail
from slipstream.runtime.run_folder import RunFolder, is_held, list_runs
from tests.recorded_run import append_rows, make_config, make_row, record_run

SERIAL = {"mode": "serial", "weights": {"transport": "memory"}}


def read(folder):
    reader = ViewedRun(folder, run_id="mine")
    reader.poll()
    return reader


def test_a_supervised_run_has_no_store_and_is_running_while_it_is_held(tmp_path):
    folder = record_run(tmp_path, steps=5, mode="sft", sft={"train_path": "demonstrations.jsonl"})
    (folder / "store").mkdir()
    view = read(folder).view()
    assert (view.phase, view.status) == ("finished", None)
    assert "mode=sft has none" in view.problem
    assert list((folder / "store").iterdir()) == [], "no server was started"


def test_a_run_whose_process_is_gone_without_a_summary_has_stopped_until_it_is_resumed(tmp_path):
    folder = record_run(tmp_path, steps=5, **SERIAL)
    (folder / "summary.json").unlink()
    reader = read(folder)
    assert not is_held(folder)
    assert not is_held(tmp_path / "nowhere")
    assert reader.view().phase == "stopped"
    held = RunFolder(make_config(tmp_path, **SERIAL))
    held.lock()
    append_rows(folder, make_row(6))
    reader.poll()
    view = reader.view()
    assert (view.phase, view.step, view.max_steps, view.status, view.is_live) == ("running", 6, 40, None, True)
    assert "mode=serial" in view.problem
    assert view.times["roles"][0]["role"] == "learner"
    assert view.lag_tokens == {"0": 210, "1": 420, "3": 90}
    held.unlock()
    assert reader.view().phase == "stopped"


def test_one_thread_at_a_time_reads_the_store(tmp_path, monkeypatch):
    # A page that is loaded again begins to read while the thread of the one before is still at it.
    reader = read(record_run(tmp_path, steps=5))
    began, may_end, inside = threading.Event(), threading.Event(), []

    def read_store(*, is_live):
        inside.append(is_live)
        began.set()
        may_end.wait(10)
        inside.pop()

    monkeypatch.setattr(reader, "_read_store", read_store)
    threads = [threading.Thread(target=reader.view) for _ in range(2)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert len(inside) == 1
    may_end.set()
    for thread in threads:
        thread.join(10)


def test_a_list_looks_for_runs_once_and_reads_a_file_that_is_as_before_once(tmp_path, monkeypatch):
    for name in ("mine", "yours", "theirs"):
        folder = record_run(tmp_path, name, steps=5, **SERIAL)
    looks, reads = [], []
    monkeypatch.setattr(module_of_runs, "list_runs", lambda path: looks.append(path) or list_runs(path))
    monkeypatch.setattr(viewed_run, "read_tail", lambda path: reads.append(path) or read_tail(path))
    assert len(Runs([f"runs_dir={tmp_path}"]).lines()) == 3
    assert (looks, len(reads)) == ([tmp_path], 3)
    reader = ViewedRun(folder, run_id="mine")
    assert (reader.line().step, reader.line().step, len(reads)) == (5, 5, 4)
    assert reader.line().accuracies == {"sampled": 0.71}, "of the final evaluation"
    reader.folder.joinpath("summary.json").unlink()
    append_rows(folder, make_row(6, **{"eval/accuracy_sampled": 0.4}))
    assert (reader.line().step, len(reads)) == (6, 5)
    assert reader.line().accuracies == {"sampled": 0.4}, "of the newest monitored one"


def test_a_named_run_that_is_deleted_leaves_the_list_and_the_others_keep_their_names(tmp_path):
    runs = Runs([str(record_run(tmp_path / folder)) for folder in ("a", "b")])
    shutil.rmtree(tmp_path / "a")
    assert [line.id for line in runs.lines()] == ["mine.2"]
    shutil.rmtree(tmp_path / "b")
    assert runs.lines() == []


def test_a_warning_quotes_the_figures_of_the_run_and_a_rolled_back_run_is_judged_again(tmp_path):
    folder = record_run(tmp_path, steps=1, staleness={"max_lag": 7}, **SERIAL)
    append_rows(folder, make_row(2, **{"learner/ess": 0.1, "lag/mean": 2.5}))
    reader = read(folder)
    (warning,) = reader.view().warnings
    assert warning.metric == "learner/ess"
    assert "staleness.max_lag (now 7, mean lag 2.5)" in warning.advice
    RunFolder(make_config(tmp_path, **SERIAL)).keep_metrics(up_to_step=1)
    reader.poll()
    assert reader.view().warnings == []


@pytest.mark.parametrize("overrides", [["experiment=digits_serial", "seed=3"], ["learner.max_steps=7"]])
def test_the_origin_of_every_setting_is_recorded_with_the_run(tmp_path, overrides):
    run = load([*overrides, f"runs_dir={tmp_path}"])
    folder = RunFolder(run)
    folder.claim()
    folder.write_origins(provenance([*overrides, f"runs_dir={tmp_path}"], run), overrides=overrides)
    rows = {row.key: row for row in read_settings(folder.path)}
    assert all(row.origin for row in rows.values())
    assert rows[overrides[-1].split("=")[0]].origin == f"command line {overrides[-1]}"
    folder.unlock()
