"""The command, on the folder of a run that is over."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.observe.explain import explain
from tests.recorded_run import append_rows, make_row, record_run


def test_health_names_metrics_that_mean_the_same_together_with_the_runs_figures(tmp_path, capsys):
    folder = record_run(tmp_path, buffer={"staleness": {"max_lag": 7}})
    append_rows(folder, make_row(31, **{"learner/ess": 0.1, "learner/chi2": 3.0, "learner/failed_fraction": 0.5}))
    explain("health", [str(folder)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "After step 31, outside of its healthy range: 3 of 22 watched metrics."
    assert (
        "1. learner/ess: 0.1, healthy is >= 0.3, since step 31; learner/chi2 3, healthy is <= 1, since step 31" in lines
    )
    assert any("max_lag (now 7, mean lag 1.4)" in line for line in lines)


@pytest.mark.parametrize("kind", ["slow", "reward"])
def test_a_question_is_answered_from_the_folder_alone_and_says_what_is_missing(tmp_path, capsys, kind):
    explain(kind, [str(record_run(tmp_path))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith({"slow": "The largest part of a step", "reward": "The reward did not fall"}[kind])
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


def test_a_step_of_a_run_without_a_ledger_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"which has none, got 3: events and versions .* store"):
        explain("step", ["3", str(record_run(tmp_path))])


def test_one_run_is_explained_at_a_time(tmp_path):
    with pytest.raises(ConfigError, match="takes one run, got 'mine' and 'yours'"):
        explain("slow", ["mine", "yours"])


def test_a_kind_that_has_a_number_asks_for_it():
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
