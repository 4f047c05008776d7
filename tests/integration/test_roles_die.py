"""Roles and the store of a run are killed, with real sockets and processes. Only the engine is scripted."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, assert_reconciled, has_stepped, kill_tree, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.core
def test_killed_roles_and_stores_are_restarted_and_a_killed_run_continues_on_two_ranks_without_a_lost_prompt(
    folder: Path,
) -> None:
    with Run(folder, "killed", "learner.max_steps=100000").ended_at_last() as run:
        until(has_stepped(run, 5), timeout_s=120, what="training has begun")
        psutil.Process(int((run.path / "store/redis.pid").read_text())).kill()
        until(lambda: "the store is back" in run.printed, timeout_s=30, what="another store")
        until(has_stepped(run, run.steps + 3), timeout_s=90, what="training continues")
        assert run.printed.count("the store died (signal SIGKILL); restarting it") == 1
        assert "Traceback" not in run.printed + run.log("broker") + run.log("learner") + run.log("generator-0")
        assert " died (" not in run.printed.replace("the store died (", ""), "no role ended with it"
        for name, module in (("generator-0", "generators"), ("broker", "broker"), ("learner", "learner")):
            # Beyond the next checkpoint, and the steps that trajectories delivered by a dead generator may cover.
            steps = run.steps + 8
            run.role(f"slipstream.{module}").kill()
            until(lambda: f"{name} restarted" in run.printed, timeout_s=30, what="a restart")  # noqa: B023
            print(name, "works again at", until(has_stepped(run, steps), timeout_s=90, what="training continues"))
            assert f"{name} died (signal SIGKILL)" in run.printed
        assert "Traceback" not in run.printed
        runs.kill_processes_of(folder)
    max_steps = run.steps + 10
    ranks = ("learner.num_ranks=2", "learner/engine=deepspeed_zero2", f"learner.max_steps={max_steps}")
    with Run(folder, "killed", "resume=auto", *ranks).ended_at_last() as resumed:
        assert resumed.await_end() == 0, resumed.printed[-3000:]
    pattern = r"starting groups_returned=\d+ role=learner step=(\d+)"
    first, *checkpoints = [int(step) for step in re.findall(pattern, run.log("learner"))]
    assert first == 0
    assert len(checkpoints) == 2
    assert all(step >= 5 and step % 5 == 0 for step in checkpoints), checkpoints
    assert_all_steps_once(resumed, max_steps)
    assert_reconciled(resumed)
    runs.assert_none_left(folder)


PLANTED = """
from slipstream.learner.engines.engine import TrainEngine

step, norms = TrainEngine.step, []


def step_to_nan(self, **settings):
    norms.append(step(self, **settings))
    if len(norms) == 4:
        dict(self.gather_parameters())["model.norm.weight"][0] = float("nan")
    return norms[-1]


TrainEngine.step = step_to_nan


def centered(inputs):
    return inputs.rewards - inputs.rewards.mean()
"""


# One process: tests/unit/learner/test_rank_group.py. A run that fails and resumes: tests/integration/test_dead_ends.py.
@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "serial"])
def test_weights_that_an_update_made_nan_end_the_run_with_that_cause_and_are_not_saved(folder: Path, mode: str) -> None:
    (folder / "planted.py").write_text(PLANTED)
    own = ["algorithm/advantage=custom", "algorithm.advantage.function=planted:centered", "learner.max_steps=8"]
    own += ["learner.checkpoint.every_steps=2", *(["experiment=digits_serial"] if mode == "serial" else [])]
    dropped = () if mode == "async" else ("experiment", "generators")
    base = [word for word in SMALL if not word.startswith(dropped)]
    with Run(folder, f"nan-{mode}", *own, base=base).ended_at_last() as run:
        assert run.await_end() == 2, run.printed[-3000:]
    cause = "the learner's weights must be finite after step 4, got NaN or infinity in model.norm.weight"
    assert cause in run.printed
    assert "step-00000002/model." in run.printed.replace("\n", "")
    assert ("resume=true" in run.printed) == (mode == "async")
    # No generator is blamed, and all committed numbers are finite.
    assert "evicted" not in run.printed + (run.log("learner") if mode == "async" else "")
    assert [path.name for path in (run.path / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert run.steps == 3
    assert not (run.path / "final_model").exists()
    if mode == "async":
        (folder / "planted.py").write_text(PLANTED.replace("== 4", "== 0"))
        with Run(folder, run.name, *own, "resume=true").ended_at_last() as resumed:
            assert resumed.await_end() == 0, resumed.printed[-3000:]
        assert_all_steps_once(resumed, 8)
        assert_reconciled(resumed)


@contextmanager
def in_a_terminal(folder: Path, *overrides: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A run in a terminal that is closed at the end of the block."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        # Ignored if these tests run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = runs.command(*SMALL, *overrides)
    launcher = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    is_closing = threading.Event()

    def show() -> None:
        while not is_closing.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 65536)

    screen = threading.Thread(target=show, daemon=True)
    screen.start()
    try:
        yield launcher
    finally:
        is_closing.set()
        screen.join()
        os.close(ours)


# In CI: a role and the launcher in tests/unit/slipstream/runtime/test_process.py, Ctrl-C in test_scaling.py.
@pytest.mark.long
def test_closing_the_terminal_ends_the_run_as_ctrl_c_does(folder: Path) -> None:
    path = folder / "runs" / "terminal"
    try:
        with in_a_terminal(folder, "name=terminal", "learner.max_steps=100000") as launcher:
            metrics = path / "metrics.jsonl"
            until(lambda: metrics.exists() and len(metrics.read_bytes()) > 0, timeout_s=90, what="a first step")
        launcher.wait(timeout=20)
        assert launcher.returncode == 130
        runs.assert_none_left(folder)
    finally:
        kill_tree(launcher)
        runs.kill_processes_of(folder)
    logs = {log.stem: log.read_text() for log in (path / "logs").glob("*.log")}
    assert {"learner", "broker", "generator-0"} <= set(logs)
    assert not [name for name, text in logs.items() if "Traceback" in text]
    assert "ready to exit" in (path / "store" / "redis.log").read_text()
