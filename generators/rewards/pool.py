"""RewardPool: scores samples in worker processes that are killed when they take too long.

An executor library could not identify a hanging call among several.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.reward import RewardInput, failed_reward
from slipstream.generators.rewards.worker import (
    MEMORY_EXIT,
    SIGNAL_EXIT,
    STUCK_EXIT,
    FrameDecoder,
    Mark,
    Request,
    decode_reply,
    frame,
    timeout_reward,
)

REAP_TIMEOUT_S = 2.0
"""Time limit for a worker to kill its reward function's processes and exit."""
_START_TIMEOUT_S = 600.0
"""Time to import the functions and load a reward model from a slow disk."""
_REAP_INTERVAL_S = 0.01
_MAX_PENDING = 16
"""Unanswered samples per worker. A hang delays the others."""


class ScoreRequest:
    """One sample, or all samples of a comparison."""

    def __init__(self, samples: list[RewardInput], *, compares: bool) -> None:
        self.samples = samples
        self.compares = compares
        self.rewards: asyncio.Future[list[Reward]] = asyncio.get_running_loop().create_future()

    def resolve(self, rewards: list[Reward]) -> None:
        """No-op if the caller was canceled."""
        if not self.rewards.done():
            self.rewards.set_result(rewards)

    def fail(self, reward: Reward) -> None:
        self.resolve([reward] * len(self.samples))


