"""Outcome of a run under chaos, compared with an uninterrupted run.

The scripted learner stores the lineage of its weights, the samples they were trained on, in every checkpoint. The
lineage follows the weights through crashes and resumes, so it shows the samples behind the final weights independently
of the store's ledger.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import xxhash
from safetensors.torch import load_file

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import Archive, ArchiveCheck
from slipstream.buffer.records import StepEntry
from slipstream.buffer.sampling import row_of
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import Record
from slipstream.learner.engines.optimizer import STATE_FILE
from tests.chaos.watched.journal import Entry, Life, content_of

_LINEAGE = "lineage"
_MAX_SAMPLES_NAMED = 5

Sample = tuple[str, str, int]
"""Group id, prompt uid, index in the group: independent of generator and attempt."""


class Trained(Record):
    """Samples of one step. Example: Trained(step=12, samples=[("380", "train/04711", 0), ...])."""

    step: int
    samples: list[Sample]
    ids: list[str] = []
    contents: list[str] = []
    """Hash of each trajectory, see `journal.content_of`."""


class Outcome(Record):
    """All records of a finished run. Example: see `tests/unit/chaos/test_outcome.py`."""

    audit: Audit
    counts: StoreCounts
    ledger: list[StepEntry]
    lineage: list[Trained]
    archived: list[Sample]
    archive: ArchiveCheck
    rejected: list[Sample] = []
    """Archived trajectories of groups that were not trained on, for a reason counted in the store."""
    consumed: int = 0
    skipped: list[int] = []
    """Prompts without a group in the archive: must equal the number that the curriculum skipped."""
    allowed_refusals: list[str] = []
    """Reasons for which deliberately bad offers had to be refused."""

    @property
    def num_rejected(self) -> int:
        return len({group for group, _, _ in self.rejected})


class Stored(NamedTuple):
    """An archived trajectory, as compared by the delivery audit."""

    id: str
    sample: Sample
    content: str
    tokens: str
    outcome: str


def samples_of(groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
    return [(member.group_id, member.prompt_uid, member.index) for group in groups for member in group]


def pack_lineage(lineage: list[Trained]) -> dict[str, torch.Tensor]:
    return {_LINEAGE: torch.frombuffer(bytearray(msgspec.json.encode(lineage)), dtype=torch.uint8)}


def read_lineage(folder: Path) -> list[Trained]:
    tensor = load_file(folder / STATE_FILE.format(0))[_LINEAGE]
    return msgspec.json.decode(tensor.numpy().tobytes(), type=list[Trained])


def count_samples(lineage: Iterable[Trained]) -> Counter[Sample]:
    return Counter(sample for trained in lineage for sample in trained.samples)


def uninterrupted(*, num_groups: int, group_size: int, num_rows: int, seed: int) -> Counter[Sample]:
    """Samples of an uninterrupted run of `num_groups` groups: each prompt of the sequence, each index."""
    uids = {group: f"train/{row_of(group, num_rows=num_rows, seed=seed):05d}" for group in range(num_groups)}
    return Counter((str(group), uid, index) for group, uid in uids.items() for index in range(group_size))


def read_archive(folder: Path) -> tuple[list[Stored], ArchiveCheck]:
    """Read the trajectories of an archive, except evaluation answers, and run its check. Raises ArchiveError."""
    archive = Archive(folder)
    stored = []
    for trajectory, outcome in ((each.trajectory, each.state) for each in archive.read() if each.state != "evaluated"):
        (sample,) = samples_of([[trajectory]])
        tokens = xxhash.xxh3_64_hexdigest(trajectory.token_ids.tobytes())
        stored.append(Stored(trajectory.id, sample, content_of(trajectory), tokens, outcome))
    return stored, archive.check()


def find_problems(outcome: Outcome, *, steps: int, expected: Counter[Sample]) -> list[str]:
    """Return one sentence per difference to an uninterrupted run of `steps` steps on the samples `expected`."""
    return [
        *_audit_problems(outcome.audit),
        *_step_problems("the ledger", [entry.step for entry in outcome.ledger], steps=steps),
        *_step_problems("the lineage", [trained.step for trained in outcome.lineage], steps=steps),
        *_sample_problems("trained on", count_samples(outcome.lineage), expected - Counter(outcome.rejected)),
        *_sample_problems("archived", Counter(outcome.archived + outcome.rejected), expected),
        *outcome.archive.problems,
        *_order_problems(outcome),
        *_count_problems(outcome),
    ]


def _audit_problems(audit: Audit) -> list[str]:
    sums = (audit.buffered, audit.claimed, audit.used, audit.retired, audit.rejected, audit.expired, audit.quarantined)
    wrong = [] if audit.accepted == sum(sums) else [f"accepted={audit.accepted}, but the states hold {sum(sums)}"]
    return [*wrong, *audit.problems] + ([] if audit.is_sound else [str(audit)])


def _step_problems(where: str, found: list[int], *, steps: int) -> list[str]:
    if found == list(range(1, steps + 1)):
        return []
    return [f"{where} must hold the steps 1 to {steps} once each, got {len(found)}: {found}"]


def _sample_problems(verb: str, found: Counter[Sample], expected: Counter[Sample]) -> list[str]:
    missing, extra = expected - found, found - expected
    return [f"never {verb}: {sample}" for sample in sorted(missing)[:_MAX_SAMPLES_NAMED]] + [
        f"{verb} {found[sample]} times, in an uninterrupted run {expected[sample]}: {sample}"
        for sample in sorted(extra)[:_MAX_SAMPLES_NAMED]
    ]


def _order_problems(outcome: Outcome) -> list[str]:
    # Equal totals are not enough: store and weights must agree on every step.
    groups = {trained.step: list(dict.fromkeys(sample[0] for sample in trained.samples)) for trained in outcome.lineage}
    return [
        f"step {entry.step} was committed with {entry.group_ids}, and trained with {groups.get(entry.step)}"
        for entry in outcome.ledger
        if groups.get(entry.step) != entry.group_ids
    ]


def _count_problems(outcome: Outcome) -> list[str]:
    counts, skipped = outcome.counts, outcome.skipped
    left = counts.leased + counts.returned + counts.open + counts.ready + counts.claimed + counts.used
    problems = [f"no group may be left over, got {counts}"] * bool(left)
    for reason, number in counts.refused.items():
        problems += [f"nothing may be refused, got {number} x {reason}"] * (reason not in outcome.allowed_refusals)
    used = len({group for entry in outcome.ledger for group in entry.group_ids})
    if outcome.consumed != used:
        problems.append(f"{used} groups were trained on, the store counts {outcome.consumed}")
    counted = sum(counts.curriculum.get(name, 0) for name in ("skipped_too_easy", "skipped_too_hard"))
    if len(skipped) != counted:
        named = skipped[:_MAX_SAMPLES_NAMED]
        problems.append(f"{len(skipped)} prompts have no group, the store counts {counted} as skipped: {named}")
    return problems


SLACK_S = 2.0
"""Added to the time that a strike explains, because processes start slowly on a busy machine."""


class Times(NamedTuple):
    """Settings of the run that rules depend on, seconds. Example: Times(lease_s=2.5, peer_timeout_s=1.5)."""

    lease_s: float
    """Time that a lease or a claim lasts without a renewal."""
    peer_timeout_s: float


class Evidence:
    def __init__(
        self,
        lives: list[Life],
        *,
        stored: list[Stored],
        lineage: list[Trained],
        times: Times,
        max_lag: int,
        skipped: Iterable[int] = (),
    ) -> None:
        self.generators = [life for life in lives if life.role.startswith("generator") and life.of("hello")]
        self.learners = [life for life in lives if life.role == "learner"]
        self.brokers = [life for life in lives if life.role == "broker"]
        self.harness = next(life for life in lives if life.role == "harness")
        self.stored = {each.id: each for each in stored}
        self.stored_at = {(each.sample[0], each.sample[2]): each for each in stored}
        self.lineage = lineage
        self.skipped = {str(ordinal) for ordinal in skipped}
        self.times = times
        self.max_lag = max_lag
        self._commits: dict[str, float] = {}
        for entry in self.of_learners("committing"):
            for group in entry["groups"]:
                self._commits[group] = min(entry["t"], self._commits.get(group, entry["t"]))

    def of_learners(self, *kinds: str) -> list[Entry]:
        return sorted((entry for life in self.learners for entry in life.of(*kinds)), key=lambda entry: entry["t"])

    def first_commit_at(self, group: str) -> float:
        """Time of the first attempt to commit a step with the group; until then the store has its record."""
        return self._commits.get(group, float("inf"))

    def owner(self, life: Life) -> str:
        return f"{life.role}/{life.of('hello')[0]['incarnation']}"

    def successor_began_at(self, life: Life) -> float:
        """Start of the role's next process; infinite for the last."""
        later = [each.began_at for each in self.generators if each.role == life.role and each.began_at > life.began_at]
        return min(later, default=float("inf"))

    def is_quiet(self, roles: Iterable[str], *, since: float, until: float) -> bool:
        """Whether no role was struck or recovering in that time."""
        away: dict[str, float | None] = {}
        for entry in self.harness.of("down", "up", "stop", "continue", "full", "room"):
            role = entry.get("role", "store")
            if role not in roles:
                continue
            if entry["k"] in ("down", "stop", "full"):
                away.setdefault(role, entry["t"])
                if since - SLACK_S <= entry["t"] <= until:
                    return False
            elif (began := away.pop(role, None)) is not None and began <= until:
                served_at = entry["t"]
                if (role, entry["k"]) == ("broker", "up"):
                    # A broker serves no peer before the start of its journal.
                    later = (life.began_at for life in self.brokers if life.began_at >= entry["t"])
                    served_at = min(later, default=float("inf"))
                if served_at + SLACK_S >= since:
                    return False
        return not any(began is not None and began <= until for began in away.values())


def genuine(life: Life) -> dict[str, Entry]:
    """Return undamaged training trajectories that a process recorded before sending, by id."""
    return {each["id"]: each for each in life.of("put") if each["purpose"] == "train" and not each["spoiled"]}


def first_acks(life: Life) -> dict[str, float]:
    acks: dict[str, float] = {}
    for entry in life.of("acked"):
        for trajectory_id in entry["ids"]:
            acks.setdefault(trajectory_id, entry["t"])
    return acks
