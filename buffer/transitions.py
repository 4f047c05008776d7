"""What both stores make of a draw, and what they say of claims and groups that are not there any more."""

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Claim, LagSplit, Lease
from slipstream.buffer.samplers import row_of
from slipstream.buffer.sampling import Draw
from slipstream.buffer.trajectory import Purpose, make_lease_id
from slipstream.configs.buffer import DropShortConfig, TrainShortConfig


# @@ Prompt leases as both stores make, name and mourn them.
def evaluation_group_id(evaluation_id: str, row: int) -> str:
    """`<evaluation id>:<row>`; the colon tells it from a training group, whose id is its ordinal."""
    return f"{evaluation_id}:{row}"


def is_evaluation(group_id: str) -> bool:
    """Whether the group belongs to an evaluation."""
    return ":" in group_id


def make_lease(group_id: str, *, attempt: int, purpose: Purpose, indices: list[int], num_rows: int, seed: int) -> Lease:
    """The lease of a group, with the row its ordinal stands for."""
    ordinal = int(group_id.rpartition(":")[2])
    row = ordinal if is_evaluation(group_id) else row_of(ordinal, num_rows=num_rows, seed=seed)
    return Lease(
        id=make_lease_id(group_id, attempt),
        group_id=group_id,
        purpose=purpose,
        row=row,
        ordinal=ordinal,
        attempt=attempt,
        indices=indices,
    )


def lapsed_lease_line(group_id: str, *, attempt: int, owner: str, is_quarantined: bool) -> str:
    """For the log."""
    fate = "group put into quarantine (lease_attempts)" if is_quarantined else "its prompt will be leased again"
    return f"lease {make_lease_id(group_id, attempt)} of {owner} lapsed: {fate}"


def make_claim(drawn: Draw, *, step: int, fence: int, lag: LagSplit) -> Claim:
    """The claim of a draw. Weights and uses are left out where they say nothing."""
    return Claim(
        step=step,
        fence=fence,
        group_ids=drawn.group_ids,
        weights=drawn.weights if any(weight != 1 for weight in drawn.weights) else [],
        reused=drawn.reused if any(drawn.reused) else [],
        lag=lag,
    )


def split_lag(num_members: int, in_flight: int, publish: int, arrived: int, *, version: int) -> LagSplit:
    """Of sums over the members of a claim: versions in flight, in publishing, and announced at arrival."""
    count = max(1, num_members)
    return LagSplit(in_flight / count, publish / count, max(0.0, version - arrived / count))


def stale(claim: Claim) -> StaleFenceError:
    """A claim was acted on that is not the live one of its step."""
    return StaleFenceError(
        f"the claim of step {claim.step} with fence {claim.fence} lapsed or was taken back: drop the step, claim again."
    )


def committed_already(step: int, *, newest: int) -> StaleFenceError:
    """A step was claimed that the run has behind it."""
    return StaleFenceError(
        f"a step must be claimed before it is committed, got step {step} with step {newest} the last one committed: "
        "another learner has gone on with this run; start again with resume=true."
    )


def out_of_order(claim: Claim, *, newest: int) -> StaleFenceError:
    """A step was committed that is not the next one."""
    return StaleFenceError(
        f"steps must be committed one after the other, got step {claim.step} after step {newest}: the store has gone "
        "back behind the learner, or another learner is at work; start again with resume=true."
    )


def uncommitted(pointer: CheckpointPointer, *, step: int) -> StaleFenceError:
    """A checkpoint was declared that covers more than was committed."""
    return StaleFenceError(
        f"a checkpoint must cover committed steps only, got step {pointer.step} ({pointer.name}) with step {step} the "
        "last one committed: the store has gone back behind the learner; start the learner again with resume=true."
    )


def overtaken(pointer: CheckpointPointer, *, fence: int, newest: int) -> StaleFenceError:
    """A checkpoint was declared by a learner that is no longer the run's."""
    return StaleFenceError(
        f"a checkpoint must be of the learner that went on last, got {pointer.name} with fence {fence} "
        f"after fence {newest}: another learner has gone on with this run; start again with resume=true."
    )


def no_members(group_id: str) -> StaleFenceError:
    """A group was fetched that is retired or was never filled."""
    return StaleFenceError(f"group {group_id} must be stored to be fetched, but it is retired or has no members.")


def short_group_line(group_id: str, *, members: int, size: int, deadline: TrainShortConfig | DropShortConfig) -> str:
    """For the log."""
    fate = "expires" if isinstance(deadline, DropShortConfig) else "is trained on as it is"
    return f"group {group_id} has {members} of {size} members after {deadline.after_s:g} s: it {fate}"


def lapsed_claim_line(step: int, *, num_ready: int, quarantined: list[str]) -> str:
    """For the log."""
    line = f"claim of step {step} lapsed: {num_ready} groups are ready again"
    if quarantined:
        line += f", put into quarantine (claim_attempts): {', '.join(quarantined)}"
    return line
