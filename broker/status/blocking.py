"""Blocking: which roles of a run wait for which others, derived from their own reports and from missing roles."""

from typing import Any

from slipstream.broker.status.role_status import RoleStatus, last_heard
from slipstream.buffer.records import RunState
from slipstream.buffer.trajectory import Record

_ALL = "all roles"
_GENERATORS, _LEARNER, _BROKER, _STORE, _DISK = "the generators", "the learner", "the broker", "the store", "the disk"
_AGENTS = "the agents"
_BLOCKED_ON: dict[str, str] = {
    "groups": _GENERATORS,
    "evaluation": _GENERATORS,
    "weights": _LEARNER,
    "transfer": _LEARNER,
    "prompts": _LEARNER,
    "agents": _AGENTS,
    "store": _STORE,
    "disk": _DISK,
    "storage": "the object store",
    "user": "whoever paused the run",
}
"""WaitsFor -> the side that can end the wait."""
_ENDED_PHASES = ("finished", "failed")


class Wait(Record):
    """A role that waits for another.

    Example: Wait("learner", blocked_on="the generators", reason="waiting for the 32 groups of step 13: 5 are ready")
    """

    waiter: str
    """A role's name, or all roles of a kind."""
    blocked_on: str
    """The side that can end the wait."""
    reason: str


def find_waits(state: RunState, roles: list[RoleStatus], *, admission_reason: str, full_disk: str = "") -> list[Wait]:
    """Return the waits, those for dead roles first; none once the run has ended.

    `admission_reason`: reason why no prompt is admitted now; empty if some are. `full_disk`: as the store returns it.
    """
    if state.phase in _ENDED_PHASES:
        return []
    if full_disk:
        # No role can report: what is known of them is from before.
        reason = f"the store takes no writes until there is room on {full_disk}; all goes on by itself then"
        return [Wait(_ALL, _DISK, reason)]
    own = [
        Wait(role.name, _BLOCKED_ON[role.waits_for], role.reason)
        for role in roles
        if role.is_alive and role.waits_for in _BLOCKED_ON
    ]
    return [*_for_missing_roles(roles), *_for_admission(roles, own, admission_reason), *own]


def dead_end_cause(roles: dict[str, dict[str, Any]]) -> str:
    """Return why the learner's wait will not end by itself, as it last reported; empty if it may."""
    return str(roles.get("learner", {}).get("dead_end", ""))


def _for_missing_roles(roles: list[RoleStatus]) -> list[Wait]:
    waits = []
    broker = last_heard(roles, "broker")
    if broker is None or not broker.is_alive:
        waits.append(Wait(_ALL, _BROKER, _describe_absence("broker", broker)))
        # Everything known about the other roles is as old as the broker's last report.
        return waits
    learner = last_heard(roles, "learner")
    if learner is None or not learner.is_alive:
        waits.append(Wait(_GENERATORS, _LEARNER, _describe_absence("learner", learner)))
    if not any(role.role == "generator" and role.is_alive for role in roles):
        waits.append(Wait(_LEARNER, _GENERATORS, "no generator is alive: start one with `python -m generators`"))
    return waits


def _for_admission(roles: list[RoleStatus], own: list[Wait], reason: str) -> list[Wait]:
    # A generator with free slots learns only after a while why it gets no prompts: until then it reports no wait.
    reported = {wait.waiter for wait in own}
    with_room = [role for role in roles if role.is_alive and role.capacity and (role.running or 0) < role.capacity]
    is_known = not with_room or any(role.name in reported for role in with_room)
    return [] if is_known or not reason else [Wait(_GENERATORS, _LEARNER, reason)]


def _describe_absence(name: str, role: RoleStatus | None) -> str:
    if role is None:
        return f"no {name} has joined yet"
    word = "gone" if role.liveness == "gone" else "silent"
    return f"the {name} has been {word} for {role.report_age_s:.0f} s"
