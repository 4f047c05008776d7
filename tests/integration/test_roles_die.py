"""Roles are killed during a run, with a real store, sockets, and processes. Only the engine is scripted."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.broker.transport.endpoints import is_listening
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import (
    SMALL,
    Run,
    assert_all_steps_once,
    assert_reconciled,
    end,
    has_stepped,
    kill_tree,
    start_role,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUP_SIZE = 8
STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("die"), warm=False)


def recovery_s(run: Run, killed_at: float, *, from_steps: int) -> float:
    return until(has_stepped(run, from_steps), timeout_s=90, what="training goes on") - killed_at


@pytest.mark.core
def test_a_killed_generator_and_a_killed_broker_are_restarted_and_no_prompt_is_lost(folder: Path) -> None:
    with Run(folder, "killed", f"learner.max_steps={STEPS}").ended_at_last() as run:
        until(has_stepped(run, 5), timeout_s=120, what="training has begun")
        for name, module in (("generator-0", "slipstream.generators"), ("broker", "slipstream.broker")):
            killed_at = run.kill(module)
            until(lambda: f"{name} restarted" in run.printed, timeout_s=30, what="a restart")  # noqa: B023
            # Trajectories that the dead generator delivered may cover a few more steps.
            waiting_from = run.steps + 8
            print(name, "back to work after", round(recovery_s(run, killed_at, from_steps=waiting_from), 1), "s")
            assert f"{name} died (signal SIGKILL)" in run.printed
        assert run.await_end() == 0, run.printed[-3000:]
    assert_reconciled(run)
    assert_all_steps_once(run, STEPS)
    runs.assert_none_left(folder)


@pytest.mark.core
def test_a_killed_learner_and_a_resumed_run_continue_from_the_checkpoint(folder: Path) -> None:
    with Run(folder, "learner", "learner.max_steps=40").ended_at_last() as run:
        until(has_stepped(run, 12), timeout_s=120, what="a checkpoint")
        killed_at = run.kill("slipstream.learner")
        until(lambda: "learner restarted" in run.printed, timeout_s=30, what="a restart")
        print("learner back to work after", round(recovery_s(run, killed_at, from_steps=16), 1), "s")
        assert run.await_end() == 0, run.printed[-3000:]
    assert "learner died (signal SIGKILL)" in run.printed
    assert "Traceback" not in run.printed
    runs.assert_none_left(folder)
    assert_all_steps_once(run, 40)
    assert_reconciled(run)
    with Run(folder, "learner", "learner.max_steps=45", "resume=true").ended_at_last() as resumed:
        assert resumed.await_end() == 0, resumed.printed[-3000:]
    begun_at = [
        int(step) for step in re.findall(r"starting groups_returned=\d+ role=learner step=(\d+)", run.log("learner"))
    ]
    assert begun_at[0] == 0
    assert begun_at[1] >= 10
    assert begun_at[1] % 5 == 0
    assert begun_at[2] == 40
    assert_all_steps_once(resumed, 45)
    assert_reconciled(resumed)
    runs.assert_none_left(folder)


@pytest.mark.long
def test_a_run_killed_on_one_rank_goes_on_with_two_and_zero_2(folder: Path) -> None:
    same = ("learner.checkpoint.every_steps=5", "resume=auto")
    with Run(folder, "layouts", "learner.max_steps=40", *same).ended_at_last() as run:
        until(has_stepped(run, 12), timeout_s=120, what="a checkpoint")
        runs.kill_processes_of(folder)
    others = ("learner.max_steps=40", "learner.num_ranks=2", "learner/engine=deepspeed_zero2")
    with Run(folder, "layouts", *others, *same).ended_at_last() as resumed:
        assert resumed.await_end() == 0, resumed.printed[-3000:]
    pattern = r"starting groups_returned=\d+ role=learner step=(\d+)"
    first, second = [int(step) for step in re.findall(pattern, resumed.log("learner"))]
    assert first == 0
    assert second >= 10
    assert second % 5 == 0
    assert_all_steps_once(resumed, 40)
    assert_reconciled(resumed)
    runs.assert_none_left(folder)


@pytest.mark.long
def test_roles_started_by_hand_find_each_other_in_any_order(folder: Path) -> None:
    settings = (*SMALL, "name=hand", "learner.max_steps=100000")
    first_log, second_log = (folder / f"by-hand-generators-{name}.log" for name in ("first", "second"))
    roles = [start_role(folder, "generators", "--id", "first", "name=hand")]
    try:
        until(
            lambda: "start a broker with `python -m broker`" in first_log.read_text(),
            timeout_s=40,
            what="a waiting line",
        )
        roles += [
            start_role(folder, "learner", *settings),
            start_role(folder, "broker", *settings),
        ]
        metrics = folder / "runs" / "hand" / "metrics.jsonl"
        until(lambda: metrics.exists(), timeout_s=90, what="a first step")
        started_at = time.monotonic()
        roles.append(start_role(folder, "generators", "--id", "second"))
        contributed_at = until(lambda: trajectories_of(folder, "second") > 0, timeout_s=60, what="a contribution")
        print("second generator contributes after", round(contributed_at - started_at, 1), "s")
    finally:
        end(roles)
    assert "Traceback" not in first_log.read_text() + second_log.read_text()
    assert [role.returncode for role in roles] == [0, 130, 0, 0]
    runs.assert_none_left(folder)


def start_broker(folder: Path, name: str, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("w") as log:
        command = [sys.executable, "-m", "slipstream.broker", *SMALL, f"name={name}"]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def test_runs_side_by_side_have_a_socket_each_and_a_second_broker_of_one_is_refused(folder: Path) -> None:
    names = ("left", "right")
    logs = {name: folder / f"{name}.out" for name in (*names, "second")}
    brokers = {name: start_broker(folder, name, logs[name]) for name in names}

    def await_listening(name: str) -> None:
        until(lambda: "listening" in logs[name].read_text(), timeout_s=60, what=f"broker {name}")

    try:
        for name in names:
            await_listening(name)
        addresses = [re.search(r"address=(ipc://\S+)", logs[name].read_text())[1] for name in names]
        assert addresses[0] != addresses[1]
        second = start_broker(folder, "left", logs["second"])
        assert second.wait(timeout=60) == 2
        (refused,) = [line for line in logs["second"].read_text().splitlines() if line.startswith("error: ")]
        assert f"must have one launcher, or one broker started by hand, but process {brokers['left'].pid} " in refused
        assert is_listening(addresses[0])
        # After a kill, its socket remains, and its successor takes it over.
        brokers["left"].kill()
        brokers["left"].wait()
        assert Path(addresses[0].removeprefix("ipc://")).is_socket()
        assert not is_listening(addresses[0])
        brokers["left"] = start_broker(folder, "left", logs["left"])
        await_listening("left")
        assert addresses[0] in logs["left"].read_text()
    finally:
        end(list(brokers.values()))
    assert not [address for address in addresses if Path(address.removeprefix("ipc://")).exists()]


def trajectories_of(folder: Path, generator: str) -> float:
    store = open_run_store(EmbeddedRedis(folder / "runs" / "hand" / "store").url, "hand", timeout_s=10)
    try:
        return store.roles().get(generator, {}).get("trajectories", 0)
    finally:
        store.close()


FAULTY = """
import pathlib, time

