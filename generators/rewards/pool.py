"""RewardPool: scores samples in worker processes that are killed when they take too long.

Workers are plain interpreters that import the reward function and nothing large of ours; the caller's event loop talks
to them over socket pairs. An executor library would pass every call through threads of this process, which compete with
that loop for the interpreter lock, and could not tell which of several calls in a worker hangs.
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
"""Longest wait for a worker to kill what its reward function started, and to end."""
_REAP_INTERVAL_S = 0.01
_MAX_PENDING = 16
"""Samples sent to one worker ahead of its replies: enough to keep it busy, few enough that a hang delays few others."""


class ScoreRequest:
    """A sample, or all that are compared, and the future of their rewards."""

    def __init__(self, samples: list[RewardInput], *, compares: bool, tries: int) -> None:
        self.samples = samples
        self.compares = compares
        self.tries = tries
        """Calls that it may still take, the one that runs included."""
        self.rewards: asyncio.Future[list[Reward]] = asyncio.get_running_loop().create_future()

    def resolve(self, rewards: list[Reward]) -> None:
        """Set the rewards, unless the caller was cancelled."""
        if not self.rewards.done():
            self.rewards.set_result(rewards)

    def fail(self, reward: Reward) -> None:
        """Give every sample this one."""
        self.resolve([reward] * len(self.samples))


class RewardWorker(asyncio.Protocol):
    """Connection to one worker process. Life: open -> ready -> (submit, reply)* -> ending -> closed.

    A worker of synchronous functions replies in order, so the time limit always applies to its oldest pending request,
    and a timeout or crash is that request's fault alone. One of async functions cancels the calls that take too long
    itself; where it cannot, because one of them holds up all others or takes the process down, its mark tells which.
    `on_change(worker)` is called when it may have capacity, and when it is closed; `on_failure(request, rewards)` for a
    request without any reward.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        is_concurrent: bool,
        on_change: Callable[["RewardWorker"], None],
        on_failure: Callable[[ScoreRequest, list[Reward]], None],
    ) -> None:
        self._config = config
        self._is_concurrent = is_concurrent
        self._on_change = on_change
        self._on_failure = on_failure
        self._decoder = FrameDecoder()
        self._socket, self._process, self._mark = _launch()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self._last_id = 0
        self._pending: dict[int, tuple[float, ScoreRequest]] = {}
        self.pid = 0
        """Process that scores; 0 until the reward function is loaded."""
        self.is_closed = False
        self.error = ""

    def take_pending(self) -> list[ScoreRequest]:
        """Return what is submitted and not yet answered, oldest first, for another worker to answer."""
        requests = [request for _, request in self._pending.values()]
        self._pending.clear()
        return requests

    @property
    def capacity(self) -> int:
        """Requests that it may still be given."""
        most = self._config.max_concurrency if self._is_concurrent else _MAX_PENDING
        return most - len(self._pending)

    async def open(self) -> None:
        """Connect to the process; it becomes ready when it reports that the function is loaded."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return bool(self.pid) and not self._is_ending

    def submit(self, requests: list[ScoreRequest]) -> None:
        assert self._transport is not None
        now, frames = asyncio.get_running_loop().time(), []
        for request in requests:
            self._last_id += 1
            try:
                frames.append(frame(Request(self._last_id, request.samples, request.compares)))
            except Exception as error:
                got = f"must be plain texts and numbers, got {type(error).__name__}: {error}"
                request.fail(failed_reward("error", f"what an agent leaves for the reward {got}"))
            else:
                self._pending[self._last_id] = (now, request)
        # With requests pending the timer already runs, for the oldest of them.
        if self._pending and self._timer is None:
            self._start_timer()
        self._transport.write(b"".join(frames))

    def end(self) -> None:
        """Ask the process to end with all that the function started; unanswered requests wait for `take_pending`."""
        # Marks the end as ours: `connection_lost` must not blame the oldest request for it.
        self._is_ending = True
        self._process.terminate()
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()

    def reap(self, *, timeout_s: float) -> None:
        """Wait for the end, then kill what is left; blocks at most `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._config.start_timeout_s, self._on_timeout)
        transport.write(frame(self._config))

    def data_received(self, data: bytes) -> None:
        for body in self._decoder.feed(data):
            reply = decode_reply(body)
            if isinstance(reply, int):
                self.pid = reply
            elif isinstance(reply, str):
                self.error = reply
            elif pending := self._pending.pop(reply.id, None):
                self._settle(pending[1], reply.rewards)
        self._stop_timer()
        if self._pending:
            self._start_timer()
        self._on_change(self)

    def _settle(self, request: ScoreRequest, rewards: list[Reward]) -> None:
        if any(reward.status == "ok" for reward in rewards):
            request.resolve(rewards)
        else:
            self._on_failure(request, rewards)

    def connection_lost(self, error: Exception | None) -> None:
        """Await the exit code, which says why; the worker ends a little later than its connection."""
        self._stop_timer()
        is_ours, self._is_ending = self._is_ending, True
        loop = asyncio.get_running_loop()
        self._poll_exit(ends_at=loop.time() + REAP_TIMEOUT_S, is_ours=is_ours)

    def _poll_exit(self, *, ends_at: float, is_ours: bool) -> None:
        # In steps: a wait here would hold up every other request of this process.
        loop, code = asyncio.get_running_loop(), self._process.poll()
        if code is None and loop.time() < ends_at:
            loop.call_later(_REAP_INTERVAL_S, lambda: self._poll_exit(ends_at=ends_at, is_ours=is_ours))
            return
        if code is None or code < 0:
            self._kill()
        self._close(code, is_ours=is_ours)

    def _close(self, code: int | None, *, is_ours: bool) -> None:
        """Fail the request that took the process down; the others are left to another worker."""
        self.is_closed = True
        status, error = _describe_exit(code, self._config)
        self.error = self.error or error
        if not is_ours and code != STUCK_EXIT:
            self._fail_culprit(failed_reward(status, self.error))
        self._on_change(self)

    def _fail_culprit(self, reward: Reward) -> None:
        """Fail the request whose code runs, or ran last: the oldest, except among calls at the same time."""
        # Without a mark, the process ended between the steps of calls: its oldest is blamed, so that the rest go on.
        marked = self._mark.get() if self._is_concurrent else 0
        culprit = marked if marked in self._pending else next(iter(self._pending), None)
        if culprit is not None:
            request = self._pending.pop(culprit)[1]
            self._settle(request, [reward] * len(request.samples))

    def _kill(self) -> None:
        """Kill a worker that did not end, or whose supervisor was killed before it could clean up."""
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    # --- time limit ----------------------------------------------------------------------------------------------
    def _start_timer(self) -> None:
        """Watch the oldest request, which is the next to be late."""
        loop, limit_s = asyncio.get_running_loop(), self._config.timeout_s
        if self._is_concurrent:
            # The worker ends late calls itself. Where it has not, one call has held up all others for `timeout_s`.
            submitted_at, _ = next(iter(self._pending.values()))
            ends_at = submitted_at + 2 * limit_s
        else:
            # The limit starts anew for the next request, which the worker begins with its last reply.
            ends_at = loop.time() + limit_s
        self._timer = loop.call_at(ends_at, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.pid:
            late = timeout_reward(self._config)
        else:
            limit = f"generators.reward.start_timeout_s ({self._config.start_timeout_s:g} s)"
            late = failed_reward("error", f"a reward worker must be ready within {limit}, it was not")
        self.error = late.detail
        self._fail_culprit(late)
        self.end()


def _describe_exit(code: int | None, config: RewardConfig) -> tuple[str, str]:
    """Return status and detail for the request during which a worker ended with this exit code."""
    number = code - SIGNAL_EXIT if code and code > SIGNAL_EXIT else -code if code and code < 0 else 0
    if number == signal.SIGXCPU:
        limit = f"generators.reward.max_cpu_s ({config.max_cpu_s} s)"
        return "timeout", f"the reward function must do with {limit} of CPU time, it used more"
    if code == MEMORY_EXIT:
        limit = f"generators.reward.max_memory_mib ({config.max_memory_mib} MiB)"
        return "error", f"MemoryError: the reward function must do with {limit}, it asked for more"
    cause = f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
    return "error", f"the reward worker died ({cause}) while {config.summary} scored this response"


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes], Mark]:
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as mark:
        mark.truncate(Mark.SIZE)
        fds = [theirs.fileno(), mark.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.generators.rewards.worker", *map(str, [*fds, os.getpid()])],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            # In a process group of its own, which Ctrl-C at the terminal does not reach.
            process_group=0,
        )
        return ours, process, Mark(mark.fileno())


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
