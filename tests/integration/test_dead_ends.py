"""Dead ends with real processes, store, and sockets: one message, an exit code, nothing lost, and a resume."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from slipstream.buffer.records import CheckpointPointer, RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, left_behind, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
AFTER_S = 6
SOON = (f"learner.dead_end.after_s={AFTER_S}", "learner.checkpoint.every_steps=1000")
BY_HAND = ("broker", "learner", "generators")
REWARDS = """
import pathlib
def succeeds_when_repaired(sample):
    if not pathlib.Path("repaired").exists(): raise RuntimeError("no opinion")
    return 1.0
"""

FAULTY = """
import sys
from slipstream.generators.__main__ import main
from slipstream.generators.engines.scripted_engine import ScriptedEngine
async def wrong(self, token_ids): return [-9.0] * (len(token_ids) - 1)
ScriptedEngine.prompt_logprobs = wrong
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = runs.make_task(tmp_path_factory.mktemp("dead"), warm=False)
    (made / "dead_rewards.py").write_text(REWARDS)
    return made


def launch(folder: Path, name: str, *overrides: str) -> Run:
    return Run(folder, name, "learner.max_steps=3", *SOON, *overrides)


def final_message(run: Run) -> str:
    """Last line of the launcher, which exits with the code of a user-fixable error."""
    with run.ended_at_last():
        assert run.await_end() == 2, run.printed[-3000:]
    *_, last = run.printed.strip().splitlines()
    assert last.startswith("error: learner: "), run.printed[-3000:]
    assert "Traceback" not in run.printed
    runs.assert_none_left(run.path.parents[1])
    return last


def assert_sound_and_failed(run: Run, *, step: int) -> None:
    """Check that nothing is lost, every step is in a checkpoint, and the run state has the cause."""
    counts, state, audit = left_behind(run)
    assert audit.is_sound, audit
    assert (counts.claimed, state.phase, state.step) == (0, "failed", step)
    assert "must come, but" in state.detail
    if step:
        assert state.checkpoint is not None
        assert state.checkpoint.step == step
        assert (run.path / "checkpoints" / state.checkpoint.name).is_dir()


def assert_goes_on(folder: Path, name: str, *overrides: str) -> None:
    with launch(folder, name, "resume=true", *overrides).ended_at_last() as resumed:
        assert resumed.await_end() == 0, resumed.printed[-3000:]
    assert_all_steps_once(resumed, 3)
    assert left_behind(resumed)[2].is_sound


@pytest.mark.long
def test_a_run_without_a_generator_fails_and_resumes_with_one(folder: Path) -> None:
    run = launch(folder, "nobody", "generators.count=0")
    sentence = final_message(run)
    assert "the evaluation 'before' must come, but no generator is alive" in sentence
    assert "none ever joined" in sentence
    assert "python -m generators name=nobody`" in sentence
    assert "resume=true" in sentence
    assert_sound_and_failed(run, step=0)
    assert_goes_on(folder, "nobody", "generators.count=1")


def test_rewards_that_all_fail_end_the_run_before_it_trains_on_nothing(folder: Path) -> None:
    rewards = "generators.reward.function=dead_rewards:succeeds_when_repaired"
    run = launch(folder, "rewards", rewards)
    sentence = final_message(run)
    assert re.search(
        r"none of the last \d+ trajectories has a reward, every call of dead_rewards:succeeds_when", sentence
    )
    assert run.steps == 0
    assert_sound_and_failed(run, step=0)
    (folder / "repaired").touch()
    assert_goes_on(folder, "rewards", rewards)
    summary = runs.summary(folder, "rewards")
    assert summary["accuracy_before"] is not None


