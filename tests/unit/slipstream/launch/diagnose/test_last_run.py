"""Faults of a run: a traceback at the end of a log, deaths, an end without results."""

import time
from pathlib import Path

import pytest

from slipstream.buffer.records import Event
from slipstream.launch.diagnose import last_run
from slipstream.launch.diagnose.machine import Result
from tests.unit.slipstream.launch.diagnose.findings import by_name

OUT_OF_MEMORY = """12:00:00 [info] step step=3
Traceback (most recent call last):
  File "learner.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that stopped after step 7 with a well broker, and a store that cannot be read."""
    (tmp_path / "mine/logs").mkdir(parents=True)
    (tmp_path / "mine/logs/broker.log").write_text("12:00:00 [info] listening\n")
    (tmp_path / "mine/metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    return tmp_path / "mine"


def plant_events(monkeypatch: pytest.MonkeyPatch, *events: tuple[str, str]) -> None:
    found = [Event(time.time(), role, text) for role, text in events]
    monkeypatch.setattr(last_run, "read_events", lambda *_, **__: (found, ""))


def findings_of(folder: Path, *, is_live: bool = False) -> dict[str, Result]:
    return by_name(last_run.check_last_run(folder, is_live=is_live))


def test_a_traceback_is_found_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_events(monkeypatch, ("learner", "learner died (exit code 1); last line of its log: x; restarting in 1 s"))
    (folder / "logs/learner.log").write_text(OUT_OF_MEMORY)
    found = findings_of(folder)
    assert found["last run"].found == "mine ended without results at step 7"
    learner = found["log of learner"]
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert (learner.verdict, learner.found) == ("fail", error)
    assert learner.fix.startswith("lower learner.tokens_per_microbatch")
    assert found["events"].verdict == "warn"
    assert "log of broker" not in found
    (folder / "summary.json").write_text("{}")
    assert findings_of(folder)["log of learner"].verdict == "warn", "the run got over it"
    assert findings_of(folder)["last run"].found == "mine has finished at step 7"


def test_a_roles_own_sentence_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_events(monkeypatch)
    assert {each.verdict for each in findings_of(folder, is_live=True).values()} == {"ok"}
    (folder / "logs/generator-0.log").write_text("error: model.path must be a folder, got 'x'.\n")
    found = findings_of(folder)
    assert found["log of generator-0"].found == "model.path must be a folder, got 'x'."
    assert found["log of generator-0"].fix == f"see the end of {folder}/logs/generator-0.log"
    assert found["events"].verdict == "ok"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("ends the run: learner ended with signal SIGKILL", "`oom_kill`"),
        ("ends the run: learner: OSError: [Errno 28] No space left on device", "make room on the disk"),
        ("ends the run: the dog ate it", "resume=true"),
        ("ends the run: the loss is nan", "`slipstream watch`"),
        ("ends the run: closed for maintenance", "resume=true"),
    ],
)
def test_the_end_of_a_run_is_a_failure_with_its_cause(text, remedy, folder, monkeypatch):
    plant_events(monkeypatch, ("generator-0", "generator-0 joined"), ("launcher", text))
    last = findings_of(folder)["last run"]
    assert (last.verdict, last.found) == ("fail", f"mine ended without results at step 7: {text}")
    assert remedy in last.fix


@pytest.mark.parametrize(
    ("rows", "words"), [('{"step": 6}\n[7]\n{"step": 8, "tim', "at step 6"), ("", "with no step in metrics.jsonl")]
)
def test_the_last_step_is_that_of_the_last_whole_row(folder: Path, rows: str, words: str) -> None:
    (folder / "metrics.jsonl").write_text(rows)
    assert findings_of(folder)["last run"].found.endswith(words)


def test_a_large_log_is_read_from_its_end_beginning_with_a_whole_line(folder, monkeypatch):
    found = findings_of(folder)
    assert (found["events"].verdict, found["logs"].verdict) == ("skipped", "ok"), "logs are read without a store"
    path = folder / "logs/broker.log"
    path.write_text("a secret that is cut is not recognized\nthe next line\n")
    for num_bytes in (30, len("the next line\n")):
        assert last_run.log_tail(path, num_bytes=num_bytes) == ["the next line"]
    plant_events(monkeypatch)
    (folder / "logs/learner.log").write_text("x" * 300_000 + "\n" + OUT_OF_MEMORY)
    assert findings_of(folder)["log of learner"].verdict == "fail"
    (folder / "logs/learner.log").write_text(OUT_OF_MEMORY + "12:00:01 [info] step\n" * 20_000)
    assert findings_of(folder)["logs"].verdict == "ok", "an old error, which the role got over"
