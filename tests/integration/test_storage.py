"""A whole run with checkpoints, archive, and models in an object store."""

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


def test_a_run_leaves_all_that_it_made_in_the_object_store(tmp_path: Path) -> None:
    runs.make_task(tmp_path, warm=False)
    uri = f"file://{tmp_path}/remote"
    runs.train(tmp_path, *SMALL, "name=mine", "learner.max_steps=12", f"storage.uri={uri}")
    here, there = tmp_path / "runs/mine", tmp_path / "remote/mine"
    names = ObjectFolder(f"{uri}/mine/checkpoints", StorageWait(0)).names()
    assert [name[:13] for name in names] == ["step-00000010", "step-00000012"]
    assert {folder.name for folder in (here / "checkpoints").iterdir()} == set(names)
    assert [find_damage(there / "checkpoints" / name) for name in names] == ["", ""]
    assert find_damage(there / "final_model") == ""
    check = Archive(there / "archive").check()
    assert check == Archive(here / "archive").check()
    assert (check.is_sound, check.steps) == (True, 12)
    again = runs.command(*SMALL, "name=mine", "learner.max_steps=12", f"storage.uri={uri}", "runs_dir=others")
    refused = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
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
