"""An engine that has requests and makes no step is dead, whatever else it answers."""

import pytest

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.engines.vllm.load import StallWatch
from slipstream.generators.errors import EngineDiedError


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.watch = StallWatch(limit_s=10.0, clock=lambda: self.now)

    def look(self, *, after_s: float, steps: int, requests: int = 1, is_paused: bool = False) -> None:
        self.now += after_s
        self.watch.look(EngineLoad(num_open=requests, num_steps=steps), is_paused=is_paused)


def test_one_that_steps_lives_however_long_its_requests_take():
    scene = Scene()
    for step in range(20):
        scene.look(after_s=9.0, steps=step)


def test_one_that_stands_still_with_open_requests_is_dead():
    scene = Scene()
    scene.look(after_s=1.0, steps=7)
    scene.look(after_s=10.0, steps=7)
    with pytest.raises(
        EngineDiedError, match=r"within generators.engine.stall_timeout_s \(10 s\) while .* with 64 of them"
    ):
        scene.look(after_s=0.1, steps=7, requests=64)


@pytest.mark.parametrize("rest", [{"requests": 0}, {"is_paused": True}])
def test_time_in_which_it_has_nothing_to_do_does_not_count(rest):
    scene = Scene()
    scene.look(after_s=1.0, steps=7)
    scene.look(after_s=9.0, steps=7)
    scene.look(after_s=100.0, steps=7, **rest)
    scene.look(after_s=9.0, steps=7)
    with pytest.raises(EngineDiedError):
        scene.look(after_s=2.0, steps=7)
