"""Errors of MemoryStore, in the words of RedisStore."""

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Claim


def already_committed(step: int, *, newest: int) -> StaleFenceError:
    return StaleFenceError(
        f"a step must be claimed before it is committed, got step {step}, but step {newest} is the last one committed: "
        "another learner has continued this run; start again with resume=true."
    )


def out_of_order(claim: Claim, *, newest: int) -> StaleFenceError:
    return StaleFenceError(
        f"steps must be committed one after the other, got step {claim.step} after step {newest}: the store is behind "
        "the learner, or another learner is running; start again with resume=true."
    )


def not_yet_committed(pointer: CheckpointPointer, *, step: int) -> StaleFenceError:
    return StaleFenceError(
        f"a checkpoint must cover committed steps only, got step {pointer.step} ({pointer.name}), but step {step} is "
        "the last one committed: the store is behind the learner; start the learner again with resume=true."
    )


def superseded_learner(pointer: CheckpointPointer, *, fence: int, newest: int) -> StaleFenceError:
    return StaleFenceError(
        f"a checkpoint must come from the newest learner, got {pointer.name} with fence {fence} "
        f"after fence {newest}: another learner has continued this run; start again with resume=true."
    )


def not_stored(group_id: str) -> StaleFenceError:
    return StaleFenceError(f"group {group_id} must be stored to be fetched, but it is retired or has no members.")


def stale_chief(fence: int) -> StaleFenceError:
    return StaleFenceError(
        f"a broker must be the chief of its run to do this, but its lease with fence {fence} has lapsed or another "
        "broker holds it: leave it to the current chief."
    )
