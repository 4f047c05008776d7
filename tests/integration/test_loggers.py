"""Misbehaving loggers: one hangs, one raises, one fills its disk, one ends its process. The run is unaffected."""

import json
import socket
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from slipstream.buffer.redis.run_store import open_run_store
from slipstream.configs.load import load
from slipstream.runtime.run_folder import RunFolder
from tests import runs
from tests.runs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the package tensorboard is not installed"
)

HELL = """
import errno, os, time


class Quiet:
    def __init__(self, run):
        self.file = (run.folder / "quiet.txt").open("a")

    def log(self, step, metrics):
        print(step, metrics["learner/reward_mean"], file=self.file, flush=True)

    def table(self, step, name, columns, rows):
        print(name, len(rows), file=self.file, flush=True)


class Hangs:
    def __init__(self, run):
        pass

    def log(self, step, metrics):
        time.sleep(3600)


class Raises(Hangs):
    def log(self, step, metrics):
        raise RuntimeError("hell")


class Fills:
    room = 2

    def __init__(self, run):
        pass

    def log(self, step, metrics):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Dies(Hangs):
    def log(self, step, metrics):
        os._exit(3)
"""
STEPS = 6
SECONDS = {"learner/wait_s": 0.5, "learner/train_s": 0.5, "learner/publish_s": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = runs.make_task(tmp_path_factory.mktemp("loggers"), warm=False)
    (found / "hell.py").write_text(HELL)
    return found


def loggers(*names: str) -> str:
    return f"logging.backends={json.dumps([name if name == 'tensorboard' else f'hell.py:{name}' for name in names])}"


def test_a_run_with_loggers_from_hell_makes_every_step_and_leaves_nothing(folder):
    chosen = loggers("tensorboard", "Hangs", "Raises", "Fills", "Dies", "Quiet")
    settings = [f"learner.max_steps={STEPS}", "logging.samples_every_steps=1"]
    with runs.Run(folder, "hell", chosen, *settings).ended_at_last() as run:
        assert run.await_end() == 0, run.printed
    runs.assert_all_steps_once(run, STEPS)
    runs.assert_none_left(folder)
    events = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("learner/reward_mean")] == list(range(1, STEPS + 1))
    assert events.Tensors("samples")
    quiet = (run.path / "quiet.txt").read_text().splitlines()
    assert [line.split()[0] for line in quiet if not line.startswith("samples")] == list(map(str, range(1, STEPS + 1)))
    assert any(line.startswith("samples ") for line in quiet)
    assert "error='RuntimeError: hell'" in run.log("logger-hell.py-Raises")
    assert "No space left on device" in run.log("logger-hell.py-Fills")
    assert "logger-hell.py-Hangs was stopped before it had delivered everything" in run.printed
    assert "logger-hell.py-Dies died (exit code 3)" in run.printed
    # Nothing has waited for them: they take none of the learner's time.
    phases = {role["role"]: role["shares"] for role in runs.summary(folder, "hell")["times"]["roles"]}["learner"]
    known = {"waiting", "batch", "compute", "optimizer", "publishing", "committing", "evaluating", "checkpoint", "rest"}
    assert set(phases) <= known


def scrape(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def of_loggers(folder: Path) -> list[psutil.Process]:
    return [each for each in runs.processes_of(folder) if "slipstream.observe.loggers" in each.cmdline()]


def test_a_broker_that_was_started_by_hand_has_loggers_and_exporter(folder):
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    settings = [*SMALL, "name=hand", loggers("Quiet"), f"metrics.prometheus_port={port}"]
    broker = runs.start_role(folder, "broker", *settings)
    try:
        run = load([*settings, f"runs_dir={folder}/runs"])
        quiet = RunFolder(run).path / "quiet.txt"
        runs.until(lambda: bool(of_loggers(folder)), timeout_s=60, what="the logger")
        with open_run_store(RunFolder(run).path, timeout_s=10) as store:
            store.append_metrics({"step": 1, "time_s": 1.0, "learner/reward_mean": 0.5} | SECONDS)
        runs.until(lambda: quiet.exists() and quiet.read_text() == "1 0.5\n", timeout_s=60, what="the row")
        runs.until(lambda: 'slipstream_learner_reward_mean{run="hand"} 0.5' in scrape(port), timeout_s=60, what="it")
    finally:
        runs.end([broker])
    assert not of_loggers(folder)
