"""The audit: from a snapshot of what is stored to the books of the run."""

from collections import Counter
from collections.abc import Iterator

from slipstream.buffer.accounting import Audit
from slipstream.buffer.records import StepEntry
from slipstream.buffer.trajectory import Record

_NAMED_AT_MOST = 5
"""Groups named in one sentence."""


class Snapshot(Record):
    """All that an audit adds up, read at one instant.

    Example: Snapshot(next_ordinal=3, max_uses=1, accepted=4, places={"leased": ["2"], "ready": ["1"], "used": ["0"]},
        members={"0": (2, 2), "1": (2, 2), "2": (0, 0)}, done=[], outcome_members={}, ledger=[StepEntry(step=1, ...)])
    """

    next_ordinal: int
    """Training prompts ever admitted."""
    max_uses: int
    """Steps that may train on one group."""
    accepted: int
    """Trajectories ever acknowledged as new."""
    places: dict[str, list[str]]
    """leased, returned, ready, claimed, used -> training groups."""
    members: dict[str, tuple[int, int]]
    """Group of any place -> (members counted, payloads stored)."""
    done: list[int]
    """Ordinals of the groups that are over."""
    outcome_members: dict[str, int]
    """Outcome -> trajectories."""
    ledger: list[StepEntry]
    """Of the committed steps."""


def audit(snapshot: Snapshot) -> Audit:
    """Add up, and say what does not add up."""
    places = _places_of(snapshot)
    held = {place: _num_members(snapshot, groups) for place, groups in snapshot.places.items()}
    over = {name: snapshot.outcome_members.get(name, 0) for name in ("retired", "rejected", "expired", "quarantined")}
    missing = snapshot.accepted - sum(held.values()) - sum(over.values())
    doubled = {group: where for group, where in places.items() if len(where) > 1}
    retrained = _overused(snapshot)
    skipped = [ordinal for ordinal in range(snapshot.next_ordinal) if str(ordinal) not in places]
    return Audit(
        accepted=snapshot.accepted,
        buffered=held["leased"] + held["returned"] + held["ready"],
        claimed=held["claimed"],
        used=held["used"],
        **over,
        lost=max(0, missing) + sum(max(0, counted - stored) for counted, stored in snapshot.members.values()),
        duplicated=max(0, -missing) + len(doubled) + len(retrained),
        skipped_prompts=len(skipped),
        problems=[
            *_sentence("in no place", map(str, skipped)),
            *_sentence("in more than one place", (f"{group} ({' and '.join(at)})" for group, at in doubled.items())),
            *_sentence("trained on more often than they may be", retrained),
            *_sentence("not in the ledger, though used", _unrecorded(snapshot)),
            *_sentence("in the ledger, but neither used nor over", _unused(snapshot, places)),
        ],
    )


def _places_of(snapshot: Snapshot) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for place, groups in snapshot.places.items():
        for group in groups:
            places.setdefault(group, []).append(place)
    for ordinal in snapshot.done:
        places.setdefault(str(ordinal), []).append("over")
    return places


def _num_members(snapshot: Snapshot, groups: list[str]) -> int:
    return sum(snapshot.members[group][0] for group in groups)


def _overused(snapshot: Snapshot) -> list[str]:
    times = Counter(name for entry in snapshot.ledger for group in entry.trajectory_ids for name in group)
    twice_a_step = [name for entry in snapshot.ledger for name in _repeated(entry)]
    return list(dict.fromkeys([name for name, count in times.items() if count > snapshot.max_uses] + twice_a_step))


def _repeated(entry: StepEntry) -> list[str]:
    times = Counter(name for group in entry.trajectory_ids for name in group)
    return [name for name, count in times.items() if count > 1]


def _unrecorded(snapshot: Snapshot) -> list[str]:
    recorded = {group for entry in snapshot.ledger for group in entry.group_ids}
    return [group for group in snapshot.places["used"] if group not in recorded]


def _unused(snapshot: Snapshot, places: dict[str, list[str]]) -> list[str]:
    recorded = dict.fromkeys(group for entry in snapshot.ledger for group in entry.group_ids)
    # Claimed once more, perhaps.
    allowed = {"used", "over"} | ({"claimed"} if snapshot.max_uses > 1 else set())
    return [group for group in recorded if not allowed & set(places.get(group, []))]


def _sentence(what: str, groups: Iterator[str] | list[str]) -> list[str]:
    names = list(groups)
    if not names:
        return []
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return [f"{what}: {', '.join(names[:_NAMED_AT_MOST])}{more}"]
