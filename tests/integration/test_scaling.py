"""Generators are added and drained by command during training. Only the engine is scripted."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 120.0


class Run(runs.Run):
    """A run under the launcher, controlled by commands."""

    def status(self) -> dict[str, Any]:
        return runs.status(self.folder, self.name)

    def reaches(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        self.until(lambda: reached(self.status()))


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    # Slow, to leave the processor to the commands.
    pace = ("learner.max_steps=100000", "generators.engine.seconds_per_token=0.2", "weights.transport=delta")
    started = Run(folder, "scaled", *pace)
    yield started
    runs.kill_tree(started.launcher)


def at_work(status: dict[str, Any]) -> set[str]:
    return {role["name"] for role in status["roles"] if role["role"] == "generator" and role["state"] == "ready"}


def here(status: dict[str, Any]) -> set[str]:
    return {role["name"] for role in status["roles"] if role["role"] == "generator" and role["liveness"] == "alive"}


def assert_no_port_is_open(run: Run) -> None:
    """No role opens a port except the learner's Gloo, on loopback. Nothing is broadcast in this run."""
    roles = psutil.Process(run.launcher.pid).children(recursive=True)
    assert len(roles) >= 5
    for role in roles:
        own = {"127.0.0.1"} if "slipstream.learner" in role.cmdline() else set()
        ports = (port for port in role.net_connections("inet") if port.status == psutil.CONN_LISTEN)
        assert {port.laddr.ip for port in ports} <= own, role.cmdline()


def assert_steps_are_recorded(run: Run) -> None:
    late = run.call("profile", "--steps=100000")
    assert late.returncode == 2
    assert "--steps must be <= 99" in late.stderr
    asked = run.call("profile", "--steps=2")
    assert asked.returncode == 0, asked.stderr
    again = run.call("profile")
    runs.until((run.path / "profile" / "trace.json.gz").is_file, timeout_s=60, what="the trace")
    assert again.returncode == 2 or "are recorded" in again.stdout
    recorded = re.search(r"stage=events steps=\((\d+), (\d+)\)", run.log("learner"))
    assert recorded
    first, last = map(int, recorded.groups())
    # The second request replaces the first if the learner had not read it yet.
    assert last - first + 1 in ((2,) if again.returncode == 2 else (2, 3))
    roles = ("trajectories", "broker (", "generator-0 (", "learner (", "learner torch (")
    runs.assert_traced(run.folder, "scaled", steps=(first, last), per_step=4 * 8, processes=roles)


def assert_it_pauses(run: Run) -> None:
    for words, code in (([], 0), (["--off"], 0), (["--off"], 2), ([], 0)):
        assert run.call("pause", *words).returncode == code
    run.reaches(lambda status: any(each["blocked_on"] == "whoever paused the run" for each in status["waits"]))
    step, roles = run.status()["step"], here(run.status())
    time.sleep(3)
    assert (run.status()["step"], here(run.status())) == (step, roles)
    assert run.call("pause", "--off").returncode == 0
    run.reaches(lambda status: status["step"] > step)


def test_scaling_from_one_to_three_to_one_loses_no_step(run: Run):
    run.reaches(lambda status: at_work(status) == {"generator-0"} and status["step"] > 0)
    assert_it_pauses(run)
    assert_steps_are_recorded(run)
    assert "the number of generators changes from 1 to 3" in run.call("scale", "generators=3").stdout
    run.reaches(lambda status: at_work(status) == {"generator-0", "generator-1", "generator-2"})
    assert run.status()["generators_target"] == 3
    assert_no_port_is_open(run)
    unknown = run.call("drain", "generator-7")
    assert unknown.returncode == 2
    assert "got 'generator-7'" in unknown.stderr
    assert "generator-0, generator-1" in unknown.stderr
    drained = run.call("drain", "generator-0")
    assert (drained.returncode, drained.stdout.splitlines()[-1]) == (0, "generator-0 left")
    run.reaches(lambda status: status["generators_target"] == 2 and len(here(status)) == 2)
    assert run.call("scale", "generators=1").returncode == 0
    run.reaches(lambda status: here(status) == {"generator-1"})
    run.launcher.send_signal(signal.SIGINT)
    assert run.launcher.wait(timeout=PATIENCE_S) == 130, run.printed[-2000:]
    runs.assert_all_steps_once(run, run.steps)
    runs.assert_none_left(run.folder)
