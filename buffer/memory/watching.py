"""MemoryStore, what people watch: counts, gauges, metrics."""

from collections import Counter
from typing import Any

import msgspec

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.memory.state import MemoryState, Run
from slipstream.buffer.records import (
    EVENT_CHARACTERS_KEPT,
    ROLES_KEPT,
    Addressee,
    Event,
    MetricsRows,
    RunState,
    VersionEntry,
    progress_mark,
)
from slipstream.buffer.transitions import PHASES, check_same_run, is_evaluation
from slipstream.configs.buffer import KEEP_ALL, FilterConfig


# @@ MemoryStore, the run itself: its config, phase, step and versions.
class MemoryRun(MemoryState):
    """Operations on the run."""

    def open_run(
        self,
        run_id: str,
        *,
        config_json: str,
        num_rows: int,
        seed: int,
        keeps_finished: bool = False,
        max_uses: int = 1,
        group_filter: FilterConfig = KEEP_ALL,
    ) -> RunState:
        """See `Store.open_run`."""
        with self._changed:
            if self._run is None:
                self._run = Run(run_id, config_json, num_rows, seed, keeps_finished, group_filter, max_uses)
            run = self._run
            if run.id != run_id:
                raise RunConflictError(f"this store was opened for run {run.id!r}, got {run_id!r}.")
            stored = (run.config_json, run.num_rows, run.seed)
            check_same_run(run_id, stored=stored, opened=(config_json, num_rows, seed))
            run.config_json = config_json
            return self.run_state()

    def run_state(self) -> RunState:
        """See `Store.run_state`."""
        with self._changed:
            run = self._opened()
            return RunState(
                run_id=run.id,
                phase=run.phase,  # type: ignore[arg-type]
                step=run.step,
                version=run.version,
                announced_version=run.announced_version,
                consumed=run.consumed_by_version,
                checkpoint=run.checkpoint,
                detail=run.detail,
                stepped_at=run.stepped_at,
                fence=run.learner_fence,
            )

    def run_config_json(self) -> str:
        """See `Store.run_config_json`."""
        with self._changed:
            return self._opened().config_json

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """See `Store.set_phase`."""
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}, got {phase!r}.")
        with self._changed:
            run = self._opened()
            run.phase, run.detail = phase, detail

    def announce_version(self, version: int) -> None:
        """See `Store.announce_version`."""
        with self._changed:
            run = self._opened()
            run.announced_version = max(run.announced_version, version)

    def record_version(self, entry: VersionEntry) -> None:
        """See `Store.record_version`."""
        with self._changed:
            self._opened()
            if self._versions[-1:] != [entry]:
                self._versions.append(entry)
            self._version_steps[entry.version] = entry.step

    def versions(self) -> list[VersionEntry]:
        """See `Store.versions`."""
        with self._changed:
            self._opened()
            return list(self._versions)

    def commit_version(self, version: int) -> None:
        """See `Store.commit_version`."""
        with self._changed:
            run = self._opened()
            run.announced_version = max(run.announced_version, version)
            if version > run.version:
                run.version = version
                step = self._version_steps.get(version, run.step)
                run.consumed_by_version = self._consumed_at.get(step, 0)


_COUNTERS = ("accepted_tokens", "superseded_tokens", "wasted_tokens", "trained", "trained_tokens")


class MemoryWatching(MemoryState):
    """Operations that only look, and the gauges looked at."""

    def counts(self) -> StoreCounts:
        """See `Store.counts`."""
        with self._changed:
            open_sizes = self._open_sizes()
            held = [group for group in self._groups.values() if not group.outcome]
            return StoreCounts(
                admitted=self._opened().admitted,
                became_ready=self._opened().ready_sequence,
                leased=len(self._leases),
                returned=len(self._returned),
                open=len(open_sizes),
                ready=len(self._ready),
                claimed=sum(len(claim.group_ids) for claim in self._claims.values()),
                used=sum(len(used.group_ids) for used in self._used.values()),
                reusable=len(self._reusable),
                accepted=self._counters["accepted"],
                duplicates=self._counters["duplicate"],
                superseded=self._counters["superseded"],
                refused=dict(self._refused),
                outcomes=dict(self._outcomes),
                outcome_members=dict(self._outcome_members),
                reasons=dict(self._reasons),
                unarchived=len(self._finished),
                open_members=sum(open_sizes),
                short_members=sum(group.size - len(group.members) for group in held if group.is_closed),
                payload_bytes=sum(group.num_bytes for group in self._groups.values()),
                **{name: self._counters[name] for name in _COUNTERS},
            )

    def now(self) -> float:
        """See `Store.now`."""
        return self._clock()

    def ready_versions(self) -> dict[int, int]:
        """See `Store.ready_versions`."""
        with self._changed:
            self._opened()
            return dict(Counter(self._groups[group_id].oldest_version for group_id in self._ready.values()))

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """See `Store.report_role`."""
        with self._changed:
            self._opened()
            self._roles[role_id] = (encode(gauges), self._now())
            mark = progress_mark(gauges)
            if mark and self._progress.get(role_id, ("", 0))[0] != mark:
                self._progress[role_id] = (mark, self._now())
            if len(self._roles) > ROLES_KEPT:
                self._forget_longest_unheard(but=role_id)

    def roles(self) -> dict[str, dict[str, Any]]:
        """See `Store.roles`."""
        with self._changed:
            return {
                role_id: msgspec.msgpack.decode(packed)
                | {"reported_at": reported_at / 1000}
                | self._progressed(role_id)
                for role_id, (packed, reported_at) in self._roles.items()
            }

    def _forget_longest_unheard(self, *, but: str) -> None:
        _, forgotten = min((at, role_id) for role_id, (_, at) in self._roles.items() if role_id != but)
        del self._roles[forgotten]
        self._progress.pop(forgotten, None)

    def _progressed(self, role_id: str) -> dict[str, float]:
        return {"progressed_at": self._progress[role_id][1] / 1000} if role_id in self._progress else {}

    def record_event(self, role_id: str, text: str) -> None:
        """See `Store.record_event`."""
        with self._changed:
            self._opened()
            self._events.append(Event(self._now() / 1000, role_id, text[:EVENT_CHARACTERS_KEPT]))

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """See `Store.request`."""
        with self._changed:
            self._opened()
            self._requests[addressee][subject] = value

    def take_requests(self, addressee: Addressee) -> dict[str, str]:
        """See `Store.take_requests`."""
        with self._changed:
            self._opened()
            return self._requests.pop(addressee, {})

    def events(self, *, limit: int) -> list[Event]:
        """See `Store.events`."""
        with self._changed:
            return list(self._events)[-limit:] if limit else []

    def append_metrics(self, row: dict[str, Any]) -> None:
        """See `Store.append_metrics`."""
        with self._changed:
            self._opened()
            self._metrics.append(encode(row))
            self._counters["metrics"] += 1

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """See `Store.metrics`."""
        with self._changed:
            self._opened()
            last = self._counters["metrics"]
            packed = list(self._metrics)[max(0, after - (last - len(self._metrics))) :]
            return MetricsRows(last, [msgspec.msgpack.decode(row) for row in packed])

    def _open_sizes(self) -> list[int]:
        groups = (group for group in self._groups.values() if not is_evaluation(group.id))
        waiting = (group for group in groups if not group.outcome and not group.is_closed)
        return [len(group.members) for group in waiting if 0 < len(group.members) < group.size]
