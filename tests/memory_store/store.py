"""MemoryStore: the store on dicts, used as the oracle for the Redis store and as the store of unit tests."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.buffer.accounting import Audit, Snapshot, StoreCounts, StoreMemory, audit
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import (
    EVENT_CHARACTERS_KEPT,
    ROLES_KEPT,
    Addressee,
    Event,
    Heartbeat,
    MetricsRows,
    RunState,
    StepEntry,
    StoredGroup,
    VersionEntry,
    progress_mark,
)
from slipstream.buffer.sampling import RowCount
from slipstream.buffer.store_rules import NO_FENCE, Brokers, check_same_run, is_evaluation
from slipstream.configs.buffer import KEEP_ALL, FilterConfig
from slipstream.configs.data import CurriculumConfig
from tests.memory_store.batches import MemoryBatches
from tests.memory_store.prompts import MemoryPrompts
from tests.memory_store.state import Chief, Run

_COUNTERS = ("accepted", "accepted_tokens", "superseded_tokens", "wasted_tokens", "trained", "trained_tokens")


class MemoryStore(MemoryPrompts, MemoryBatches):
    """Every operation of RedisStore on dicts, under one lock. Thread-safe; lost with the process."""

    def open_run(
        self,
        run_id: str,
        *,
        config_json: str,
        num_rows: RowCount,
        seed: int,
        keeps_finished: bool = False,
        max_uses: int = 1,
        group_filter: FilterConfig = KEEP_ALL,
        curriculum: CurriculumConfig | None = None,
    ) -> RunState:
        if self._run is None:
            self._run = Run(run_id, config_json, num_rows, seed, keeps_finished, group_filter, max_uses, curriculum)
        run = self._run
        if run.id != run_id:
            raise RunConflictError(f"this store was opened for run {run.id!r}, got {run_id!r}.")
        stored = (run.config_json, run.num_rows, run.seed)
        check_same_run(run_id, stored=stored, opened=(config_json, num_rows, seed))
        run.config_json = config_json
        return self.run_state()

    def run_state(self) -> RunState:
        run = self._opened()
        others = {"run_id": run.id, "consumed": run.consumed_by_version, "fence": run.learner_fence}
        same = RunState.__struct_fields__
        return RunState(**({name: getattr(run, name) for name in same if name not in others} | others))

    def run_config_json(self) -> str:
        return self._opened().config_json

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        run = self._opened()
        run.phase, run.detail = phase, detail

    def set_target_lag(self, lag: float) -> None:
        self._opened().target_lag = lag

    def announce_version(self, version: int) -> None:
        run = self._opened()
        run.announced_version = max(run.announced_version, version)

    def commit_version(self, version: int) -> None:
        run = self._opened()
        run.announced_version = max(run.announced_version, version)
        if version > run.version:
            for each in range(run.version, version):
                self._version_steps.pop(each, None)
            run.version = version
            step = self._version_steps.get(version, run.step)
            run.consumed_by_version = self._consumed_at.get(step, 0)

    def record_version(self, entry: VersionEntry) -> None:
        if self._versions[-1:] != [entry]:
            self._versions.append(entry)
        self._version_steps[entry.version] = entry.step

    def versions(self) -> list[VersionEntry]:
        return list(self._versions)

    def finished(self, *, limit: int) -> list[StoredGroup]:
        groups: Any = [self._groups[group_id] for group_id in self._finished[:limit]]
        return [StoredGroup(each.id, each.outcome, each.reason, each.steps, each.payloads) for each in groups]

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        self._check_chief(fence)
        forgotten = [group_id for group_id in dict.fromkeys(group_ids) if group_id in self._finished]
        for group_id in forgotten:
            self._finished.remove(group_id)
            del self._groups[group_id]
        return len(forgotten)

    def forget_steps(self, entry: StepEntry, *, fence: int = NO_FENCE) -> int:
        self._check_chief(fence)
        run = self._opened()
        if run.checkpoint is None or entry.step > run.checkpoint.step or self._ledger.get(entry.step) != entry:
            return 0
        forgotten = [step for step in self._ledger if step <= entry.step]
        published = self._version_steps.get(run.version, 0)
        for step in forgotten:
            del self._ledger[step]
            if step < published and step != run.checkpoint.step:
                self._consumed_at.pop(step, None)
        run.archived_step = entry.step
        return len(forgotten)

    def audit(self, *, archived: Callable[[], list[StepEntry]] | None = list) -> Audit:
        run = self._opened()
        groups = {
            "leased": list(self._leases),
            "returned": [str(ordinal) for ordinal in self._returned],
            "ready": list(self._ready.values()),
            "claimed": [group_id for claim in self._claims.values() for group_id in claim.group_ids],
            "used": [group_id for used in self._used.values() for group_id in used.group_ids],
        }
        sizes = {group_id: len(self._groups[group_id].members) for ids in groups.values() for group_id in ids}
        steps = [entry for entry in (archived() if archived else ()) if entry.step <= run.archived_step]
        snapshot = Snapshot(
            next_ordinal=run.next_ordinal,
            max_uses=run.max_uses,
            accepted=self._counters["accepted"],
            groups=groups,
            members={group_id: (size, size) for group_id, size in sizes.items()},
            done=sorted(self._done),
            outcome_members=dict(self._outcome_members),
            ledger=steps + self.ledger(),
            archived_step=run.archived_step if archived else 0,
        )
        return audit(snapshot)

    def counts(self) -> StoreCounts:
        open_sizes = self._open_sizes()
        held = [group for group in self._groups.values() if not group.outcome]
        run, named = self._opened(), ("refused", "outcomes", "outcome_members", "reasons", "curriculum")
        numbers = {"admitted": run.admitted, "became_ready": run.ready_sequence, "unarchived": len(self._finished)}
        numbers |= {"leased": len(self._leases), "returned": len(self._returned), "reusable": len(self._reusable)}
        numbers |= {"ready": len(self._ready), "open": len(open_sizes), "open_members": sum(open_sizes)}
        numbers |= {"duplicates": self._counters["duplicate"], "superseded": self._counters["superseded"]}
        return StoreCounts(
            claimed=sum(len(claim.group_ids) for claim in self._claims.values()),
            used=sum(len(used.group_ids) for used in self._used.values()),
            short_members=sum(group.size - len(group.members) for group in held if group.is_closed),
            payload_bytes=sum(len(payload) for group in self._groups.values() for payload in group.payloads),
            **{name: dict(getattr(self, f"_{name}")) for name in named},
            **{name: self._counters[name] for name in _COUNTERS},
            **numbers,
        )

    def _open_sizes(self) -> list[int]:
        groups = (group for group in self._groups.values() if not is_evaluation(group.id))
        waiting = (group for group in groups if not group.outcome and not group.is_closed)
        return [len(group.members) for group in waiting if 0 < len(group.members) < group.size]

    def now(self) -> float:
        return self._clock()

    def ready_versions(self) -> dict[int, int]:
        return dict(Counter(self._groups[group_id].oldest_version for group_id in self._ready.values()))

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        self.heartbeat([Heartbeat(role_id, gauges)], lease_s=0.0)

    def heartbeat(self, roles: Sequence[Heartbeat], *, lease_s: float) -> int:
        for each in roles:
            self._report(each.role_id, each.gauges)
        return sum(self._renew_leases(each.owner, each.lease_ids, lease_s=lease_s) for each in roles)

    def _report(self, role_id: str, gauges: dict[str, Any]) -> None:
        self._roles[role_id] = (encode(gauges), self._now())
        mark = progress_mark(gauges)
        if mark and self._progress.get(role_id, ("", 0))[0] != mark:
            self._progress[role_id] = (mark, self._now())
        if len(self._roles) > ROLES_KEPT:
            _, longest_silent = min((at, name) for name, (_, at) in self._roles.items() if name != role_id)
            del self._roles[longest_silent]
            self._progress.pop(longest_silent, None)

    def report_broker(self, name: str, *, incarnation: str, facts: dict[str, Any], lease_s: float) -> Brokers:
        at, latest = self._now(), self._deadline(lease_s)
        self._brokers[name] = encode(facts), latest
        chief = self._chief
        is_replaced = chief is None or (chief.name == name and chief.incarnation != incarnation)
        if chief is None or is_replaced or not at < chief.deadline <= latest:
            chief = self._chief = Chief(name, incarnation, chief.fence + 1 if chief else 1, latest)
        is_own = (chief.name, chief.incarnation) == (name, incarnation)
        chief.deadline = latest if is_own else chief.deadline
        living = {each: packed for each, (packed, until) in self._brokers.items() if at < until <= latest}
        decoded = {each: msgspec.msgpack.decode(packed) for each, packed in living.items()}
        return Brokers(chief.name, chief.fence if is_own else NO_FENCE, decoded)

    def roles(self) -> dict[str, dict[str, Any]]:
        roles = {}
        for role_id, (packed, reported_at) in self._roles.items():
            roles[role_id] = msgspec.msgpack.decode(packed) | {"reported_at": reported_at / 1000}
            if role_id in self._progress:
                roles[role_id]["progressed_at"] = self._progress[role_id][1] / 1000
        return roles

    def record_event(self, role_id: str, text: str) -> None:
        self._events.append(Event(self._now() / 1000, role_id, text[:EVENT_CHARACTERS_KEPT]))

    def events(self, *, limit: int) -> list[Event]:
        return list(self._events)[-limit:] if limit else []

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        self._requests[addressee][subject] = value

    def requests(self, addressee: Addressee) -> dict[str, str]:
        return dict(self._requests[addressee])

    def take_requests(self, addressee: Addressee, *, subjects: Sequence[str] | None = None) -> dict[str, str]:
        stored = self._requests[addressee]
        taken = list(stored) if subjects is None else subjects
        return {each: stored.pop(each) for each in taken if each in stored}

    def append_metrics(self, row: dict[str, Any]) -> None:
        self._metrics.append(encode(row))
        self._counters["metrics"] += 1

    def metrics(self, *, after: int = 0) -> MetricsRows:
        last = self._counters["metrics"]
        packed = list(self._metrics)[max(0, after - (last - len(self._metrics))) :]
        return MetricsRows(last, [msgspec.msgpack.decode(row) for row in packed])

    def cpu_s(self) -> float:
        return 0.0

    def memory(self) -> StoreMemory:
        return StoreMemory()

    def full_disk(self) -> str:
        return ""
