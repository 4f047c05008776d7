"""Dead ends with real processes, store, and sockets: one message, an exit code, nothing lost, and a resume."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from slipstream.buffer.records import CheckpointPointer, RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis
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


class ManualRun:
    """Roles that are started separately, as on several machines."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self._folder = folder
        self._name = name
        self._settings = (*SMALL, *SOON, f"name={name}", *overrides)
        self.path = folder / "runs" / name
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, *overrides: str) -> subprocess.Popen[str]:
        own = ("--id", "mine", f"name={self._name}") if role == "generators" else self._settings
        command = [sys.executable, "-m", f"slipstream.{role}", *own, *overrides]
        self._processes.append(runs.start(self._folder / f"hand-{role}.log", command, self._folder))
        return self._processes[-1]

    def printed(self, role: str) -> str:
        return (self._folder / f"hand-{role}.log").read_text()

    def error_of(self, learner: subprocess.Popen[str]) -> str:
        """Last line of a learner that ends."""
        assert learner.wait(timeout=DEADLINE_S) == 2, self.printed("learner")[-3000:]
        return self.printed("learner").strip().splitlines()[-1]

    def state(self) -> RunState:
        with closing(open_run_store(EmbeddedRedis(self.path / "store").url, self._name, timeout_s=10)) as store:
            return store.run_state()

    @contextmanager
    def ended_at_last(self) -> Iterator["ManualRun"]:
        try:
            yield self
        finally:
            runs.end(self._processes)


@pytest.mark.long
def test_roles_started_by_hand_in_any_order_name_the_dead_generator_keep_their_steps_and_resume(folder: Path) -> None:
    settings = ("learner.max_steps=100000", "broker.peer_timeout_s=3", "weights.publish_every_steps=2")
    with ManualRun(folder, "hand", *settings).ended_at_last() as run:
        generator = run.start("generators")
        asks = "start a broker with `python -m slipstream.broker`"
        until(lambda: asks in run.printed("generators"), timeout_s=40, what="a waiting line")
        learner, broker = run.start("learner"), run.start("broker")
        metrics = run.path / "metrics.jsonl"

        def rows() -> list[dict]:
            return runs.metrics(folder, "hand") if metrics.exists() else []

        until(lambda: len(rows()) > 3, timeout_s=DEADLINE_S, what="steps")
        generator.kill()
        line = run.error_of(learner)
        assert re.search(r"error: the 4 groups of step \d+ must come, but no generator is alive", line), line
        assert "mine has been gone for" in line
        assert re.search(r"Last events: .*s ago mine: silent for 3 s", line), line
        state = run.state()
        # The weights of an odd step were not published and differ from the previous version.
        covered = CheckpointPointer(state.step, (state.step + 1) // 2, f"step-{state.step:08d}")
        assert (state.phase, state.checkpoint) == ("failed", covered)
        assert json.loads(runs.train(folder, "status", "--json", "name=hand"))["detail"] == state.detail

        learner, generator = run.start("learner", "resume=true"), run.start("generators")
        until(lambda: run.state().step > state.step + 3, timeout_s=DEADLINE_S, what="further steps")
        assert [row["step"] for row in rows()] == list(range(1, len(rows()) + 1))
    assert [role.returncode for role in (generator, learner, broker)] == [0, 130, 0]
    assert "Traceback" not in run.printed("generators")
    runs.assert_none_left(folder)
