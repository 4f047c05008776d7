"""Waits: who waits for whom in a run, and why, told from the roles' own reasons and from who is missing."""

from typing import Any

from slipstream.broker.status.role_status import RoleStatus
from slipstream.buffer.records import RunState
from slipstream.buffer.trajectory import Record

_GENERATORS, _LEARNER, _BROKER, _STORE, _DISK = "the generators", "the learner", "the broker", "the store", "the disk"
_AWAITED: dict[str, str] = {
    "groups": _GENERATORS,
    "evaluation": _GENERATORS,
    "weights": _LEARNER,
    "transfer": _LEARNER,
    "prompts": _LEARNER,
    "store": _STORE,
    "disk": _DISK,
}
"""WaitsFor -> who could end the wait."""
_OVER = ("finished", "failed")


class Wait(Record):
    """One side waits for another.

    Example: Wait(waiter="learner", blocked_on="the generators", reason="waiting for the 32 groups of step 13: 5 are ready")
    """

    waiter: str
    """A role's name, or all of a kind."""
    blocked_on: str
    """Who could end the wait."""
    reason: str
    """What is missing, in words."""


def find_waits(state: RunState, roles: list[RoleStatus], *, admission_reason: str) -> list[Wait]:
    """Those for the dead first; none when the run is over. `admission_reason`: why no prompt is admitted now."""
    if state.phase in _OVER:
        return []
    own = list(filter(None, map(_own_wait, roles)))
    return [*_for_the_missing(roles), *_for_admission(roles, own, admission_reason), *own]


def dead_end_cause(roles: dict[str, dict[str, Any]]) -> str:
    """Why the learner's wait will not end by itself, from what the roles told last; empty when it may."""
    return str(roles.get("learner", {}).get("dead_end", ""))


def _for_the_missing(roles: list[RoleStatus]) -> list[Wait]:
    waits = []
    broker = next((role for role in roles if role.role == "broker"), None)
    if broker is None or not broker.is_alive:
        waits.append(Wait("everybody", _BROKER, _absence("broker", broker)))
        # What is known of the others is as old as the broker's last report.
        return waits
    learner = next((role for role in roles if role.role == "learner"), None)
    if learner is None or not learner.is_alive:
        waits.append(Wait(_GENERATORS, _LEARNER, _absence("learner", learner)))
    if not any(role.role == "generator" and role.is_alive for role in roles):
        waits.append(Wait(_LEARNER, _GENERATORS, "no generator is alive: start one with `python -m generators`"))
    return waits


def _for_admission(roles: list[RoleStatus], own: list[Wait], reason: str) -> list[Wait]:
    """Generators with room are told why they get no prompts only after a while."""
    told = {wait.waiter for wait in own}
    with_room = [role for role in roles if role.is_alive and role.capacity and (role.running or 0) < role.capacity]
    is_known = not with_room or any(role.name in told for role in with_room)
    return [] if is_known or not reason else [Wait(_GENERATORS, _LEARNER, reason)]


def _absence(name: str, role: RoleStatus | None) -> str:
    if role is None:
        return f"no {name} has joined yet"
    word = "gone" if role.liveness == "gone" else "silent"
    return f"the {name} has been {word} for {role.report_age_s:.0f} s"


def _own_wait(role: RoleStatus) -> Wait | None:
    """What a living role says it waits for."""
    for_whom = _AWAITED.get(role.waits_for)
    return Wait(role.name, for_whom, role.reason) if role.is_alive and for_whom else None
