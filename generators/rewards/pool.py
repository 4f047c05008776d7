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
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from slipstream.buffer.trajectory import Reward
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.reward import RewardInput, evaluate, failed_reward, load_reward
from slipstream.generators.rewards.worker import MEMORY_EXIT, SIGNAL_EXIT, FrameDecoder, Job, decode_reply, frame

_START_TIMEOUT_S = 60.0
_REAP_TIMEOUT_S = 2.0
"""Longest wait for a worker to kill what its reward function started, and to end."""
_REAP_INTERVAL_S = 0.01
_MAX_PENDING = 16
"""Samples sent to one worker ahead of its replies: enough to keep it busy, few enough that a hang delays few others."""
_MAX_FAILED_STARTS = 3


class ScoreRequest:
    """A sample and the future of its reward."""

    def __init__(self, sample: RewardInput) -> None:
        self.sample = sample
        self.reward: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()

    def resolve(self, reward: Reward) -> None:
        """Set the reward, unless the caller was cancelled."""
        if not self.reward.done():
            self.reward.set_result(reward)


class RewardWorker(asyncio.Protocol):
    """Connection to one worker process. Life: open -> ready -> (submit, reply)* -> ending -> closed.

    A worker replies in order, so the time limit always applies to its oldest pending request, and a timeout or crash is
    that request's fault alone. `on_change(worker)` is called when it may have capacity, and when it is closed.
    """

    def __init__(self, config: RewardConfig, *, on_change: Callable[["RewardWorker"], None]) -> None:
        self._config = config
        self._on_change = on_change
        self._decoder = FrameDecoder()
        self._socket, self._process = _launch()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_ending = False
        self.pending: deque[ScoreRequest] = deque()
        """Submitted and not yet answered, oldest first; once closed, for another worker to answer."""
        self.pid = 0
        """Process that scores; 0 until the reward function is loaded."""
        self.is_closed = False
        self.error = ""

    async def open(self) -> None:
        """Connect to the process; it becomes ready when it reports that the function is loaded."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return bool(self.pid) and not self._is_ending

    def submit(self, requests: list[ScoreRequest]) -> None:
        assert self._transport is not None
        # With requests pending the timer already runs, for the oldest of them.
        if not self.pending:
            self._start_timer(self._config.timeout_s, "timeout")
        self.pending.extend(requests)
        self._transport.write(b"".join(frame(request.sample) for request in requests))

    def end(self) -> None:
        """Ask the process to end with all that the function started; unanswered requests stay in `pending`."""
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
        self._start_timer(_START_TIMEOUT_S, "error")
        config = self._config
        job = Job(config.function, config.arguments, config.max_cpu_s, config.max_memory_mib)
        transport.write(frame(job))

    def data_received(self, data: bytes) -> None:
        for body in self._decoder.feed(data):
            reply = decode_reply(body)
            if isinstance(reply, int):
                self.pid = reply
            elif self.pending:
                self.pending.popleft().resolve(reply)
        # The limit starts anew for the next request, which the worker begins with this reply.
        self._stop_timer()
        if self.pending:
            self._start_timer(self._config.timeout_s, "timeout")
        self._on_change(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Await the exit code, which says why; the worker ends a little later than its connection."""
        self._stop_timer()
        is_ours, self._is_ending = self._is_ending, True
        loop = asyncio.get_running_loop()
        self._poll_exit(ends_at=loop.time() + _REAP_TIMEOUT_S, is_ours=is_ours)

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
        """Fail the oldest request if it took the process down; the others are left to another worker."""
        self.is_closed = True
        status, error = _describe_exit(code, self._config)
        self.error = self.error or error
        if self.pending and not is_ours:
            self.pending.popleft().resolve(failed_reward(status, self.error))
        self._on_change(self)

    def _kill(self) -> None:
        """Kill a worker that did not end, or whose supervisor was killed before it could clean up."""
        self._process.kill()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    # --- time limit ----------------------------------------------------------------------------------------------
    def _start_timer(self, limit_s: float, status: str) -> None:
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._on_timeout, limit_s, status)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, limit_s: float, status: str) -> None:
        self.error = (
            f"the reward function must answer within generators.reward.timeout_s ({limit_s:g} s), it did not"
            if self.pid
            else f"a reward worker must be ready within {limit_s:g} s, it was not"
        )
        if self.pending:
            self.pending.popleft().resolve(failed_reward(status, self.error))
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
    return "error", f"the reward worker died ({cause}) while it scored this response"


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.generators.rewards.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # In a process group of its own, which Ctrl-C at the terminal does not reach.
            process_group=0,
        )
    return ours, process


