"""An engine that has requests and makes no step is dead, and the error that ended an engine process is known."""

import logging
import multiprocessing
from collections.abc import Iterator

import pytest

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.engines.vllm.health import (
    StepWatchdog,
    forget_fatal_error,
    read_fatal_error,
    report_fatal_errors,
)
from slipstream.generators.errors import EngineDiedError


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.watchdog = StepWatchdog(limit_s=10.0, clock=lambda: self.now)

    def check(self, *, after_s: float, steps: int, requests: int = 1, is_paused: bool = False) -> None:
        self.now += after_s
        self.watchdog.check(EngineLoad(num_open=requests, num_steps=steps), is_paused=is_paused)


def test_an_engine_without_a_step_while_requests_are_open_is_dead():
    scene = Scene()
    for step in range(20):
        scene.check(after_s=9.0, steps=step)
    scene.check(after_s=10.0, steps=19)
    with pytest.raises(EngineDiedError, match=r"within 10 s .* 64 open"):
        scene.check(after_s=0.1, steps=19, requests=64)


@pytest.mark.parametrize("idle", [{"requests": 0}, {"is_paused": True}])
def test_time_without_work_does_not_count(idle):
    scene = Scene()
    scene.check(after_s=1.0, steps=7)
    scene.check(after_s=9.0, steps=7)
    scene.check(after_s=100.0, steps=7, **idle)
    scene.check(after_s=9.0, steps=7)
    with pytest.raises(EngineDiedError):
        scene.check(after_s=2.0, steps=7)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    forget_fatal_error()
    yield
    forget_fatal_error()


def fail() -> None:
    """As vLLM does it: an error that is answered, the one that ends the process, and a consequence of that."""
    report_fatal_errors()
    engine = logging.getLogger("vllm.v1.engine.core")
    errors = {
        "Invocation of %s method failed": TimeoutError("answered"),
        "EngineCore encountered a fatal error.": RuntimeError("Unsupported CPU attention\nconfiguration: head_dim=16"),
        "EngineCore failed to start.": ValueError("a consequence"),
    }
    for message, error in errors.items():
        try:
            raise error
        except Exception:
            engine.exception(message, *["x"][: message.count("%s")])


def test_the_first_fatal_error_is_the_cause():
    assert read_fatal_error() == ""
    process = multiprocessing.get_context("spawn").Process(target=fail, name="EngineCore_0")
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert read_fatal_error() == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    forget_fatal_error()
    assert read_fatal_error() == ""
