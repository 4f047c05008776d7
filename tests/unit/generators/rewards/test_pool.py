import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput

FUNCTION = "tests.unit.generators.rewards.samples:by_response"


def sample(response: str = "") -> RewardInput:
    return RewardInput(prompt="48213=", response=response, ground_truth="31284")


def use_pool(
    use: Callable[[RewardPool], Awaitable[None]], *, num_workers: int = 1, timeout_s: float = 20.0, name: str = FUNCTION
) -> None:
    async def session() -> None:
        pool = RewardPool(name, {}, num_workers=num_workers, timeout_s=timeout_s)
        try:
            await asyncio.wait_for(use(pool), 50)
        finally:
            pool.close()

    asyncio.run(session())


async def until(is_true: Callable[[], bool], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_sample_gets_its_own_reward(num_workers: int):
    async def use(pool: RewardPool) -> None:
        rewards = await asyncio.gather(*(pool.score(sample(r)) for r in ["", "raise x", "nan", "print", ""]))
        assert [r.status for r in rewards] == ["ok", "error", "error", "ok", "ok"]
        assert rewards[0] == Reward(total=0.5)
        assert rewards[1].detail == "ValueError: no good: x"

    use_pool(use, num_workers=num_workers)


def test_a_hang_is_a_timeout_and_costs_only_the_culprit():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        answers = ["", "", "spin", *[""] * 40]
        rewards = await asyncio.gather(*(pool.score(sample(answer)) for answer in answers))
        assert [r.status for r in rewards] == ["timeout" if answer else "ok" for answer in answers]
        assert "generators.reward.timeout_s (0.3 s)" in rewards[2].detail

    use_pool(use, timeout_s=0.3)


def test_two_hangs_in_a_row_are_two_timeouts():
    async def use(pool: RewardPool) -> None:
        rewards = await asyncio.gather(*(pool.score(sample(answer)) for answer in ["sleep 60", "sleep 60", ""]))
        assert [r.status for r in rewards] == ["timeout", "timeout", "ok"]

    use_pool(use, timeout_s=0.3)


def test_time_in_the_queue_does_not_count():
    async def use(pool: RewardPool) -> None:
        rewards = await asyncio.gather(*(pool.score(sample("sleep 0.2")) for _ in range(6)))
        assert [r.status for r in rewards] == ["ok"] * 6

    use_pool(use, timeout_s=0.9)


@pytest.mark.parametrize("response", ["die", "exit"])
def test_a_reward_that_kills_its_worker_is_an_error_and_the_others_are_scored(response: str):
    async def use(pool: RewardPool) -> None:
        rewards = await asyncio.gather(*(pool.score(sample(r)) for r in ["", response, "", ""]))
        assert [r.status for r in rewards] == ["ok", "error", "ok", "ok"]
        assert "worker died" in rewards[1].detail

    use_pool(use)


def test_a_worker_killed_from_outside_is_replaced():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        (victim,) = pool.worker_pids
        os.kill(victim, signal.SIGKILL)
        await until(lambda: pool.worker_pids != [victim])
        assert await pool.score(sample()) == Reward(total=0.5)
        assert pool.worker_pids != [victim]

    use_pool(use)


def test_several_workers_share_the_samples():
    async def use(pool: RewardPool) -> None:
        seen: set[float] = set()
        deadline = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < deadline:
            rewards = await asyncio.gather(*(pool.score(sample("pid")) for _ in range(6)))
            seen |= {reward.total for reward in rewards}
        assert seen == {float(pid) for pid in pool.worker_pids}
        assert len(seen) == 3

    use_pool(use, num_workers=3)


def test_a_worker_ignores_ctrl_c_and_imports_nothing_large():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        (worker,) = pool.worker_pids
        os.kill(worker, signal.SIGINT)
        assert (await pool.score(sample("heavy"))).total == 0.0
        assert pool.worker_pids == [worker]
        assert os.getpgid(worker) != os.getpgid(0)

    use_pool(use)


def test_a_cancelled_call_does_not_disturb_the_next():
    async def use(pool: RewardPool) -> None:
        await pool.score(sample())
        slow = asyncio.create_task(pool.score(sample("sleep 0.2")))
        await asyncio.sleep(0)
        slow.cancel()
        assert await pool.score(sample("raise x")) != Reward(total=0.5)
        assert await pool.score(sample()) == Reward(total=0.5)

    use_pool(use)


def test_closing_ends_open_calls_and_workers():
    async def session() -> None:
        pool = RewardPool(FUNCTION, {}, num_workers=1, timeout_s=20.0)
        await pool.score(sample())
        (worker,) = pool.worker_pids
        call = asyncio.create_task(pool.score(sample("sleep 60")))
        await asyncio.sleep(0.05)
        pool.close()
        pool.close()
        assert (await asyncio.wait_for(call, 5)).status == "error"
        assert not psutil.pid_exists(worker)

    asyncio.run(session())


_PARENT = """
import asyncio, sys
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.rewards.reward import RewardInput

async def main():
    pool = RewardPool("tests.unit.generators.rewards.samples:by_response", {}, num_workers=1, timeout_s=60)
    await pool.score(RewardInput(prompt="", response="", ground_truth=""))
    print(pool.worker_pids[0], flush=True)
    await pool.score(RewardInput(prompt="", response=sys.argv[1], ground_truth=""))

asyncio.run(main())
"""


def test_workers_die_with_their_parent_even_during_a_sample():
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, "spin"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(10)
    worker.wait(5)