# --- manual runs -----------------------------------------------------------------------------------------------------
class ManualRun:
    """Roles that are started separately, as on several machines."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self._folder = folder
        self._name = name
        self._settings = (*SMALL, *SOON, f"name={name}", *overrides)
        self.path = folder / "runs" / name
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *overrides: str, program: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """`program`: Python program to run instead of the module `role`."""
        settings = [word for word in self._settings if role != "generators" or word.startswith("name=")]
        identity = ["--id", "mine"] if role == "generators" else []
        with self.log(role).open("ab") as output:
            command = [sys.executable, *(program or ("-m", f"slipstream.{role}")), *identity, *settings, *overrides]
            process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=output)
        self._processes.append(process)
        return process

    def log(self, role: str) -> Path:
        return self._folder / f"{self._name}-{role}.log"

    def last_line(self, role: str) -> str:
        """Last line of the log."""
        return self.log(role).read_text().strip().splitlines()[-1]

    def state(self) -> RunState:
        with closing(open_run_store(EmbeddedRedis(self.path / "store").url, self._name, timeout_s=10)) as store:
            return store.run_state()

    def status(self) -> dict:
        command = [sys.executable, str(runs.ROOT / "run_async.py"), "status", "--json", f"name={self._name}"]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, timeout=DEADLINE_S, check=True)
        return json.loads(done.stdout)

    @contextmanager
    def ended_at_last(self) -> Iterator["ManualRun"]:
        try:
            yield self
        finally:
            runs.end(self._processes)


@pytest.mark.long
def test_weights_that_no_generator_applies_are_a_dead_end_until_a_sound_one_joins(folder: Path) -> None:
    with ManualRun(folder, "probe", "learner.max_steps=3").ended_at_last() as run:
        _, learner = run.start("broker"), run.start("learner")
        faulty = run.start("generators", program=("-c", FAULTY))
        assert learner.wait(timeout=DEADLINE_S) == 2, run.log("learner").read_text()[-3000:]
        line = run.last_line("learner")
        assert "error: the evaluation 'before' must come, but no live generator holds verified weights" in line
        assert "mine is unsynced" in line
        assert "must agree with the learner's" in line
        assert re.search(r"Last events: .*s ago mine: evicted", line), line
        faulty.terminate()
        assert faulty.wait(timeout=DEADLINE_S) == 0
        learner = run.start("learner", "resume=true")
        run.start("generators")
        assert learner.wait(timeout=DEADLINE_S) == 0, run.log("learner").read_text()[-3000:]
    runs.assert_none_left(folder)


@pytest.mark.long
def test_a_manual_run_names_the_dead_generator_keeps_its_steps_and_resumes_with_another(folder: Path) -> None:
    settings = ("learner.max_steps=100000", "broker.peer_timeout_s=3", "weights.publish_every_steps=2")
    with ManualRun(folder, "hand", *settings).ended_at_last() as run:
        _, learner, generator = [run.start(role) for role in BY_HAND]
        metrics = run.path / "metrics.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, timeout_s=DEADLINE_S, what="steps"
        )
        psutil.Process(generator.pid).kill()
        assert learner.wait(timeout=DEADLINE_S) == 2, run.log("learner").read_text()[-3000:]
        line = run.last_line("learner")
        assert re.search(r"error: the 4 groups of step \d+ must come, but no generator is alive", line), line
        assert "mine has been gone for" in line
        assert re.search(r"Last events: .*s ago mine: silent for 3 s", line), line
        state = run.state()
        # The weights of an odd step were not published and differ from the previous version.
        covered = CheckpointPointer(state.step, (state.step + 1) // 2, f"step-{state.step:08d}")
        assert (state.phase, state.checkpoint) == ("failed", covered)
        assert run.status()["detail"] == state.detail

        learner = run.start("learner", "resume=true")
        run.start("generators")
        until(lambda: run.state().step > state.step + 3, timeout_s=DEADLINE_S, what="further steps")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    runs.assert_none_left(folder)


@pytest.mark.long
def test_under_wait_groups_without_a_reward_are_rejected_and_not_trained_on(folder: Path) -> None:
    (folder / "repaired").unlink(missing_ok=True)
    rewards = "generators.reward.function=dead_rewards:succeeds_when_repaired"
    with launch(folder, "grader", rewards, "learner.dead_end.policy=wait").ended_at_last() as run:
        until(lambda: "dead end: none of the last" in run.printed, timeout_s=DEADLINE_S, what="the cause")
        assert run.launcher.poll() is None
        assert run.steps == 0
        (folder / "repaired").touch()
        assert run.await_end() == 0, run.printed[-3000:]
    assert {row["learner/failed_fraction"] for row in runs.metrics(folder, "grader")} == {0.0}
    counts, _, audit = left_behind(run)
    assert audit.is_sound, audit
    assert set(counts.reasons) <= {"rejected: no_reward", "retired: "}, counts.reasons
