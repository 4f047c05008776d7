"""What both stores say of claims and groups that are not there any more."""

from buffer.errors import StaleFence
from buffer.records import Claim


def stale(claim: Claim) -> StaleFence:
    """A claim was acted on that is not the live one of its step."""
    return StaleFence(
        f"the claim of step {claim.step} with fence {claim.fence} lapsed or was taken back: drop the step, claim again."
    )


def no_members(group_id: str) -> StaleFence:
    """A group was fetched that is retired or was never filled."""
    return StaleFence(f"group {group_id} must be stored to be fetched, but it is retired or has no members.")


def lapsed_claim_line(step: int, *, num_ready: int, quarantined: list[str]) -> str:
    """For the log."""
    line = f"claim of step {step} lapsed: {num_ready} groups are ready again"
    if quarantined:
        line += f", put into quarantine (claim_attempts): {', '.join(quarantined)}"
    return line
