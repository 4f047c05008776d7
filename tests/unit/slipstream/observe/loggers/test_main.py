"""One logger of one run of one process, whose rows are in a file."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.loggers import __main__ as logger_main
from slipstream.observe.loggers.__main__ import LoggerProcess
from slipstream.observe.reader import RunReader
from tests.recorded_run import record_run

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


def until(is_met: Callable[[], Any]) -> None:
    ends_at = time.monotonic() + 10
    while not is_met():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


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
    until(lambda: scene.kept() == [1, 2, 3, 4, 5, 6, 3])
    process.turn()
    scene.write(1, 2, 3, 4)
    # Its process ends without taking leave.
    again = scene.start()
    again.turn()
    until(lambda: scene.kept() == [1, 2, 3, 4, 5, 6, 3, 4])
    assert (process.close(), again.close()) == (True, True)


def test_the_rows_before_a_logger_was_named_do_not_overflow_its_queue(scene):
    scene.write(*range(1, 50))
    process = scene.start()
    process.turn()
    assert process.close()
    assert scene.kept() == list(range(1, 50))
