"""Rules and messages of a store: run identity, leases, claims, and the chief broker.

The chief does the shared work of all brokers. When its lease lapses, another broker becomes the chief; a new process
under its name does so immediately. The store rejects chief operations without the fence of the live chief.
"""

import json
from typing import Any

from slipstream.buffer.errors import RunConflictError, StaleFenceError
from slipstream.buffer.records import Claim, LagSplit, Lease
from slipstream.buffer.sampling import RowCount, Sample, row_of
from slipstream.buffer.trajectory import Purpose, make_lease_id
from slipstream.configs.base import Record
from slipstream.configs.buffer import DropShortConfig, TrainShortConfig
from slipstream.configs.cluster import PLACE

# --- the run ---------------------------------------------------------------------------------------------------------

MAY_CHANGE = (
    *PLACE,
    "learner.max_steps", "learner.epochs", "evaluation.stop",
    "learner.num_ranks", "learner.engine", "learner.device", "learner.tokens_per_microbatch", "learner.packing",
    "generators.count", "generators.reward.num_workers", "generators.reward.timeout_s",
    "learner.stall",
)  # fmt: skip
"""Settings that a resumed run may change: where it runs, when it ends, workers and timeouts, and how the learner
divides model and work without affecting gradients.
"""


def check_same_run(run_id: str, *, stored: tuple[str, RowCount, int], opened: tuple[str, RowCount, int]) -> None:
    """Compare (config_json, num_rows, seed). Raises RunConflictError for a setting that must not differ."""
    before, now = _settings(*stored), _settings(*opened)
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, "absent"), now.get(key, "absent")
        may_change = any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)
        if old != new and not may_change:
            remedy = "continue with the old setting or choose another name"
            raise RunConflictError(f"{key} must stay {old!r} as run {run_id!r} was opened with, got {new!r}: {remedy}.")


def no_run(run_id: str) -> RunConflictError:
    """Error of every operation before `open_run`."""
    cause = "no broker has opened it yet, or the store was emptied"
    must = f"run {run_id!r} must be opened before it is used"
    return RunConflictError(f"{must}, but the store holds no such run: {cause}.")


def _settings(config_json: str, num_rows: RowCount, seed: int) -> dict[str, Any]:
    return {"num_rows": num_rows, "seed": seed} | _flatten(json.loads(config_json), "")


def _flatten(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{path}.{name}" if path else str(name))
    return flat


# --- leases ----------------------------------------------------------------------------------------------------------
def asked_answers(rows: list[int], *, samples: int) -> list[str]:
    """Answers to ask for, one group each: `<row>`, or `<row>.<sample>` if `samples` > 1."""
    # Samples of a row are consecutive, for the engine's prefix cache.
    numbers = [""] if samples == 1 else [f".{sample}" for sample in range(samples)]
    return [f"{row}{number}" for row in dict.fromkeys(rows) for number in numbers]


def evaluation_group_id(evaluation_id: str, answer: str) -> str:
    """`<evaluation id>:<answer>`; ids of training groups have no colon."""
    return f"{evaluation_id}:{answer}"


def evaluation_sequence(version: int, number: int) -> int:
    """Sort key of a pending answer, by version first, so that a lease can select a version."""
    return version << 32 | number


def is_evaluation(group_id: str) -> bool:
    """Whether the group belongs to an evaluation."""
    return ":" in group_id


def make_lease(
    group_id: str, *, attempt: int, purpose: Purpose, indices: list[int], num_rows: RowCount, seed: int
) -> Lease:
    """Build the lease of a group, with its dataset row."""
    # Row from ordinal and seed: no dataset cursor is stored.
    ordinal = int(group_id.rpartition(":")[2].partition(".")[0])
    row = ordinal if is_evaluation(group_id) else row_of(ordinal, num_rows=num_rows, seed=seed)
    return Lease(make_lease_id(group_id, attempt), group_id, purpose, row, ordinal, attempt, indices)


def lapsed_lease_message(group_id: str, *, attempt: int, owner: str, is_quarantined: bool) -> str:
    """Log line for a lapsed lease."""
    fate = "group put into quarantine (lease_attempts)" if is_quarantined else "its prompt will be leased again"
    return f"lease {make_lease_id(group_id, attempt)} of {owner} lapsed: {fate}"


def short_group_message(group_id: str, *, members: int, size: int, deadline: TrainShortConfig | DropShortConfig) -> str:
    """Log line for a group that was incomplete at its deadline."""
    fate = "expires" if isinstance(deadline, DropShortConfig) else "is trained on as it is"
    return f"group {group_id} has {members} of {size} members after {deadline.after_s:g} s: it {fate}"


# --- claims ----------------------------------------------------------------------------------------------------------
def make_claim(selected: Sample, *, step: int, fence: int, lag: LagSplit, num_spare: int) -> Claim:
    """Build the claim of a sample, omitting trivial weights and reuse flags."""
    weights = selected.weights if any(weight != 1 for weight in selected.weights) else []
    reused = selected.reused if any(selected.reused) else []
    return Claim(step, fence, selected.group_ids, weights, reused, lag, num_spare)


def split_lag(num_members: int, in_flight: int, publish: int, arrived: int, *, version: int) -> LagSplit:
    """Convert sums over a claim's members, as in `insert.lua`, to means.

    `arrived` sums the versions announced at arrival.
    """
    count = max(1, num_members)
    return LagSplit(in_flight / count, publish / count, max(0.0, version - arrived / count))


def lapsed_claim_message(step: int, *, num_ready: int, quarantined: list[str]) -> str:
    """Log line for a lapsed claim."""
    fate = f", put into quarantine (claim_attempts): {', '.join(quarantined)}" if quarantined else ""
    return f"claim of step {step} lapsed: {num_ready} groups are ready again{fate}"


# --- errors of the learner's operations ------------------------------------------------------------------------------
def stale_claim(claim: Claim) -> StaleFenceError:
    """Error of an operation on a claim that is not live."""
    lost = f"the claim of step {claim.step} with fence {claim.fence} lapsed or was taken back"
    return StaleFenceError(f"{lost}: drop the step, claim again.")


# --- the chief --------------------------------------------------------------------------------------------------------
NO_FENCE = 0
"""Fence of a broker that is not the chief. Accepted while a run has never had a chief, as in a single process."""


class Brokers(Record):
    """Answer to a broker's report.

    Example: Brokers(chief="broker", fence=NO_FENCE, living={"broker": {"peers": 500}, "broker-1": {"peers": 501}})
    """

    chief: str
    fence: int
    """The chief's fence if this broker is the chief, else NO_FENCE."""
    living: dict[str, dict[str, Any]]
    """Live broker -> its facts."""
