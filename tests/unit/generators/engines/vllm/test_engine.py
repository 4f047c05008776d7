"""Calls to vLLM's engine process: their limits."""

import asyncio

import pytest

from slipstream.configs.data import ModelConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.generators.engines.vllm.engine import VllmEngine
from slipstream.generators.engines.vllm.process import engine_arguments
from slipstream.generators.errors import EngineError


async def never() -> None:
    await asyncio.Event().wait()


async def now() -> int:
    return 3


def test_an_engine_that_left_one_call_unanswered_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five calls of half a minute each would outlast the learner's patience with a run without weights.
    monkeypatch.setattr("slipstream.generators.engines.vllm.engine._SECOND_CHANCE_S", 0.01)
    engine = VllmEngine(ModelConfig(path="none"), VllmEngineConfig(), seed=0)

    async def scenario() -> None:
        for limit_s in (0.02, 60.0, 60.0):
            with pytest.raises(EngineError, match=r"within 0\.02 s"):
                await engine._call(never(), timeout_s=limit_s)
        # An answer shows that it was only late.
        assert await engine._call(now()) == 3
        with pytest.raises(EngineError, match=r"within 0\.5 s"):
            await engine._call(never(), timeout_s=0.5)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    ("chosen", "reads_text", "is_on"), [(None, True, True), (None, False, False), (False, True, False)]
)
def test_prefixes_are_cached_where_an_answer_may_have_several_turns(chosen: bool | None, reads_text: bool, is_on: bool):
    config = VllmEngineConfig(enable_prefix_caching=chosen)
    arguments = engine_arguments(ModelConfig(path="none"), config, seed=0, max_positions=64, reads_text=reads_text)
    assert arguments.enable_prefix_caching is is_on
