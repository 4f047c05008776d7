"""vLLM's process is killed, then stopped, under the launcher. Its generator ends and is restarted."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, assert_reconciled, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# Publish every fifth step, so that the engine is hit between two updates. In a broadcast, the learner's deadline would
# end the run.
SETTINGS = ("weights.publish_every_steps=5", "learner.stall.timeout_s=60", "learner.max_steps=40")


def test_a_dead_engine_is_replaced_with_its_generator_and_no_prompt_is_lost(tmp_path: Path) -> None:
    check_replacement(tmp_path)


def check_replacement(tmp_path: Path, *settings: str) -> None:
    """Kill and stop the engine of a run with these further settings."""
    runs.make_task(tmp_path, warm=False)
    real = [word for word in SMALL if not word.startswith("generators")]
    with Run(tmp_path, "engine", *SETTINGS, *settings, base=real).ended_at_last() as run:
        for number, message in (
            (signal.SIGKILL, "vLLM's engine process died"),
            (signal.SIGSTOP, "the engine must make a step within 20 s"),
        ):
            steps = run.steps
            until(lambda: run.steps >= steps + 3, timeout_s=180, what="steps")  # noqa: B023
            # The steps may come from stored answers while the generator starts again.
            until(lambda: is_ready(run) and run.engine(), timeout_s=180, what="an engine")
            engine = run.engine()
            assert engine
            os.kill(engine.pid, number)
            until(lambda: message in run.log("generator-0"), timeout_s=60, what=message)  # noqa: B023
            until(lambda: not psutil.pid_exists(engine.pid), timeout_s=60, what="the end of the engine")  # noqa: B023
        assert run.await_end(timeout_s=300) == 0, run.printed[-3000:]
    assert run.printed.count("generator-0 died (exit code 75)") == 2
    assert_all_steps_once(run, 40)
    assert_reconciled(run)
    runs.assert_none_left(tmp_path)


def is_ready(run: Run) -> bool:
    roles = runs.status(run.folder, run.name)["roles"]
    return ("ready", "alive") in [(each["state"], each["liveness"]) for each in roles if each["role"] == "generator"]
