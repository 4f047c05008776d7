"""Audit of the store's state: compare queues, counters, and fences with each other, the ledger, and the journals.

A snapshot contains every key of a run at one instant. A separate script reads it, independent of the audited scripts.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import redis

from slipstream.buffer.codec import decode
from slipstream.buffer.records import CheckpointPointer, StepEntry
from tests.chaos.outcome import Evidence, first_acks, genuine
from tests.chaos.watched.journal import Life

_READ = """
local found = {}
for _, name in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind, value = redis.call('TYPE', name).ok, false
  if kind == 'hash' then value = redis.call('HGETALL', name)
  elseif kind == 'zset' then value = redis.call('ZRANGE', name, 0, -1)
  elseif kind == 'list' then value = redis.call('LRANGE', name, 0, -1)
  elseif kind == 'set' then value = redis.call('SMEMBERS', name) end
  if value then found[#found + 1] = {string.sub(name, #ARGV[1] + 1), kind, value} end
end
return found
"""
_HELD = ("leases", "returned", "ready", "finished")
_MAX_NAMED = 5
_UNWRITTEN_S = 0.2
"""Time between an operation of the store and its line in a journal."""


class Snapshot(NamedTuple):
    """Keys of a run, after their prefix. Example: see `tests/contract/test_state_audit.py`."""

    hashes: dict[str, dict[str, bytes]]
    lists: dict[str, list[str]]
    archived: list[StepEntry] = []
    """Ledger of the archive, which may be longer than the part that left the store."""

    def number(self, name: str, field: str) -> int:
        return int(self.hashes.get(name, {}).get(field) or 0)

    def below(self, prefix: str) -> dict[str, list[str]]:
        """Lists whose names begin with the prefix, by what follows."""
        return {name.removeprefix(prefix): each for name, each in self.lists.items() if name.startswith(prefix)}

    @property
    def records(self) -> dict[str, dict[str, bytes]]:
        """Records of all groups; those of an evaluation have a colon in their name."""
        return {name.removeprefix("group:"): each for name, each in self.hashes.items() if name.startswith("group:")}

    @property
    def groups(self) -> dict[str, dict[str, bytes]]:
        return {group: record for group, record in self.records.items() if ":" not in group}

    @property
    def ledger(self) -> list[StepEntry]:
        """Entries of the committed steps, in order: those that left the store, then the store's."""
        entries = [decode(entry, StepEntry) for entry in self.hashes.get("ledger", {}).values()]
        moved = [entry for entry in self.archived if entry.step <= self.number("run", "archived_step")]
        return moved + sorted(entries, key=lambda entry: entry.step)

    @property
    def places(self) -> dict[str, list[str]]:
        """Place -> training groups there: leases, returned, ready, claimed, used, finished."""
        listed = {name: list(chain(*self.below(f"{name}:").values())) for name in ("claimed", "used")}
        listed |= {name: self.lists.get(name, []) for name in _HELD}
        return {name: [group for group in groups if ":" not in group] for name, groups in listed.items()}


def read_snapshot(client: "redis.Redis[bytes]", prefix: str) -> Snapshot:
    """Read every key that begins with `{run}:`. Raises redis.RedisError."""
    hashes, lists = dict[str, dict[str, bytes]](), dict[str, list[str]]()
    found: Any = client.eval(_READ, 0, prefix)
    for raw_name, kind, values in found:
        name = raw_name.decode()
        if kind == b"hash":
            hashes[name] = {field.decode(): value for field, value in zip(values[::2], values[1::2], strict=True)}
        elif name not in ("versions", "quarantine", "metrics", "events"):
            lists[name] = [value.decode() for value in values]
    return Snapshot(hashes, lists)


def find_state_problems(state: Snapshot) -> list[str]:
    """Return one sentence per contradiction in the store. Applies to any run at any instant."""
    rules = (_places_problems, _member_problems, _lease_problems, _step_problems, _counter_problems)
    return [problem for rule in rules for problem in list(rule(state))[:_MAX_NAMED]]


def _differ(what: str, found: Any, implied: Any) -> Iterator[str]:
    if found != implied:
        yield f"{what}: the store has {found}, the rest of it implies {implied}"


def _places_problems(state: Snapshot) -> Iterator[str]:
    at: dict[str, list[str]] = {}
    for place, groups in state.places.items():
        for group in groups:
            at.setdefault(group, []).append(place)
    for group, places in at.items():
        if len(places) > 1:
            yield f"group {group} is in {' and '.join(places)}"
    yield from _differ("groups with a record", sorted(state.groups), sorted(at))
    not_used = set(state.lists.get("reusable", [])) - set(state.places["used"])
    yield from _differ("groups to be used again that are not used", sorted(not_used), [])


def _member_problems(state: Snapshot) -> Iterator[str]:
    waiting = {*state.places["leases"], *state.places["returned"]}
    is_open = []
    for group, record in state.groups.items():
        members, size = int(record.get("members", 0)), int(record.get("size", 0))
        counted = sum(field.startswith("at:") for field in record)
        stored = len(state.hashes.get(f"payloads:{group}", {}))
        yield from _differ(f"members of group {group}, and payloads", [members, stored], [counted, counted])
        if group in waiting and members >= size:
            yield f"group {group} waits for members, and has all {size}"
        if group not in waiting and members < size and not ({"closed", "outcome"} & record.keys()):
            yield f"group {group} waits for no members, and has {members} of {size}"
        if group in waiting and members:
            is_open.append(group)
    yield from _differ("open groups", sorted(state.lists.get("open", [])), sorted(is_open))


def _lease_problems(state: Snapshot) -> Iterator[str]:
    leased = [*state.lists.get("leases", []), *state.lists.get("evaluation_leases", [])]
    owners = {group: state.hashes.get(f"group:{group}", {}).get("owner", b"").decode() for group in leased}
    held = {group: owner for owner, groups in state.below("leases_of:").items() for group in groups}
    yield from _differ("leases by owner", held, owners)


def _step_problems(state: Snapshot) -> Iterator[str]:
    step, fence = state.number("run", "step"), state.number("run", "fence")
    yield from _differ("steps of the ledger", [entry.step for entry in state.ledger], list(range(1, step + 1)))
    fences = state.hashes.get("claim_fences", {})
    yield from _differ("claims with a fence", sorted(fences), sorted(state.lists.get("claims", [])))
    committed = [entry.fence for entry in state.ledger]
    newest = max([state.number("run", "learner_fence"), *map(int, fences.values()), *committed])
    if newest > fence:
        yield f"the newest fence is {newest}, the store counts {fence}"
    stray = {*state.below("claimed:")} - {*state.lists.get("claims", [])}
    stray |= {*state.below("used:")} - {*state.lists.get("used_steps", [])}
    yield from _differ("lists of groups of no claim and no step", sorted(stray), [])
    for group, record in state.groups.items():
        steps = [int(each) for each in record.get("steps", b"").decode().split(",") if each]
        if not set(range(1, step + 1)).issuperset(steps):
            yield f"group {group} was trained on in the steps {steps}, of which the ledger lacks some"


def _counter_problems(state: Snapshot) -> Iterator[str]:
    groups, places = state.groups, state.places
    members = {group: int(record.get("members", 0)) for group, record in groups.items()}
    complete = [*places["ready"], *places["claimed"], *places["used"]]
    short = sum(int(groups[group]["size"]) - members[group] for group in complete if group in groups)
    payload_bytes = sum(int(record.get("bytes", 0)) for record in state.records.values())
    counted = {
        "open_members": sum(members.get(group, 0) for group in state.lists.get("open", [])),
        "short_members": short,
        "payload_bytes": payload_bytes,
    }
    yield from _differ("counters", {name: state.number("counters", name) for name in counted}, counted)
    admitted = len([*complete, *places["leases"], *places["returned"]]) + state.number("outcomes", "retired")
    yield from _differ("groups admitted", state.number("run", "admitted"), admitted)


def find_progress_problems(state: Snapshot) -> list[str]:
    step, version, announced = (state.number("run", name) for name in ("step", "version", "announced_version"))
    problems = []
    if version > min(step, announced):
        problems.append(f"version {version} is committed, the newest step is {step}, the newest announced {announced}")
    encoded = state.hashes["run"].get("checkpoint")
    if encoded and (pointer := decode(encoded, CheckpointPointer)).step > step:
        problems.append(f"the checkpoint covers step {pointer.step}, the run is at step {step}")
    groups = [group for entry in state.ledger for group in entry.group_ids]
    trained = sum(len(names) for entry in state.ledger for names in entry.trajectory_ids)
    implied = {"consumed": len(set(groups)), "uses": len(groups), "trained": trained}
    found = {"consumed": state.number("run", "consumed"), "uses": state.number("run", "uses")}
    return [*problems, *_differ("progress", found | {"trained": state.number("counters", "trained")}, implied)]


def find_end_problems(state: Snapshot, lives: Iterable[Life]) -> list[str]:
    """Return one sentence per number that contradicts the learners' last journal entries."""
    learners = [life for life in lives if life.role == "learner"]
    events = [event for life in learners for event in life.of("claimed", "committed", "rolled_back", "version")]
    events.sort(key=lambda each: each["t"])
    implied = {"step": 0, "learner_fence": 0, "version": 0}
    for event in events:
        if event["k"] in ("committed", "rolled_back"):
            implied |= {"step": event["step"], "learner_fence": event["fence"]}
        if event["k"] in ("version", "rolled_back"):
            implied["version"] = event["version"]
    fences = [each["fence"] for each in events if "fence" in each]
    found = {name: state.number("run", name) for name in implied}
    left = {place: groups for place, groups in state.places.items() if groups}
    return [
        *_differ("the end of the run", found, implied),
        *_differ("groups left", left, {}),
        *_differ("the newest fence", max(state.number("run", "fence"), *fences), state.number("run", "fence")),
    ]


def answered_are_never_handed_out(evidence: Evidence) -> Iterator[str]:
    """Yield one sentence per lease of acknowledged trajectories, or of none."""
    answered_at: dict[tuple[str, int], float] = {}
    for life in evidence.generators:
        sent = genuine(life)
        for trajectory_id, at in first_acks(life).items():
            if trajectory_id in sent:
                lease, _, member = trajectory_id.rpartition("-")
                place = (lease.partition("-")[0], int(member))
                answered_at[place] = min(at, answered_at.get(place, at))
    for broker in evidence.brokers:
        for entry in broker.of("leased"):
            for lease, members in zip(entry["leases"], entry["members"], strict=True):
                group = lease.partition("-")[0]
                again = [
                    member for member in members if answered_at.get((group, member), float("inf")) < entry["since"]
                ]
                if again or not members:
                    yield f"{lease} was handed out for the members {members}, of which {again} had been acknowledged"


def roll_backs_take_all_back(evidence: Evidence) -> Iterator[str]:
    """Yield one sentence per rollback that left the store in another state."""
    for life in evidence.learners:
        begun_at = life.began_at
        for entry in life.of("rolling_back", "rolled_back"):
            if entry["k"] == "rolling_back":
                begun_at = entry["t"]
                continue
            wanted = [entry["step"], entry["version"], entry["fence"]]
            found = [entry["found_step"], entry["found_version"], entry["found_fence"]]
            others = (other for other in evidence.learners if other is not life)
            kinds = ("rolling_back", "rolled_back", "committing", "committed", "version")
            since, until = begun_at - _UNWRITTEN_S, entry["t"] + _UNWRITTEN_S
            is_alone = not any(since <= each["t"] <= until for other in others for each in other.of(*kinds))
            if found != wanted and is_alone:
                yield f"a roll back to step, version and fence {wanted} left {found}"
