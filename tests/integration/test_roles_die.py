"""Roles are killed in mid-run, with a real store, real sockets and real processes; the engine alone is scripted."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.records import RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUP_SIZE = 8
STEPS = 100
SMALL = (
    "generators/engine=scripted",
    "generators.engine.seconds_per_token=0.02",
    "learner/engine=torch",
    "prepare=[]",
    "model.path=models/digits-random",
    "learner.groups_per_step=4",
    "learner.stop=null",
    "learner.checkpoint.every_steps=5",
    "evaluation.every_steps=0",
    "evaluation.monitor_prompts=2",
    "evaluation.final_prompts=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("die"), warm=False)


class Run:
    """A run under the launcher, watched from outside."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self._folder = folder
        self.name = name
        self.path = folder / "runs" / name
        self._printed = folder / f"{name}.out"
        address = f"broker.address=ipc://{folder}/{name}.sock"
        with self._printed.open("a") as output:
            self.launcher = subprocess.Popen(
                runs.command(*SMALL, f"name={name}", address, *overrides), cwd=folder, stdout=output, stderr=output
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def log(self, role: str) -> str:
        return (self.path / "logs" / f"{role}.log").read_text()

    def role(self, module: str) -> psutil.Process:
        """The process that the launcher started as `python -m module`."""
        (found,) = [
            child for child in psutil.Process(self.launcher.pid).children() if child.cmdline()[1:3] == ["-m", module]
        ]
        return found

    def kill(self, module: str) -> float:
        """SIGKILL; returns when, on the monotonic clock."""
        self.role(module).kill()
        return time.monotonic()

    def await_end(self, *, timeout_s: float = 150) -> int:
        return self.launcher.wait(timeout=timeout_s)

    @contextmanager
    def ended_at_last(self) -> Iterator["Run"]:
        try:
            yield self
        finally:
            self.launcher.terminate()
            try:
                self.launcher.wait(timeout=15)
            finally:
                self.launcher.kill()


def until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Look until it holds; returns when, on the monotonic clock."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic()


def has_stepped(run: Run, steps: int) -> Callable[[], bool]:
    return lambda: run.steps >= steps or run.launcher.poll() is not None


def left_behind(run: Run) -> tuple[StoreCounts, RunState, Audit]:
    """Counts, state and audit of a finished run, read from its store."""
    server = EmbeddedRedis(run.path / "store")
    server.start()
    try:
        store = open_run_store(server.url, run.name, timeout_s=10)
        return store.counts(), store.run_state(), store.audit()
    finally:
        server.stop()


def assert_reconciled(run: Run) -> None:
    counts, state, books = left_behind(run)
    assert books.is_sound, books
    # Every prompt ever admitted is in exactly one place; open groups are those of leased and returned prompts.
    placed = counts.leased + counts.returned + counts.ready + counts.claimed + counts.used
    assert counts.admitted == placed + counts.outcomes["retired"]
    assert counts.outcomes == {"retired": 4 * state.step}
    assert counts.refused == {}


def assert_all_steps_once(run: Run, steps: int) -> None:
    assert [row["step"] for row in runs.metrics(run.path.parents[1], run.name)] == list(range(1, steps + 1))


def recovery_s(run: Run, killed_at: float, *, from_steps: int) -> float:
    return until(has_stepped(run, from_steps), timeout_s=90, what="training goes on") - killed_at


def test_a_killed_generator_is_restarted_and_no_prompt_is_lost(folder: Path) -> None:
    with Run(folder, "generator", f"learner.max_steps={STEPS}").ended_at_last() as run:
        until(has_stepped(run, 5), timeout_s=120, what="training has begun")
        killed_at = run.kill("slipstream.generators")
        until(lambda: "generator-0 restarted" in run.printed, timeout_s=30, what="a restart")
        # What the dead one had delivered may carry some more steps.
        waiting_from = run.steps + 8
        print("generator back to work after", round(recovery_s(run, killed_at, from_steps=waiting_from), 1), "s")
        assert run.await_end() == 0, run.printed[-3000:]
        assert "generator-0 died (signal SIGKILL)" in run.printed
    assert_reconciled(run)
    assert_all_steps_once(run, STEPS)
    assert runs.processes_of(folder) == []


def test_a_killed_broker_is_restarted_and_no_prompt_is_lost(folder: Path) -> None:
    with Run(folder, "broker", f"learner.max_steps={STEPS}").ended_at_last() as run:
        until(has_stepped(run, 5), timeout_s=120, what="training has begun")
        killed_at = run.kill("slipstream.broker")
        until(lambda: "broker restarted" in run.printed, timeout_s=30, what="a restart")
        waiting_from = run.steps + 8
        print("broker back to work after", round(recovery_s(run, killed_at, from_steps=waiting_from), 1), "s")
        assert run.await_end() == 0, run.printed[-3000:]
        assert "broker died (signal SIGKILL)" in run.printed
    assert_reconciled(run)
    assert_all_steps_once(run, STEPS)
    assert runs.processes_of(folder) == []


def test_a_killed_learner_and_a_resumed_run_continue_from_the_checkpoint(folder: Path) -> None:
    with Run(folder, "learner", "learner.max_steps=40").ended_at_last() as run:
        until(has_stepped(run, 12), timeout_s=120, what="a checkpoint")
        killed_at = run.kill("slipstream.learner")
        until(lambda: "learner restarted" in run.printed, timeout_s=30, what="a restart")
        print("learner back to work after", round(recovery_s(run, killed_at, from_steps=16), 1), "s")
        assert run.await_end() == 0, run.printed[-3000:]
    assert "learner died (signal SIGKILL)" in run.printed
    assert "Traceback" not in run.printed
    assert runs.processes_of(folder) == []
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
    assert runs.processes_of(folder) == []


def start_role(folder: Path, *command: str) -> subprocess.Popen[str]:
    log = folder / f"by-hand-{'-'.join(word for word in command if '=' not in word)}.log"
    with log.open("w") as output:
        return subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=output, stderr=output, text=True)


