"""Dead ends with real processes, store, and sockets: one message, an exit code, nothing lost, and a resume."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from slipstream.buffer.records import CheckpointPointer, RunState
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, left_behind, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
SOON = ("learner.stall.timeout_s=6", "learner.checkpoint.every_steps=1000")
REWARDS = """
import pathlib
def succeeds_when_repaired(sample):
    # The launcher's trial before the start gets a score.
    is_trial = sample.response in ("I do not know.", sample.ground_truth)
    if not is_trial and not pathlib.Path("repaired").exists(): raise RuntimeError("no opinion")
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("dead"), warm=False)
    (made / "dead_rewards.py").write_text(REWARDS)
    return made


def test_rewards_that_all_fail_end_the_run_before_it_trains_on_nothing(folder: Path) -> None:
    settings = (*SOON, "learner.max_steps=3", "generators.reward.function=dead_rewards:succeeds_when_repaired")
    with Run(folder, "rewards", *settings).ended_at_last() as run:
        assert run.await_end() == 2, run.printed[-3000:]
    *_, last = run.printed.strip().splitlines()
    cause = r"none of the last \d+ trajectories has a reward, every call of dead_rewards:succeeds_when"
    assert re.match(f"error: learner: .*{cause}", last), run.printed[-3000:]
    assert "Traceback" not in run.printed
    runs.assert_none_left(folder)
    counts, state, audit = left_behind(run)
    assert audit.is_sound, audit
    assert (run.steps, counts.claimed, state.phase, state.step) == (0, 0, "failed", 0)
    assert "must come, but" in state.detail
    (folder / "repaired").touch()
    with Run(folder, "rewards", *settings, "resume=true").ended_at_last() as resumed:
        assert resumed.await_end() == 0, resumed.printed[-3000:]
    assert_all_steps_once(resumed, 3)
    assert left_behind(resumed)[2].is_sound
    assert runs.summary(folder, "rewards")["accuracy_before"] is not None


@pytest.mark.long
def test_roles_started_by_hand_in_any_order_name_the_dead_generator_keep_their_steps_and_resume(folder: Path) -> None:
    path, started = folder / "runs/hand", list[subprocess.Popen[str]]()
    settings = (*SMALL, *SOON, "name=hand", "learner.max_steps=100000")
    settings += ("broker.peer_timeout_s=3", "weights.publish_every_steps=2")

    def start(role: str, *overrides: str) -> subprocess.Popen[str]:
        own = ("--id", "mine", "name=hand") if role == "generators" else settings
        started.append(runs.start_role(folder, role, *own, *overrides))
        return started[-1]

    def state() -> RunState:
        with open_run_store(path, timeout_s=10) as store:
            return store.run_state()

    def steps() -> list[int]:
        return [row["step"] for row in runs.metrics(folder, "hand")] if (path / "metrics.jsonl").exists() else []

    try:
        generator, printed = start("generators"), folder / "by-hand-generators-mine.log"
        asks = "start a broker with `python -m slipstream.broker`"
        until(lambda: asks in printed.read_text(), timeout_s=40, what="a waiting line")
        learner, broker = start("learner"), start("broker")
        until(lambda: len(steps()) > 3, timeout_s=DEADLINE_S, what="steps")
        generator.kill()
        assert learner.wait(timeout=DEADLINE_S) == 2
        line = (folder / "by-hand-learner.log").read_text().strip().splitlines()[-1]
        assert re.search(r"error: the 4 groups of step \d+ must come, but no generator is alive", line), line
        assert "mine has been gone for" in line
        assert re.search(r"Last events: .*s ago mine: silent for 3 s", line), line
        ended = state()
        # The weights of an odd step were not published and differ from the previous version.
        covered = CheckpointPointer(ended.step, (ended.step + 1) // 2, f"step-{ended.step:08d}")
        assert (ended.phase, ended.checkpoint) == ("failed", covered)
        assert json.loads(runs.train(folder, "status", "--json", "name=hand"))["detail"] == ended.detail
        learner, generator = start("learner", "resume=true"), start("generators")
        until(lambda: state().step > ended.step + 3, timeout_s=DEADLINE_S, what="further steps")
        assert steps() == list(range(1, len(steps()) + 1))
        generator.terminate()
        assert generator.wait(timeout=30) == 0
        with open_run_store(path, timeout_s=10) as store:
            until(lambda: store.roles()["mine"]["state"] == "gone", timeout_s=20, what="a Bye")
            counts = store.counts()
        assert counts.leased == 0
        placed = counts.returned + counts.ready + counts.claimed + counts.used
        assert counts.admitted == placed + sum(counts.outcomes.values())
    finally:
        runs.end(started)
    assert [role.returncode for role in (generator, learner, broker)] == [0, 130, 0]
    assert "Traceback" not in printed.read_text()
    runs.assert_none_left(folder)
