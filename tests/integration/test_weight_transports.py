"""Runs with each weight transport. Only the engine is scripted, and it verifies the weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.runs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("transports"), warm=False)


def learner_log(folder: Path, name: str) -> str:
    return (folder / "runs" / name / "logs" / "learner.log").read_text()


def fetched_by(log: str, member: str) -> list[int]:
    lines = re.findall(rf"version_fetched\s+member={member} (?:role=learner )?version=(\d+)", log)
    return [int(version) for version in lines]


@pytest.mark.long
@pytest.mark.parametrize("transport", ["snapshot", "delta"])
def test_a_run_trains_without_any_broadcast(folder: Path, transport: str):
    overrides = (f"name={transport}", f"weights.transport={transport}", "learner.max_steps=6")
    runs.train(folder, *SMALL, *overrides, timeout_s=200)
    log = learner_log(folder, transport)
    assert "epoch_opened" not in log
    fetched = fetched_by(log, "generator-0")
    assert fetched[0] == 0
    assert fetched[-1] == 6
    assert fetched == sorted(set(fetched))
    assert not (folder / "runs" / transport / "weights").exists()


@pytest.mark.long
def test_a_joiner_with_another_transport_does_not_disturb_broadcasts(folder: Path):
    joining = ["-m", "slipstream.generators", "--id", "far", "name=mixed", "weights.transport=delta"]
    with (folder / "mixed.out").open("w") as output:
        run, joiner = (
            subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            for command in (runs.command(*SMALL, "name=mixed", "learner.max_steps=150"), [sys.executable, *joining])
        )
    try:
        assert run.wait(timeout=PATIENCE_S) == 0
        log = learner_log(folder, "mixed")
        assert len(fetched_by(log, "far")) > 3
        assert fetched_by(log, "generator-0")
        assert set(re.findall(r"epoch_opened\s+epoch=\d+ members=(\[.*\])", log)) == {"['generator-0']"}
        assert runs.summary(folder, "mixed")["steps"] == 150
    finally:
        for process in (run, joiner):
            runs.kill_tree(process)
