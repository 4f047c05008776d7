"""The error that ends an engine process reaches the process that started it."""

import logging
import multiprocessing
from collections.abc import Callable, Iterator

import pytest

from slipstream.generators.engines.vllm.health import forget_fatal_error, read_fatal_error, report_fatal_errors


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    forget_fatal_error()
    yield
    forget_fatal_error()


def in_engine_process(work: Callable[[], None]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, name="EngineCore_0")
    process.start()
    process.join(30)
    assert process.exitcode == 0


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
    in_engine_process(fail)
    assert read_fatal_error() == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    forget_fatal_error()
    assert read_fatal_error() == ""


def test_a_killed_engine_leaves_none():
    assert read_fatal_error() == ""