@pytest.mark.long
def test_roles_started_by_hand_find_each_other_in_any_order(folder: Path) -> None:
    address = f"broker.address=ipc://{folder}/hand.sock"
    settings = (*SMALL, address, "name=hand", "learner.max_steps=100000")
    first_log, second_log = (folder / f"by-hand-slipstream.generators---id-{name}.log" for name in ("first", "second"))
    roles = [start_role(folder, "slipstream.generators", "--id", "first", address)]
    try:
        until(
            lambda: "start a broker with `python -m broker`" in first_log.read_text(),
            timeout_s=40,
            what="a waiting line",
        )
        roles += [
            start_role(folder, "slipstream.learner", *settings),
            start_role(folder, "slipstream.broker", *settings),
        ]
        metrics = folder / "runs" / "hand" / "metrics.jsonl"
        until(lambda: metrics.exists(), timeout_s=90, what="a first step")
        started_at = time.monotonic()
        roles.append(start_role(folder, "slipstream.generators", "--id", "second", address))
        contributed_at = until(lambda: trajectories_of(folder, "second") > 0, timeout_s=60, what="a contribution")
        print("second generator contributes after", round(contributed_at - started_at, 1), "s")
    finally:
        end(roles)
    assert "Traceback" not in first_log.read_text() + second_log.read_text()
    assert [role.returncode for role in roles] == [0, 130, 0, 0]
    assert runs.processes_of(folder) == []


def trajectories_of(folder: Path, generator: str) -> float:
    store = open_run_store(EmbeddedRedis(folder / "runs" / "hand" / "store").url, "hand", timeout_s=10)
    try:
        return store.roles().get(generator, {}).get("trajectories", 0)
    finally:
        store.close()


def end(roles: list[subprocess.Popen[str]]) -> None:
    """As one does by hand: Ctrl-C in every terminal, the broker's last."""
    for role in sorted(roles, key=lambda role: "slipstream.broker" in role.args):
        role.send_signal(signal.SIGINT)
        try:
            role.wait(timeout=15)
        except subprocess.TimeoutExpired:
            role.kill()
