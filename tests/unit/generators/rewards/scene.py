"""A reward pool around one coroutine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput

T = TypeVar("T")
SAMPLES = "tests.unit.generators.rewards.samples"


def sample(response: str = "", *, prompt: Any = "48213=", truth: Any = "31284", **fields: Any) -> RewardInput:
    return RewardInput(prompt=prompt, response=response, ground_truth=truth, **fields)


async def until(is_true: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def in_pool(config: RewardConfig, use: Callable[[RewardPool], Awaitable[T]], *, limit_s: float = 50.0) -> T:
    async def session() -> T:
        pool = RewardPool(config)
        try:
            return await asyncio.wait_for(use(pool), limit_s)
        finally:
            pool.close()

    return asyncio.run(session())


def worker_pids(pool: RewardPool) -> list[int]:
    return [worker.pid for worker in pool._workers if worker.is_ready]


def scores(config: RewardConfig, samples: list[RewardInput], *, compares: bool = False) -> list[Reward]:
    async def use(pool: RewardPool) -> list[Reward]:
        if compares:
            return await pool.score_group(samples)
        return await asyncio.gather(*map(pool.score, samples))

    return in_pool(config, use)
