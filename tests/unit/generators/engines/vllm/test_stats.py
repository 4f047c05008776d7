"""StepWatchdog: an engine that has requests and makes no step is dead, although it still answers."""

import pytest

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.engines.vllm.health import StepWatchdog
from slipstream.generators.errors import EngineDiedError
from tests.fakes import FakeClock


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock(0.0)
        self.watchdog = StepWatchdog(limit_s=10.0, clock=self.clock)

    def check(self, *, after_s: float, steps: int, requests: int = 1, is_paused: bool = False) -> None:
        self.clock.now += after_s
        self.watchdog.check(EngineLoad(num_open=requests, num_steps=steps), is_paused=is_paused)


def test_an_engine_that_steps_is_alive_however_long_its_requests_take():
    scene = Scene()
    for step in range(20):
        scene.check(after_s=9.0, steps=step)


def test_an_engine_without_a_step_while_requests_are_open_is_dead():
    scene = Scene()
    scene.check(after_s=1.0, steps=7)
    scene.check(after_s=10.0, steps=7)
    with pytest.raises(EngineDiedError, match=r"generators.engine.stall_timeout_s \(10 s\) .* 64 open"):
        scene.check(after_s=0.1, steps=7, requests=64)


@pytest.mark.parametrize("idle", [{"requests": 0}, {"is_paused": True}])
def test_time_without_work_does_not_count(idle):
    scene = Scene()
    scene.check(after_s=1.0, steps=7)
    scene.check(after_s=9.0, steps=7)
    scene.check(after_s=100.0, steps=7, **idle)
    scene.check(after_s=9.0, steps=7)
    with pytest.raises(EngineDiedError):
        scene.check(after_s=2.0, steps=7)
