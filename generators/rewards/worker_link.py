"""WorkerLink: one reward worker process as its pool sees it."""

import asyncio
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

from buffer.trajectory import Reward
from generators.rewards.frames import FrameCutter, Job, decode_reply, frame
from generators.rewards.reward import RewardInput, failed_reward

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
            [sys.executable, "-m", "generators.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A group of its own: Ctrl-C at the terminal is not meant for it.
            process_group=0,
        )
    return ours, process
