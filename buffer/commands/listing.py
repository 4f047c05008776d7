"""`python -m buffer ls`: a line for each group, or for each trajectory."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from rich.table import Table

from buffer.archive.stored_trajectory import StoredTrajectory
from buffer.commands.printing import add_row, make_table, span

_COMMON = ("outcome", "tokens", "versions", "steps", "data source", "reason")
_NUMBERS = ("members", "reward", "tokens", "index")


def list_groups(found: Iterable[StoredTrajectory], *, limit: int) -> tuple[Table, int]:
    """(a line per group, number of lines): wanted members are counted, rewards and tokens are their means."""
    table = make_table("group", "members", "reward", *_COMMON, numbers=_NUMBERS)
    for group in islice(_groups(found), limit):
        rewards = sum(member.trajectory.reward.total for member in group) / len(group)
        tokens = sum(member.trajectory.num_tokens for member in group) / len(group)
        versions = sorted({version for member in group for version in member.versions})
        first = group[0]
        _add(table, first, first.trajectory.group_id, len(group), f"{rewards:.3f}", tokens=tokens, versions=versions)
    return table, table.row_count


def list_trajectories(found: Iterable[StoredTrajectory], *, limit: int) -> tuple[Table, int]:
    """(a line per trajectory, number of lines)."""
    table = make_table("id", "reward", *_COMMON, numbers=_NUMBERS)
    for stored in islice(found, limit):
        trajectory = stored.trajectory
        reward = f"{trajectory.reward.total:.3f}" if trajectory.reward.status == "ok" else trajectory.reward.status
        _add(table, stored, trajectory.id, reward, tokens=trajectory.num_tokens, versions=stored.versions)
    return table, table.row_count


def _groups(found: Iterable[StoredTrajectory]) -> Iterator[list[StoredTrajectory]]:
    for _, members in groupby(found, key=lambda stored: stored.trajectory.group_id):
        yield list(members)


def _add(table: Table, stored: StoredTrajectory, *cells: object, tokens: float, versions: list[int]) -> None:
    steps = ",".join(map(str, stored.steps))
    common = (stored.place, f"{tokens:g}", span(versions), steps, stored.trajectory.data_source, stored.reason)
    add_row(table, *cells, *common)
