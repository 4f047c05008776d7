"""Prompt leases as both stores make, name and mourn them."""

from buffer.permutation import row_of
from buffer.records import Lease
from buffer.trajectory import Purpose, make_lease_id


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
