"""Roles are killed in mid-run, with a real store, real sockets and real processes; the engine alone is scripted."""

import re
import time
from pathlib import Path

import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, assert_reconciled, end, has_stepped, start_role, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUP_SIZE = 8
STEPS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("die"), warm=False)


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


@pytest.mark.long
def test_roles_started_by_hand_find_each_other_in_any_order(folder: Path) -> None:
    address = f"broker.address=ipc://{folder}/hand.sock"
    settings = (*SMALL, address, "name=hand", "learner.max_steps=100000")
    first_log, second_log = (folder / f"by-hand-generators-{name}.log" for name in ("first", "second"))
    roles = [start_role(folder, "generators", "--id", "first", address)]
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
        roles.append(start_role(folder, "generators", "--id", "second", address))
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
