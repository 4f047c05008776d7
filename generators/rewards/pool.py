"""RewardPool: rewards from worker processes that are killed when they take too long.

The workers are plain interpreters that import the reward function and nothing of ours that is large; they are spoken to
over a socket pair from the caller's loop. A pool library would hand every call through threads of this process, which
compete with that loop for the interpreter, and could not tell which of several calls in a worker is the one that hangs.
"""

import asyncio
from collections import deque
from typing import Any

from buffer.trajectory import Reward
from generators.rewards.frames import Job
from generators.rewards.reward import RewardInput, evaluate, failed_reward, load_reward
from generators.rewards.worker_link import Question, WorkerLink

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
