"""vLLM's process is killed or stopped under the launcher. Its generator ends and is restarted."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.runs import SMALL, Run, assert_all_steps_once, assert_reconciled, until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 40
SETTINGS = tuple(word for word in SMALL if not word.startswith("generators"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_task(tmp_path_factory.mktemp("engine"), warm=False)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "vLLM's engine process died"),
        (signal.SIGSTOP, "the engine must make a step within generators.engine.stall_timeout_s (4 s)"),
    ],
)
def test_a_dead_engine_is_replaced_with_its_generator_and_no_prompt_is_lost(
    folder: Path, number: signal.Signals, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = number.name.lower()
    monkeypatch.setattr("tests.runs.SMALL", SETTINGS)
    # Publish every fifth step, so that the engine is hit between two updates. In a broadcast, the learner's deadline
    # would end the run.
    overrides = (f"learner.max_steps={STEPS}", "weights.publish_every_steps=5", "generators.engine.stall_timeout_s=4")
    with Run(folder, name, *overrides).ended_at_last() as run:
        until(lambda: run.steps >= 3, timeout_s=180, what="steps")
        children = run.role("slipstream.generators").children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        os.kill(engine.pid, number)
        assert run.await_end(timeout_s=300) == 0, run.printed[-3000:]
    assert message in run.log("generator-0")
    assert "generator-0 died (exit code 75)" in run.printed
    assert not psutil.pid_exists(engine.pid)
    assert_all_steps_once(run, STEPS)
    assert_reconciled(run)
    runs.assert_none_left(folder)