class RewardWorker(asyncio.Protocol):
    """Connection to one worker process. Life cycle: open -> ready -> (submit, reply)* -> ending -> closed.

    A worker with synchronous functions replies in order, so its oldest request is to blame for a timeout or crash. A
    worker with async functions cancels slow calls itself. Its Mark identifies a call that blocks or crashes it.
    `on_change(worker)`: it may have capacity, or is closed.
    """

    def __init__(
        self, config: RewardConfig, *, is_concurrent: bool, on_change: Callable[["RewardWorker"], None]
    ) -> None:
        self._config = config
        self._is_concurrent = is_concurrent
        self._on_change = on_change
        self._decoder = FrameDecoder()
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as mark:
            mark.truncate(Mark.SIZE)
            fds = [theirs.fileno(), mark.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.generators.rewards.worker", *map(str, [*fds, os.getpid()])],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # Out of reach of Ctrl-C in the terminal.
                process_group=0,
            )
            self._mark = Mark(mark.fileno())
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self._last_id = 0
        self._pending: dict[int, tuple[float, ScoreRequest]] = {}
        self.pid = 0
        """Scoring process; 0 until it has loaded the reward function."""
        self.is_closed = False
        self.error = ""

    def take_pending(self) -> list[ScoreRequest]:
        requests = [request for _, request in self._pending.values()]
        self._pending.clear()
        return requests

    @property
    def capacity(self) -> int:
        most = self._config.max_concurrency if self._is_concurrent else _MAX_PENDING
        return most - len(self._pending)

    async def open(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    @property
    def is_ready(self) -> bool:
        return bool(self.pid) and not self._is_ending

    def submit(self, requests: list[ScoreRequest]) -> None:
        assert self._transport is not None
        now, frames = asyncio.get_running_loop().time(), []
        for request in requests:
            self._last_id += 1
            try:
                frames.append(frame(Request(self._last_id, request.samples, request.compares)))
                self._pending[self._last_id] = (now, request)
            except Exception as error:
                got = f"must be plain text and numbers, got {type(error).__name__}: {error}"
                request.fail(failed_reward("error", f"the reward's input from an agent {got}"))
        # A running timer is that of the oldest request.
        if self._pending and self._timer is None:
            self._start_timer()
        self._transport.write(b"".join(frames))

    def end(self) -> None:
        """Ask the process to exit. Unanswered requests stay for `take_pending`."""
        self._is_ending = True  # so that `connection_lost` blames no request
        self._process.terminate()
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()

    def reap(self, *, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the exit, then kill the process. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(_START_TIMEOUT_S, self._on_timeout)
        transport.write(frame(self._config))

    def data_received(self, data: bytes) -> None:
        for body in self._decoder.feed(data):
            reply = decode_reply(body)
            if isinstance(reply, int):
                self.pid = reply
            elif isinstance(reply, str):
                self.error = reply
            elif pending := self._pending.pop(reply.id, None):
                pending[1].resolve(reply.rewards)
        self._stop_timer()
        if self._pending:
            self._start_timer()
        self._on_change(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        is_ours, self._is_ending = self._is_ending, True
        self._poll_exit(ends_at=asyncio.get_running_loop().time() + REAP_TIMEOUT_S, is_ours=is_ours)

    def _poll_exit(self, *, ends_at: float, is_ours: bool) -> None:
        loop, code = asyncio.get_running_loop(), self._process.poll()
        if code is None and loop.time() < ends_at:
            loop.call_later(_REAP_INTERVAL_S, lambda: self._poll_exit(ends_at=ends_at, is_ours=is_ours))
            return
        if code is None or code < 0:
            self._kill()
        self.is_closed = True
        status, error = _describe_exit(code, self._config)
        self.error = self.error or error
        if not is_ours and code != STUCK_EXIT:
            self._fail_culprit(failed_reward(status, self.error))
        self._on_change(self)

    def _fail_culprit(self, reward: Reward) -> None:
        """Fail the request that ran last: the marked one among concurrent calls, else the oldest."""
        # Without a mark, the process died between two calls.
        marked = self._mark.get() if self._is_concurrent else 0
        culprit = marked if marked in self._pending else next(iter(self._pending), None)
        if culprit is not None:
            self._pending.pop(culprit)[1].fail(reward)

    def _kill(self) -> None:
        """Kill a worker that does not exit, or a killed supervisor's scorer."""
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    # --- time limit ----------------------------------------------------------------------------------------------
    def _start_timer(self) -> None:
        loop, limit_s = asyncio.get_running_loop(), self._config.timeout_s
        # The oldest request began at the last reply.
        ends_at = loop.time() + limit_s
        if self._is_concurrent:
            # The worker cancels late calls after `timeout_s`.
            ends_at = next(iter(self._pending.values()))[0] + 2 * limit_s
        self._timer = loop.call_at(ends_at, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        late = failed_reward("error", f"a reward worker must be ready within {_START_TIMEOUT_S:g} s, but was not")
        if self.pid:
            late = timeout_reward(self._config)
        self.error = late.detail
        self._fail_culprit(late)
        self.end()


def _describe_exit(code: int | None, config: RewardConfig) -> tuple[str, str]:
    number = code - SIGNAL_EXIT if code and code > SIGNAL_EXIT else -code if code and code < 0 else 0
    if number == signal.SIGXCPU:
        limit = f"generators.reward.max_cpu_s ({config.max_cpu_s} s)"
        return "timeout", f"the reward function must use at most {limit} of CPU time, but used more"
    if code == MEMORY_EXIT:
        limit = f"generators.reward.max_memory_mib ({config.max_memory_mib} MiB)"
        return "error", f"MemoryError: the reward function must use at most {limit}, but requested more"
    cause = f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
    return "error", f"the reward worker died ({cause}) while {config.summary} scored this response"


_MAX_FAILED_STARTS = 3
_NO_WORKER = "no reward worker could be started"


class RewardPool:
    """Implements Scorer, on one asyncio loop. Workers start with the first sample or with `start`.

    Invariant: a failure is a Reward's `status`, never an exception.
    """

    def __init__(self, config: RewardConfig) -> None:
        """With `num_workers=0`, the functions run in this process without limits. Raises ConfigError."""
        self._config = config
        self._functions = RewardFunctions(config)
        self._queue: deque[ScoreRequest] = deque()
        self._workers: list[RewardWorker] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._is_dispatch_scheduled = False

    async def start(self) -> None:
        """Does not wait for the workers."""
        self._start_workers()

    async def score(self, sample: RewardInput) -> Reward:
        """Takes at most `timeout_s`, or twice that if an async function cannot be canceled."""
        return (await self._ask([sample], compares=False))[0]

    def compares(self, data_source: str) -> bool:
        return self._functions.compares(data_source)

    async def score_group(self, samples: list[RewardInput]) -> list[Reward]:
        rewards: list[Any] = [None] * len(samples)
        if samples and self._functions.scores_alone(samples[0].data_source):
            rewards = [*await asyncio.gather(*map(self.score, samples))]
        kept = [index for index, reward in enumerate(rewards) if reward is None or reward.status == "ok"]
        compared = [msgspec.structs.replace(samples[index], reward=rewards[index]) for index in kept]
        found = dict(zip(kept, await self._ask(compared, compares=True) if compared else [], strict=True))
        return [found.get(index, reward) for index, reward in enumerate(rewards)]

    async def _ask(self, samples: list[RewardInput], *, compares: bool) -> list[Reward]:
        if self._config.num_workers == 0:
            return await self._functions.score_all(samples, compares=compares)
        request = ScoreRequest(samples, compares=compares)
        self._queue.append(request)
        self._schedule_dispatch()
        return await request.rewards

    def close(self) -> None:
        """Stop the workers and fail unanswered calls. Blocks at most REAP_TIMEOUT_S. Idempotent."""
        workers, self._workers = self._workers, []
        for task in self._opening:
            task.cancel()
        for worker in workers:
            self._queue += worker.take_pending()
            worker.end()
        ends_at = time.monotonic() + REAP_TIMEOUT_S
        for worker in workers:
            worker.reap(timeout_s=max(0.0, ends_at - time.monotonic()))
        self._fail_queue("the reward pool was closed before this response was scored")

    def _schedule_dispatch(self) -> None:
        # Once per loop iteration, so that samples travel together.
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
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
            # An even share at most, so that no worker idles.
            share = min(capacity, -(-len(self._queue) // len(ready)))
            worker.submit([self._queue.popleft() for _ in range(share)])

    def _start_workers(self) -> None:
        while len(self._workers) < self._config.num_workers:
            try:
                worker = RewardWorker(self._config, is_concurrent=self._functions.is_async, on_change=self._on_change)
            except OSError as error:
                if not self._workers:
                    self._fail_queue(f"{_NO_WORKER}: {error}")
                return
            self._workers.append(worker)
            task = asyncio.create_task(worker.open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _on_change(self, worker: RewardWorker) -> None:
        if worker.is_closed and worker in self._workers:
            self._workers.remove(worker)
            # The other requests return to the head of the queue.
            self._queue.extendleft(reversed(worker.take_pending()))
            self._record_start(has_failed=not worker.pid, error=worker.error)
        elif worker.is_ready:
            self._record_start(has_failed=False)
        if self._queue:
            self._schedule_dispatch()

    def _record_start(self, *, has_failed: bool, error: str = "") -> None:
        """Fail the queue after repeated failed starts."""
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts == _MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._fail_queue(f"{_NO_WORKER}: {error}")

    def _fail_queue(self, error: str) -> None:
        while self._queue:
            self._queue.popleft().fail(failed_reward("error", error))
