"""State of the in-memory store, as dicts in place of Redis keys, and the transitions that several operations share."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import (
    EVENTS_KEPT,
    FRAMES_KEPT,
    METRICS_KEPT,
    CheckpointPointer,
    EvaluationAnswer,
    Event,
    Outcome,
    StepEntry,
    VersionEntry,
)
from slipstream.buffer.sampling import RowCount
from slipstream.buffer.store_rules import no_run
from slipstream.buffer.trajectory import Purpose, TrajectoryHeader
from slipstream.configs.base import Record
from slipstream.configs.buffer import AccuracyConfig, FilterConfig, ZeroAdvantageConfig
from slipstream.configs.data import CurriculumConfig


@dataclass(frozen=True, slots=True)
class GroupRewards:
    answered: int
    correct: int
    least: float
    most: float


def rejection_reason(rewards: GroupRewards, group_filter: FilterConfig) -> str:
    if isinstance(group_filter, ZeroAdvantageConfig | AccuracyConfig) and not rewards.answered:
        return "no_reward"
    match group_filter:
        case ZeroAdvantageConfig():
            return "zero_advantage" if rewards.most - rewards.least < 1e-6 else ""
        case AccuracyConfig(min_accuracy=above, max_accuracy=below):
            share = rewards.correct / rewards.answered
            return "too_hard" if share <= above else "too_easy" if share >= below else ""
        case _:
            return ""


class SuccessRate(Record):
    answers: int = 0
    weight: float = 0.0
    right: float = 0.0

    def after(self, group: GroupRewards) -> "SuccessRate":
        weight, right = self.weight / 2 + group.answered, self.right / 2 + group.correct
        return SuccessRate(self.answers + group.answered, weight, right)

    def flaw(self, curriculum: CurriculumConfig) -> str:
        if self.answers < curriculum.min_answers:
            return ""
        share = self.right / self.weight
        return "too_hard" if share < curriculum.low else "too_easy" if share > curriculum.high else ""


@dataclass
class Member:
    payload: bytes
    header: TrajectoryHeader
    in_flight: int
    publish: int
    arrived: int


@dataclass
class Group:
    id: str
    purpose: Purpose
    size: int
    sequence: int = 0
    attempt: int = 0
    owner: str = ""
    first_at: int = 0
    claim_attempts: int = 0
    steps: list[int] = field(default_factory=list)
    is_closed: bool = False
    has_baseline: bool = False
    row: int | None = None
    outcome: Outcome | None = None
    reason: str = ""
    members: dict[int, Member] = field(default_factory=dict)
    guests: set[str] = field(default_factory=set)

    @property
    def oldest_version(self) -> int | None:
        return min((member.header.oldest_version for member in self.members.values()), default=None)

    @property
    def written_tokens(self) -> int:
        return sum(member.header.written_tokens for member in self.members.values())

    @property
    def rewards(self) -> GroupRewards:
        answered = [member.header for member in self.members.values() if member.header.reward_status == "ok"]
        sampled = [header for header in answered if not header.is_greedy]
        rewards = [header.reward for header in answered] or [0.0]
        return GroupRewards(len(sampled), sum(each.is_correct for each in sampled), min(rewards), max(rewards))

    @property
    def payloads(self) -> list[bytes]:
        return [self.members[index].payload for index in sorted(self.members)]


@dataclass
class Run:
    id: str
    config_json: str
    num_rows: RowCount
    seed: int
    keeps_finished: bool
    group_filter: FilterConfig
    max_uses: int
    curriculum: CurriculumConfig | None
    consumed: int = 0
    consumed_by_version: int = 0
    target_lag: float | None = None
    uses: int = 0
    checkpoint: CheckpointPointer | None = None
    archived_step: int = 0
    phase: str = "starting"
    detail: str = ""
    step: int = 0
    stepped_at: float | None = None
    version: int = 0
    announced_version: int = 0
    next_ordinal: int = 0
    admitted: int = 0
    ready_sequence: int = 0
    evaluation_sequence: int = 0
    fence: int = 0
    learner_fence: int = 0


@dataclass
class LiveClaim:
    fence: int
    deadline: int
    group_ids: list[str]


@dataclass
class UsedStep:
    """Groups last trained on by a committed step, until it is retired."""

    fence: int | None
    group_ids: list[str]


@dataclass
class OpenEvaluation:
    purpose: Purpose
    version: int
    num_asked: int
    answered: dict[str, EvaluationAnswer] = field(default_factory=dict)
    num_correct: int = 0
    num_failed: int = 0


@dataclass
class Chief:
    name: str
    incarnation: str
    fence: int
    deadline: int


_ALSO_BEFORE_A_RUN = {"open_run", "close", "now", "events", "wait_ready", "fetch", "images", "put_images", "evaluation"}
_ALSO_BEFORE_A_RUN |= {"evaluation_answers", "quarantined_guests", "quarantined_frames", "cpu_s", "memory", "full_disk"}


def _locked(operation: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operation)
    def locked(store: "MemoryState", *arguments: Any, **named: Any) -> Any:
        with store._changed:
            if operation.__name__ not in _ALSO_BEFORE_A_RUN:
                store._opened()
            return operation(store, *arguments, **named)

    return locked


class MemoryState:
    """The state, its lock, and the transitions that several operations share.

    The reasons for each are in the Lua scripts of the Redis store. Public methods of this package hold the lock.
    """

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if cls.__module__.startswith("tests.memory_store") and not name.startswith("_"):
                setattr(cls, name, _locked(method))

    def __init__(self, *, clock: Callable[[], float] = time.time, max_attempts: int = 5) -> None:
        self._clock = clock
        self._max_attempts = max_attempts
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._groups: dict[str, Group] = {}
        self._leases: dict[str, int] = {}
        self._evaluation_leases: dict[str, int] = {}
        self._evaluation_pending: dict[int, str] = {}
        self._images: dict[str, bytes] = {}
        self._ready: dict[int, str] = {}
        self._reusable: dict[int, str] = {}
        self._returned: set[int] = set()
        self._claims: dict[int, LiveClaim] = {}
        self._used: dict[int, UsedStep] = {}
        self._versions: list[VersionEntry] = []
        self._version_steps: dict[int, int] = {}
        self._consumed_at: dict[int, int] = {}
        self._ledger: dict[int, StepEntry] = {}
        self._done: set[int] = set()
        self._finished: list[str] = []
        self._outcomes: Counter[str] = Counter()
        self._outcome_members: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._success: defaultdict[int, SuccessRate] = defaultdict(SuccessRate)
        self._curriculum: Counter[str] = Counter()
        self._evaluations: dict[str, OpenEvaluation] = {}
        self._counters: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._quarantined: dict[str, str] = {}
        self._frames: deque[tuple[str, bytes]] = deque(maxlen=FRAMES_KEPT)
        self._roles: dict[str, tuple[bytes, int]] = {}
        self._progress: dict[str, tuple[str, int]] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._brokers: dict[str, tuple[bytes, int]] = {}
        self._chief: Chief | None = None
        self._requests: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._metrics: deque[bytes] = deque(maxlen=METRICS_KEPT)

    def close(self) -> None:
        """No-op: the state lives as long as the store."""

    def _check_chief(self, fence: int) -> None:
        if self._chief and not (self._chief.fence == fence and self._chief.deadline > self._now()):
            raise StaleFenceError(
                f"a broker must be the chief of its run to do this, but its lease with fence {fence} has lapsed or "
                "another broker holds it: leave it to the current chief."
            )

    def _opened(self) -> Run:
        if self._run is None:
            raise no_run("")
        return self._run

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _deadline(self, lease_s: float) -> int:
        return self._now() + int(lease_s * 1000)

    def _enqueue(self, group_id: str, *, is_released: bool = False) -> bool:
        group = self._groups[group_id]
        authors = sorted(group.guests & self._quarantined.keys())
        if group.steps:
            self._used.setdefault(group.steps[-1], UsedStep(None, [])).group_ids.append(group_id)
            if not (is_released or authors):
                self._reusable[group.sequence] = group_id
        elif authors:
            self._end(group_id, "quarantined", f"guest: {authors[0]}")
            return False
        else:
            self._ready[group.sequence] = group_id
        return True

    def _enqueue_all(self, group_ids: list[str]) -> int:
        num_returned = sum(self._enqueue(group_id) for group_id in group_ids)
        self._changed.notify_all()
        return num_returned

    def _dequeue(self, group_id: str) -> None:
        group = self._groups[group_id]
        self._reusable.pop(group.sequence, None)
        if not self._ready.pop(group.sequence, None):
            self._used[group.steps[-1]].group_ids.remove(group_id)

    def _fail_claim(self, step: int) -> tuple[int, list[str]]:
        kept, quarantined = [], []
        for group_id in self._claims.pop(step).group_ids:
            group = self._groups[group_id]
            group.claim_attempts += 1
            if group.claim_attempts < self._max_attempts:
                kept.append(group_id)
            elif group.steps:
                self._enqueue(group_id, is_released=True)
            else:
                self._end(group_id, "quarantined", "claim_attempts")
                quarantined.append(group_id)
        return self._enqueue_all(kept), quarantined

    def _complete(self, group: Group) -> bool:
        self._leases.pop(group.id, None)
        self._returned.discard(int(group.id))
        run = self._opened()
        self._measure(group)
        if reason := rejection_reason(group.rewards, run.group_filter):
            self._end(group.id, "rejected", reason)
            return False
        run.ready_sequence += 1
        group.sequence = run.ready_sequence
        self._enqueue_all([group.id])
        return True

    def _measure(self, group: Group) -> None:
        curriculum, rewards = self._opened().curriculum, group.rewards
        if curriculum is None or group.row is None or not rewards.answered:
            return
        was = self._success[group.row]
        self._success[group.row] = was.after(rewards)
        if not was.answers:
            self._curriculum["rows"] += 1
        for rate, change in ((was, -1), (self._success[group.row], 1)):
            if flaw := rate.flaw(curriculum):
                self._curriculum[f"rows_{flaw}"] += change

    def _end(self, group_id: str, outcome: Outcome, reason: str = "") -> None:
        run, group = self._opened(), self._groups[group_id]
        self._done.add(int(group_id))
        self._outcomes[outcome] += 1
        self._outcome_members[outcome] += len(group.members)
        if outcome != "retired":
            self._reasons[f"{outcome}: {reason}"] += 1
            self._counters["wasted_tokens"] += group.written_tokens
            run.admitted -= 1
        if run.keeps_finished and group.members:
            group.outcome, group.reason = outcome, reason
            self._finished.append(group_id)
        else:
            del self._groups[group_id]
