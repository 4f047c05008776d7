"""RewardPool: scores samples in worker processes that are killed when they take too long.

Workers are plain interpreters that import the reward function and nothing large of ours; the caller's event loop talks
to them over socket pairs. An executor library would pass every call through threads of this process, which compete with
that loop for the interpreter lock, and could not tell which of several calls in a worker hangs.
"""

import asyncio
import time
from collections import deque

import msgspec

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.connection import REAP_TIMEOUT_S, RewardWorker, ScoreRequest
from slipstream.generators.rewards.reward import RewardInput, failed_reward

_MAX_FAILED_STARTS = 3


class RewardPool:
    """Scores samples. Belongs to one asyncio loop; workers start with the first sample, or with `start`.

    Invariant: every `score` call ends in a Reward, whatever the function does; `status` tells whether it answered.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Import the functions; without workers they are called here, without a limit. Raises ConfigError."""
        self._config = config
        self._functions = RewardFunctions(config)
        self._queue: deque[ScoreRequest] = deque()
        self._workers: list[RewardWorker] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._is_dispatch_scheduled = False

    async def start(self) -> None:
        """Start the workers ahead of the first sample. Does not wait until they are ready."""
        self._start_workers()

    async def score(self, sample: RewardInput) -> Reward:
        """Return the reward of one sample; raises nothing.

        It takes at most timeout_s after a worker starts on it, for each try; twice that where an async function cannot
        be cancelled.
        """
        return (await self._ask([sample], compares=False))[0]

    def compares(self, data_source: str) -> bool:
        """Whether answers of this source are compared with each other: then `score_group` must be called."""
        return self._functions.compares(data_source)

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        """Return the rewards of answers to one prompt: each scored by itself, then those with a reward compared."""
        rewards: list[Reward | None] = [None] * len(samples)
        if samples and self._functions.scores_alone(samples[0].data_source):
            rewards = [*await asyncio.gather(*map(self.score, samples))]
        kept = [index for index, reward in enumerate(rewards) if reward is None or reward.status == "ok"]
        compared = [msgspec.structs.replace(samples[index], reward=rewards[index]) for index in kept]
        found = await self._ask(compared, compares=True) if compared else []
        for index, reward in zip(kept, found, strict=True):
            rewards[index] = reward
        return [reward for reward in rewards if reward is not None]

    async def _ask(self, samples: list[RewardInput], *, compares: bool) -> list[Reward]:
        tries = 1 + self._config.retries
        if self._config.num_workers == 0:
            return await self._score_here(samples, compares=compares, tries=tries)
        request = ScoreRequest(samples, compares=compares, tries=tries)
        self._queue.append(request)
        self._schedule_dispatch()
        return await request.rewards

    async def _score_here(self, samples: list[RewardInput], *, compares: bool, tries: int) -> list[Reward]:
        functions = self._functions
        for _ in range(tries):
            if compares:
                rewards = await functions.compare(samples)
            elif functions.is_async:
                rewards = [await functions.score_async(samples[0])]
            else:
                rewards = [functions.score(samples[0])]
            if any(reward.status == "ok" for reward in rewards):
                break
        return rewards

    def _on_failure(self, request: ScoreRequest, rewards: list[Reward]) -> None:
        """Try a request again, or let its failure stand."""
        request.tries -= 1
        if request.tries <= 0 or request.rewards.done():
            request.resolve(rewards)
        else:
            self._queue.append(request)
            self._schedule_dispatch()

    def close(self) -> None:
        """End the workers; unanswered calls end with status `error`. Blocks a moment. Idempotent."""
        workers, self._workers = self._workers, []
        unanswered = [*self._queue]
        self._queue.clear()
        for task in self._opening:
            task.cancel()
        for worker in workers:
            unanswered += worker.take_pending()
            worker.end()
        ends_at = time.monotonic() + REAP_TIMEOUT_S
        for worker in workers:
            worker.reap(timeout_s=max(0.0, ends_at - time.monotonic()))
        for request in unanswered:
            request.fail(failed_reward("error", "the reward pool was closed before this response was scored"))

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that score."""
        return [worker.pid for worker in self._workers if worker.is_ready]

    def _schedule_dispatch(self) -> None:
        # At most once per turn of the loop, so that samples that arrive together are sent together.
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Spread the queue evenly over the ready workers, the least busy first."""
        self._is_dispatch_scheduled = False
        while self._queue and self._queue[0].rewards.done():
            self._queue.popleft()
        if self._queue:
            self._start_workers()
        ready = [worker for worker in self._workers if worker.is_ready]
        while self._queue and ready:
            worker = max(ready, key=lambda worker: worker.capacity)
            if (capacity := worker.capacity) <= 0:
                return
            # Rounded up, and no more than an even share: a full first worker would leave the others idle.
            share = min(capacity, -(-len(self._queue) // len(ready)))
            worker.submit([self._queue.popleft() for _ in range(share)])

    def _start_workers(self) -> None:
        while len(self._workers) < self._config.num_workers:
            try:
                worker = RewardWorker(
                    self._config,
                    is_concurrent=self._functions.is_async,
                    on_change=self._on_change,
                    on_failure=self._on_failure,
                )
            except OSError as error:
                if not self._workers:
                    self._fail_queue(str(error))
                return
            self._workers.append(worker)
            task = asyncio.create_task(worker.open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _on_change(self, worker: RewardWorker) -> None:
        if worker.is_closed and worker in self._workers:
            self._workers.remove(worker)
            # Requests that were behind the culprit go back to the head of the queue, in their order.
            self._queue.extendleft(reversed(worker.take_pending()))
            self._record_start(has_failed=not worker.pid, error=worker.error)
        elif worker.is_ready:
            self._record_start(has_failed=False)
        if self._queue:
            self._schedule_dispatch()

    def _record_start(self, *, has_failed: bool, error: str = "") -> None:
        """Fail the whole queue after repeated failed starts: no worker would ever answer it."""
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts < _MAX_FAILED_STARTS:
            return
        self._failed_starts = 0
        self._fail_queue(error)

    def _fail_queue(self, error: str) -> None:
        while self._queue:
            self._queue.popleft().fail(failed_reward("error", f"no reward worker can be started: {error}"))