steps, fallen = [], pathlib.Path("fallen")
saved = pathlib.Path("runs/faulty/checkpoints/step-00000005")

def centered(inputs):
    steps.append(1)
    if len(steps) == 7 and not fallen.exists():
        # It is written beside the steps that follow.
        for _ in range(200):
            time.sleep(0 if saved.exists() else 0.05)
        fallen.touch()
        raise RuntimeError("not a verdict of the learner")
    return inputs.rewards - inputs.rewards.mean()
"""


@pytest.mark.long
def test_a_learner_that_falls_over_an_error_is_restarted_from_its_checkpoint(folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    own = ["algorithm/advantage=custom", "algorithm.advantage.function=faulty:centered"]
    with Run(folder, "faulty", *own, "learner.max_steps=12").ended_at_last() as run:
        assert run.await_end() == 0, run.printed[-3000:]
    assert re.search(r"learner died \(exit code 1\).* RuntimeError: not a verdict .*; restarting in 1 s", run.printed)
    assert "learner restarted" in run.printed
    assert_all_steps_once(run, 12)
    assert_reconciled(run)


PLANTED = """
from slipstream.learner.engines.torch_engine import TorchEngine

step, norms = TorchEngine.step, []


def step_to_nan(self, **settings):
    norms.append(step(self, **settings))
    if len(norms) == 4:
        dict(self.gather_parameters())["model.norm.weight"][0] = float("nan")
    return norms[-1]


TorchEngine.step = step_to_nan


def centered(inputs):
    return inputs.rewards - inputs.rewards.mean()
"""


@pytest.mark.parametrize("mode", ["async", "serial"])
def test_weights_that_an_update_made_nan_end_the_run_with_that_cause_and_are_not_saved(folder: Path, mode: str) -> None:
    (folder / "planted.py").write_text(PLANTED)
    own = ["algorithm/advantage=custom", "algorithm.advantage.function=planted:centered", "learner.max_steps=8"]
    own += ["learner.checkpoint.every_steps=2", *(["experiment=digits_serial"] if mode == "serial" else [])]
    base = [word for word in SMALL if mode == "async" or ("scripted" not in word and "seconds_per_token" not in word)]
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


def test_closing_the_terminal_ends_the_run_as_ctrl_c_does(folder: Path) -> None:
    path = folder / "runs" / "terminal"
    try:
        with in_a_terminal(folder, "name=terminal", "learner.max_steps=100000") as launcher:
            metrics = path / "metrics.jsonl"
            until(lambda: metrics.exists() and len(metrics.read_bytes()) > 0, timeout_s=90, what="a first step")
        launcher.wait(timeout=20)
        assert launcher.returncode == 130
        until(lambda: runs.processes_of(folder) == [], timeout_s=1, what="the end of all")
    finally:
        kill_tree(launcher)
        runs.kill_processes_of(folder)
    logs = {log.stem: log.read_text() for log in (path / "logs").glob("*.log")}
    assert {"learner", "broker", "generator-0"} <= set(logs)
    assert not [name for name, text in logs.items() if "Traceback" in text]
    assert "ready to exit" in (path / "store" / "redis.log").read_text()
