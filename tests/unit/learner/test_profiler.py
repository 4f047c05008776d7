"""StepProfiler: which steps are recorded and when the recording ends."""

from pathlib import Path

import pytest

from slipstream.broker.messages import Message, Profile
from slipstream.buffer.records import StepEntry
from slipstream.learner.profiler import StepProfiler
from tests.builders import make_run
from tests.memory_store.store import MemoryStore


class Scene:
    """A learner that runs steps. Each version reaches the generators during the next step."""

    def __init__(self, folder: Path, steps: list[int] | None) -> None:
        run = make_run(profile={"steps": steps}, learner={"max_steps": 20}, staleness={"max_lag": 1})
        self.store = MemoryStore()
        self.store.open_run("run", config_json="{}", num_rows=7, seed=0)
        self.sent: list[Message] = []
        self.orders: list[tuple[int, str]] = []
        (folder / "run").mkdir()
        self.profiler = StepProfiler(run, store=self.store, folder=folder / "run" / "profile", send=self.sent.append)

    def step(self, step: int) -> None:
        self.profiler.begin_step(step)
        entry = StepEntry(step, step - 1, step, 0, "", [step], [[f"{step}-0-0"]])
        self.profiler.record_step(entry, claimed_at_ns=1)
        self.profiler.end_step(step, published=step - 1)
        self.orders += [(step, order.stage) for order in self.sent if isinstance(order, Profile)]
        self.sent.clear()


@pytest.mark.parametrize("steps", [[5, 6], None])
def test_recording_begins_before_the_first_step_and_ends_with_the_version_of_the_last(
    tmp_path: Path, steps: list[int] | None
) -> None:
    scene = Scene(tmp_path, steps)
    if steps is None:
        scene.store.request("learner", "profile", "2 3")  # too early: trajectories of step 2 exist already
    for step in range(3, 10):
        scene.step(step)
    assert scene.orders == [(3, "events"), (5, "engine"), (7, "end")]
    scene.profiler.join()
    assert (tmp_path / "run" / "profile" / "trace.json.gz").is_file()
    assert scene.profiler.gauges == {}


def test_steps_that_are_over_when_a_run_is_resumed_are_not_recorded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [5, 6])
    for step in range(8, 12):
        scene.step(step)
    assert scene.orders == []
