"""RewardPool: rewards from worker processes that are killed when they take too long.

The workers are plain interpreters that import the reward function and nothing of ours that is large; they are spoken to
over a socket pair from the caller's loop. A pool library would hand every call through threads of this process, which
compete with that loop for the interpreter, and could not tell which of several calls in a worker is the one that hangs.
"""

import asyncio
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput, evaluate, failed_reward, load_reward
from slipstream.generators.rewards.worker import FrameCutter, Job, decode_reply, frame

# @@ WorkerLink: one reward worker process as its pool sees it.
_START_TIMEOUT_S = 60.0
_REAP_TIMEOUT_S = 2.0


class Question:
    """A sample and where its reward goes."""

    def __init__(self, sample: RewardInput) -> None:
        self.sample = sample
        self.answer: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()

    def settle(self, reward: Reward) -> None:
        """Answer, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_result(reward)


class WorkerLink(asyncio.Protocol):
    """A worker answers in order, so the clock always runs for the oldest open question alone: the culprit is known.

    Life: open -> ready -> (ask, reply)* -> over. `on_change(link)` is called whenever there may be room, or it is over.
    """

    def __init__(self, job: Job, *, timeout_s: float, on_change: Callable[["WorkerLink"], None]) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._cutter = FrameCutter()
        self._socket, self._process = _launch()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self.questions: deque[Question] = deque()
        """Asked and not yet answered, oldest first; when the link is over, what somebody else has to answer."""
        self.is_ready = False
        """Whether the function is loaded."""
        self.is_over = False
        """Whether the process is gone."""
        self.fault = ""
        """Why it is gone."""

    async def open(self) -> None:
        """Connect to the process; it is ready when it says so."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    @property
    def pid(self) -> int:
        """Of the worker process."""
        return self._process.pid

    def ask(self, questions: list[Question]) -> None:
        """Send questions; their answers come in this order."""
        assert self._transport is not None
        if not self.questions:
            self._start_clock(self._timeout_s, "timeout")
        self.questions.extend(questions)
        self._transport.write(b"".join(frame(question.sample) for question in questions))

    def close(self) -> None:
        """Kill the process; open questions stay in `questions`."""
        self._is_closing = True
        self._process.kill()
        self._process.wait(_REAP_TIMEOUT_S)
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what to serve."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._start_clock(_START_TIMEOUT_S, "error")
        transport.write(frame(self._job))

    def data_received(self, data: bytes) -> None:
        """Settle answered questions."""
        for body in self._cutter.feed(data):
            reward = decode_reply(body)
            if reward is None:
                self.is_ready = True
            elif self.questions:
                self.questions.popleft().settle(reward)
        self._stop_clock()
        if self.questions:
            self._start_clock(self._timeout_s, "timeout")
        self._on_change(self)

    def connection_lost(self, error: Exception | None) -> None:
        """The process is gone: the question it was at is the one that took it down."""
        self._stop_clock()
        self._process.kill()
        code = self._process.wait(_REAP_TIMEOUT_S)
        self.is_over = True
        self.fault = self.fault or f"the reward worker died (exit code {code}) while it scored this response"
        if self.questions and not self._is_closing:
            self.questions.popleft().settle(failed_reward("error", self.fault))
        self._on_change(self)

    # --- the clock -----------------------------------------------------------------------------------------------
    def _start_clock(self, limit_s: float, status: str) -> None:
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up, limit_s, status)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, limit_s: float, status: str) -> None:
        self.fault = (
            f"the reward function must answer within generators.reward.timeout_s ({limit_s:g} s), it did not"
            if self.is_ready
            else f"a reward worker must be ready within {limit_s:g} s, it was not"
        )
        if self.questions:
            self.questions.popleft().settle(failed_reward(status, self.fault))
        self.close()


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.generators.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A group of its own: Ctrl-C at the terminal is not meant for it.
            process_group=0,
        )
    return ours, process


_MAX_ASKED = 16
"""Questions a worker holds at a time: enough to keep it busy, few enough that a hang delays few others."""
_MAX_FAILED_STARTS = 3


class RewardPool:
    """Scores samples. Belongs to one asyncio loop; workers start with the first sample (or `start`).

    Invariant: every `score` call ends in a Reward, whatever the function does: `status` says whether it answered.
    """

    def __init__(self, function: str, arguments: dict[str, Any], *, num_workers: int, timeout_s: float) -> None:
        """`function` is `module:function`; 0 workers = score inside this process, unguarded. Raises ConfigError."""
        self._function = load_reward(function, arguments)
        self._job = Job(function, arguments)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._waiting: deque[Question] = deque()
        self._links: list[WorkerLink] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._is_dispatch_due = False

    async def start(self) -> None:
        """Start the workers now rather than with the first sample. Does not wait until they are ready."""
        self._hire()

    async def score(self, sample: RewardInput) -> Reward:
        """The reward of one sample; raises nothing. Takes at most timeout_s from when a worker turns to it."""
        if self._num_workers == 0:
            return evaluate(self._function, sample)
        question = Question(sample)
        self._waiting.append(question)
        self._dispatch_soon()
        return await question.answer

    def close(self) -> None:
        """Kill the workers; open calls end with status `error`. May be called again."""
        links, self._links = self._links, []
        open_questions = [*self._waiting]
        self._waiting.clear()
        for task in self._opening:
            task.cancel()
        for link in links:
            open_questions += link.questions
            link.questions.clear()
            link.close()
        for question in open_questions:
            question.settle(failed_reward("error", "the reward pool was closed before this response was scored"))

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [link.pid for link in self._links if not link.is_over]

    def _dispatch_soon(self) -> None:
        # Once per turn of the loop, so that samples that come together travel together.
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatch_due = False
        self._drop_the_abandoned()
        if self._waiting:
            self._hire()
        ready = [link for link in self._links if link.is_ready]
        while self._waiting and ready:
            link = min(ready, key=lambda link: len(link.questions))
            if (room := _MAX_ASKED - len(link.questions)) <= 0:
                return
            share = min(room, -(-len(self._waiting) // len(ready)))
            link.ask([self._waiting.popleft() for _ in range(share)])

    def _drop_the_abandoned(self) -> None:
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()

    def _hire(self) -> None:
        while len(self._links) < self._num_workers:
            link = WorkerLink(self._job, timeout_s=self._timeout_s, on_change=self._changed)
            self._links.append(link)
            task = asyncio.create_task(link.open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _changed(self, link: WorkerLink) -> None:
        """A worker answered, became ready, or is gone; then its open questions go to the head of the line."""
        if link.is_over and link in self._links:
            self._links.remove(link)
            self._waiting.extendleft(reversed(link.questions))
            self._note_start(has_failed=not link.is_ready, fault=link.fault)
        elif link.is_ready:
            self._note_start(has_failed=False)
        if self._waiting:
            self._dispatch_soon()

    def _note_start(self, *, has_failed: bool, fault: str = "") -> None:
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts < _MAX_FAILED_STARTS:
            return
        self._failed_starts = 0
        while self._waiting:
            self._waiting.popleft().settle(failed_reward("error", f"no reward worker can be started: {fault}"))
