"""A run with checkpoints, archive, and models in an object store, and with misbehaving loggers: one hangs, one raises,
one fills its disk, one ends its process.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.durable_files import find_damage
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from tests import runs
from tests.runs import ROOT, SMALL

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
STEPS = 12


def test_a_run_leaves_all_that_it_made_in_the_object_store_though_its_loggers_misbehave(tmp_path: Path) -> None:
    folder, uri = runs.make_task(tmp_path, warm=False), f"file://{tmp_path}/remote"
    (folder / "hell.py").write_text(HELL)
    names = ["tensorboard", *(f"hell.py:{name}" for name in ("Hangs", "Raises", "Fills", "Dies", "Quiet"))]
    settings = [f"storage.uri={uri}", f"learner.max_steps={STEPS}", "logging.samples_every_steps=1"]
    with runs.Run(folder, "mine", f"logging.backends={json.dumps(names)}", *settings).ended_at_last() as run:
        assert run.await_end() == 0, run.printed
    runs.assert_all_steps_once(run, STEPS)
    runs.assert_none_left(folder)
    check_storage(folder, uri)
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
    phases = {role["role"]: role["shares"] for role in runs.summary(folder, "mine")["times"]["roles"]}["learner"]
    known = {"waiting", "batch", "compute", "optimizer", "publishing", "committing", "evaluating", "checkpoint", "rest"}
    assert set(phases) <= known


def check_storage(folder: Path, uri: str) -> None:
    here, there = folder / "runs/mine", folder / "remote/mine"
    names = ObjectFolder(f"{uri}/mine/checkpoints", StorageWait(0)).names()
    assert [name[:13] for name in names] == ["step-00000010", "step-00000012"]
    assert {each.name for each in (here / "checkpoints").iterdir()} == set(names)
    assert [find_damage(there / "checkpoints" / name) for name in names] == ["", ""]
    assert find_damage(there / "final_model") == ""
    check = Archive(there / "archive").check()
    assert check == Archive(here / "archive").check()
    assert (check.is_sound, check.steps) == (True, STEPS)
    again = runs.command(*SMALL, "name=mine", f"learner.max_steps={STEPS}", f"storage.uri={uri}", "runs_dir=others")
    refused = runs.call(again, folder, timeout_s=60)
    assert refused.returncode == 2
    assert f"but {uri}/mine has files: choose another with name=" in refused.stderr


HANGING = """
import sys, threading, time
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from slipstream.runtime.process import ended_beside

with ended_beside("checkpoint"):
    folder = ObjectFolder("s3://bucket/run", StorageWait(600))
    threading.Thread(target=lambda: folder.write("a", b"1"), name="checkpoint", daemon=True).start()
    time.sleep(0.5)
    raise SystemExit(75)
"""


def test_a_process_ends_while_its_object_store_accepts_connections_but_does_not_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = "http://{}:{}".format(*silent.getsockname())
        environment = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        command = [sys.executable, "-c", HANGING]
        ended = subprocess.run(command, env=os.environ | environment, cwd=ROOT, timeout=30, check=False)
    assert ended.returncode == 75
