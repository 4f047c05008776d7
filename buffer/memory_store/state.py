"""What MemoryStore keeps: the same facts as the keys in Redis, as dicts."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from buffer.limits import FRAMES_KEPT, METRICS_KEPT
from buffer.records import CheckpointPointer, Outcome, StepEntry, VersionEntry
from buffer.run_identity import no_run
from buffer.trajectory import Purpose


@dataclass
class Member:
    """One stored trajectory."""

    id: str
    checksum: int
    payload: bytes


@dataclass
class Group:
    """One prompt's trajectories, or one row of an evaluation."""

    id: str
    purpose: Purpose
    size: int
    sequence: int = 0
    """Place among ready groups; of an evaluation row: among pending rows."""
    attempt: int = 0
    owner: str = ""
    claim_attempts: int = 0
    steps: list[int] = field(default_factory=list)
    """That trained on it."""
    outcome: Outcome | None = None
    """How it ended; None before."""
    reason: str = ""
    members: dict[int, Member] = field(default_factory=dict)


@dataclass
class Run:
    """Fields of the run."""

    id: str
    config_json: str
    num_rows: int
    seed: int
    keeps_finished: bool = False
    checkpoint: CheckpointPointer | None = None
    phase: str = "starting"
    detail: str = ""
    step: int = 0
    version: int = 0
    announced_version: int = 0
    next_ordinal: int = 0
    admitted: int = 0
    ready_sequence: int = 0
    evaluation_sequence: int = 0
    fence: int = 0


@dataclass
class LiveClaim:
    """Groups with the learner."""

    fence: int
    deadline: int
    group_ids: list[str]


@dataclass
class UsedStep:
    """Groups of a committed step, and the fence that committed it."""

    fence: int
    group_ids: list[str]


@dataclass
class OpenEvaluation:
    """Running totals of an evaluation, and the rows answered."""

    purpose: Purpose
    version: int
    num_prompts: int
    answered: set[int] = field(default_factory=set)
    num_correct: int = 0
    reward_sum: float = 0.0
    num_failed: int = 0


class MemoryState:
    """The state, its lock, and the few transitions several operations share."""

    def __init__(self, *, clock: Callable[[], float] = time.time, max_attempts: int = 5) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._max_attempts = max_attempts
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._groups: dict[str, Group] = {}
        self._leases: dict[str, int] = {}
        self._evaluation_leases: dict[str, int] = {}
        self._evaluation_pending: dict[int, str] = {}
        self._returned: set[int] = set()
        self._ready: dict[int, str] = {}
        self._claims: dict[int, LiveClaim] = {}
        self._used: dict[int, UsedStep] = {}
        self._versions: list[VersionEntry] = []
        self._ledger: dict[int, StepEntry] = {}
        self._done: set[int] = set()
        self._finished: list[str] = []
        self._outcomes: Counter[str] = Counter()
        self._outcome_members: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._evaluations: dict[str, OpenEvaluation] = {}
        self._counters: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._frames: deque[tuple[str, bytes]] = deque(maxlen=FRAMES_KEPT)
        self._roles: dict[str, tuple[bytes, int]] = {}
        self._metrics: deque[bytes] = deque(maxlen=METRICS_KEPT)

    def close(self) -> None:
        """Nothing to let go of."""

    def _opened(self) -> Run:
        if self._run is None:
            raise no_run("")
        return self._run

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _deadline(self, lease_s: float) -> int:
        return self._now() + int(lease_s * 1000)

    def _make_ready(self, group_ids: list[str]) -> int:
        for group_id in group_ids:
            self._ready[self._groups[group_id].sequence] = group_id
        self._changed.notify_all()
        return len(group_ids)

    def _fail_claim(self, step: int) -> tuple[int, list[str]]:
        """The claim was not brought to its end: (number of groups ready again, groups tried too often)."""
        group_ids = self._claims.pop(step).group_ids
        for group_id in group_ids:
            self._groups[group_id].claim_attempts += 1
        tired = [group_id for group_id in group_ids if self._groups[group_id].claim_attempts >= self._max_attempts]
        for group_id in tired:
            self._end(group_id, "quarantined", "claim_attempts")
        return self._make_ready([group_id for group_id in group_ids if group_id not in tired]), tired

    def _end(self, group_id: str, outcome: Outcome, reason: str = "") -> None:
        """The group is over; it has left every other place already."""
        run, group = self._opened(), self._groups[group_id]
        self._done.add(int(group_id))
        self._outcomes[outcome] += 1
        self._outcome_members[outcome] += len(group.members)
        if outcome != "retired":
            self._reasons[f"{outcome}: {reason}"] += 1
            run.admitted -= 1
        if run.keeps_finished and group.members:
            group.outcome, group.reason = outcome, reason
            self._finished.append(group_id)
        else:
            del self._groups[group_id]