class RewardPool:
    """Scores samples. Belongs to one asyncio loop; workers start with the first sample, or with `start`.

    Invariant: every `score` call ends in a Reward, whatever the function does; `status` tells whether it answered.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Import the function; without workers it is called in this process, without a limit. Raises ConfigError."""
        self._config = config
        self._function = load_reward(config.function, config.arguments)
        self._queue: deque[ScoreRequest] = deque()
        self._workers: list[RewardWorker] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._is_dispatch_scheduled = False

    async def start(self) -> None:
        """Start the workers ahead of the first sample. Does not wait until they are ready."""
        self._start_workers()

    async def score(self, sample: RewardInput) -> Reward:
        """Return the reward of one sample, at most timeout_s after a worker starts on it; raises nothing."""
        if self._config.num_workers == 0:
            return evaluate(self._function, sample)
        request = ScoreRequest(sample)
        self._queue.append(request)
        self._schedule_dispatch()
        return await request.reward

    def close(self) -> None:
        """End the workers; unanswered calls end with status `error`. Blocks a moment. Idempotent."""
        workers, self._workers = self._workers, []
        unanswered = [*self._queue]
        self._queue.clear()
        for task in self._opening:
            task.cancel()
        for worker in workers:
            unanswered += worker.pending
            worker.pending.clear()
            worker.end()
        ends_at = time.monotonic() + _REAP_TIMEOUT_S
        for worker in workers:
            worker.reap(timeout_s=max(0.0, ends_at - time.monotonic()))
        for request in unanswered:
            request.resolve(failed_reward("error", "the reward pool was closed before this response was scored"))

    @property
    def worker_pids(self) -> list[int]:
        """Processes that score."""
        return [worker.pid for worker in self._workers if worker.is_ready]

    def _schedule_dispatch(self) -> None:
        # At most once per turn of the loop, so that samples that arrive together are sent together.
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Spread the queue evenly over the ready workers, the least busy first."""
        self._is_dispatch_scheduled = False
        while self._queue and self._queue[0].reward.done():
            self._queue.popleft()
        if self._queue:
            self._start_workers()
        ready = [worker for worker in self._workers if worker.is_ready]
        while self._queue and ready:
            worker = min(ready, key=lambda worker: len(worker.pending))
            if (capacity := _MAX_PENDING - len(worker.pending)) <= 0:
                return
            # Rounded up, and no more than an even share: a full first worker would leave the others idle.
            share = min(capacity, -(-len(self._queue) // len(ready)))
            worker.submit([self._queue.popleft() for _ in range(share)])

    def _start_workers(self) -> None:
        while len(self._workers) < self._config.num_workers:
            worker = RewardWorker(self._config, on_change=self._on_change)
            self._workers.append(worker)
            task = asyncio.create_task(worker.open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _on_change(self, worker: RewardWorker) -> None:
        if worker.is_closed and worker in self._workers:
            self._workers.remove(worker)
            # Requests that were behind the culprit go back to the head of the queue, in their order.
            self._queue.extendleft(reversed(worker.pending))
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
        while self._queue:
            self._queue.popleft().resolve(failed_reward("error", f"no reward worker can be started: {error}"))
