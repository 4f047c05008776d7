"""RedisStore: a run's durable state, in Redis or Valkey.

Group life cycle: open -> ready -> claimed(step, fence) -> used(step) -> retired. With reuse, a used group may be
claimed again. An unused group may be rejected, expired, or quarantined, which returns its admission. Each transition is
atomic. With an archive, a finished group stays stored until it is archived.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from slipstream.buffer.accounting import Audit, Snapshot, StoreCounts, StoreMemory, audit
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import (
    EVENT_CHARACTERS_KEPT,
    EVENTS_KEPT,
    METRICS_KEPT,
    Addressee,
    CheckpointPointer,
    Event,
    GroupState,
    Heartbeat,
    MetricsRows,
    Phase,
    RunState,
    StepEntry,
    StoredGroup,
    VersionEntry,
)
from slipstream.buffer.redis.batches import RedisBatches
from slipstream.buffer.redis.connection import decode_row_count, describe_store_disk, text
from slipstream.buffer.redis.prompts import RedisPrompts
from slipstream.buffer.sampling import RowCount
from slipstream.buffer.store_rules import NO_FENCE, Brokers, check_same_run, no_run
from slipstream.configs.buffer import KEEP_ALL, AccuracyConfig, FilterConfig, ZeroAdvantageConfig
from slipstream.configs.data import CurriculumConfig

LAYOUT = 6
"""Increment when the meaning of a key changes."""

_STATE_FIELDS = (
    "checkpoint", "stepped_at", "phase", "step", "version", "announced_version", "consumed_by_version", "detail",
    "layout", "learner_fence", "next_ordinal", "admitted", "target_lag",
)  # fmt: skip
_READ_AT_ONCE = 32
"""Groups with payloads in memory at once."""
_FORGOTTEN_AT_ONCE = 256
"""Ledger entries deleted per script, which blocks the server."""
_MIN_SPREAD = 1e-6
"""Difference of rewards that counts as a signal, above rounding errors."""


class GroupPlace(NamedTuple):
    """Place of a group, which changes with every transition. Example: ("used", 12)."""

    state: GroupState | None
    """None: finished, the record has the outcome."""
    step: int
    """Step that claims or last used it; 0 in other states."""


class RedisStore(RedisPrompts, RedisBatches):
    """All operations on a run's state. Leases and inserts are in prompts.py, claims and commits in batches.py.

    Operations are synchronous, atomic, thread-safe, repeatable after a lost answer, and take about a millisecond per
    hundred ids. They raise StoreUnavailableError, and RunConflictError before `open_run`. They use the store's clock.

    Life cycle: `open_run_store` -> `open_run` creates or finds the run -> `close`.
    """

    # --- the run -----------------------------------------------------------------------------------------------------
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
        """Create or find the run. Raises RunConflictError for settings that must not change.

        `num_rows` and `seed` determine the prompt order. `keeps_finished`: keep finished groups until `forget`.
        `max_uses`: steps that may train on one group. `group_filter`: complete groups to reject. `curriculum`: measure
        the success rate of each row.
        """
        if run_id != self._run_id:
            raise RunConflictError(f"this store was opened for run {self._run_id!r}, got {run_id!r}.")
        rows = msgspec.json.encode(num_rows)
        match group_filter:
            case ZeroAdvantageConfig():
                rule = ("zero_advantage", _MIN_SPREAD, 0.0)
            case AccuracyConfig(min_accuracy=above, max_accuracy=below):
                rule = ("accuracy", above, below)
            case _:
                rule = ("none", 0.0, 0.0)
        settings = (config_json, rows, seed, LAYOUT, int(keeps_finished), max_uses, *rule)
        rules = msgspec.json.encode(curriculum) if curriculum else ""
        stored_config, stored_rows, stored_seed, layout = self._run("open_run", *settings, rules)
        _check_layout(run_id, int(layout))
        stored = (text(stored_config), decode_row_count(stored_rows), int(stored_seed))
        check_same_run(run_id, stored=stored, opened=(config_json, num_rows, seed))
        # Only settings that may change can differ here. Keep the newest config.
        if stored[0] != config_json:
            self._run("replace_config", stored[0], config_json)
        return self.run_state()

    def run_state(self) -> RunState:
        checkpoint, stepped_at, *stored = self._call(self._client.hmget, self._key("run"), list(_STATE_FIELDS))
        fields = dict(zip(_STATE_FIELDS[2:], map(text, stored), strict=True))
        if not fields["phase"]:
            raise no_run(self._run_id)
        # Before any other field, which may mean something else in another layout.
        _check_layout(self._run_id, int(fields.pop("layout")))
        decoded = {
            "consumed": fields.pop("consumed_by_version"),
            "checkpoint": decode(checkpoint, CheckpointPointer) if checkpoint else None,
            "stepped_at": int(stepped_at) / 1000 if stepped_at else None,
            "fence": fields.pop("learner_fence") or 0,
            "target_lag": fields.pop("target_lag") or None,
        }
        return msgspec.convert(fields | decoded | {"run_id": self._run_id}, RunState, strict=False)

    def run_config_json(self) -> str:
        config = self._call(self._client.hget, self._key("run"), "config_json")
        if config is None:
            raise no_run(self._run_id)
        return text(config)

    def set_phase(self, phase: Phase, *, detail: str = "") -> None:
        self._run("set_state", "phase", phase, "detail", detail)

    def set_target_lag(self, lag: float) -> None:
        """Set the lag that prompts are admitted for, versions."""
        self._run("set_state", "target_lag", lag)

    def announce_version(self, version: int) -> None:
        """Start accepting tokens of `version`. No-op for lower versions."""
        self._run("raise_version", version, 0)

    def commit_version(self, version: int) -> None:
        """Record that all members applied and verified `version`. No-op for lower versions."""
        self._run("raise_version", version, 1)

    def record_version(self, entry: VersionEntry) -> None:
        """Record weights before they are announced. Repeating the last entry is a no-op."""
        self._run("record_version", encode(entry), entry.version, entry.step)

    def versions(self) -> list[VersionEntry]:
        """Every recorded set of weights, in order."""
        return [decode(each, VersionEntry) for each in self._call(self._client.lrange, self._key("versions"), 0, -1)]

    # --- finished groups, and all groups for inspection --------------------------------------------------------------
    def finished(self, *, limit: int) -> list[StoredGroup]:
        """Oldest `limit` finished groups, without removing them."""
        group_ids = self._sorted("finished", limit=limit) if limit > 0 else []
        found = zip(group_ids, *self._read_groups(group_ids), strict=True)
        # Another archiver may have deleted one.
        return [
            StoredGroup(group_id, outcome, reason, steps, payloads)  # type: ignore[arg-type]
            for group_id, (outcome, reason, steps), payloads in found
            if outcome
        ]

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        """Delete archived groups, unless unfinished; return their number. Restricted to the chief."""
        return self._run_as_chief("forget", fence, *group_ids)

    def forget_steps(self, entry: StepEntry, *, fence: int = NO_FENCE) -> int:
        """Delete the ledger up to the archived `entry`; return the number of entries.

        No-op if no checkpoint covers the step, or its entry differs. Restricted to the chief.
        """
        forgotten = 0
        while count := self._run_as_chief("forget_steps", fence, entry.step, encode(entry), _FORGOTTEN_AT_ONCE):
            forgotten += count
        return forgotten

    def audit(self, *, archived: Callable[[], list[StepEntry]] | None = list) -> Audit:
        """Recompute the accounting from the stored data: seconds for a hundred thousand groups.

        `archived`: reads the archive's ledger, by default an empty one; None: archived entries are not audited.
        """
        # Fails on another key layout.
        self.run_state()
        next_ordinal, max_uses, archived_step, accepted, done, states, outcomes, ledger = self._run("snapshot")
        sized = {text(state): list(zip(*[iter(flat)] * 3, strict=True)) for state, flat in states}
        entries = sorted((decode(entry, StepEntry) for entry in ledger), key=lambda entry: entry.step)
        snapshot = Snapshot(
            next_ordinal=next_ordinal,
            max_uses=max_uses,
            accepted=accepted,
            groups={state: [text(group) for group, _, _ in groups] for state, groups in sized.items()},
            members={text(group): (counted, kept) for groups in sized.values() for group, counted, kept in groups},
            done=np.flatnonzero(np.unpackbits(np.frombuffer(done, dtype=np.uint8))).tolist(),
            outcome_members=_numbers(outcomes),
            ledger=[entry for entry in (archived() if archived else ()) if entry.step <= archived_step] + entries,
            archived_step=archived_step if archived else 0,
        )
        return audit(snapshot)

    def groups(self, *, group_ids: Collection[str] | None = None, state: str | None = None) -> Iterator[StoredGroup]:
        """Yield all groups, or those with these ids or this state; finished ones first.

        For inspection, without blocking writers. A moving group is found in one of its states; one that leaves the
        store is omitted.
        """
        found = {
            name: place.state
            for name, place in self.group_places().items()
            if (group_ids is None or name in group_ids) and (state is None or place.state in (None, state))
        }
        listed = list(found)
        for start in range(0, len(listed), _READ_AT_ONCE):
            chunk = listed[start : start + _READ_AT_ONCE]
            for name, (outcome, reason, steps), payloads in zip(chunk, *self._read_groups(chunk), strict=True):
                at = outcome or found[name]
                if payloads and state in (None, at):
                    yield StoredGroup(name, at, reason, steps, payloads)  # type: ignore[arg-type]

    def group_places(self) -> dict[str, GroupPlace]:
        """Group id -> place, finished groups first."""
        places = dict.fromkeys(self._sorted("finished"), GroupPlace(None, 0))
        for steps, prefix, state in (("used_steps", "used:", "used"), ("claims", "claimed:", "claimed")):
            for step in self._sorted(steps):
                listed = self._call(self._client.lrange, self._key(f"{prefix}{step}"), 0, -1)
                places |= dict.fromkeys(map(text, listed), GroupPlace(state, int(step)))  # type: ignore[arg-type]
        places |= dict.fromkeys(self._sorted("ready"), GroupPlace("ready", 0))
        return places | dict.fromkeys(self._sorted("open"), GroupPlace("open", 0))

    def _sorted(self, name: str, *, limit: int = 0) -> list[str]:
        return [text(member) for member in self._call(self._client.zrange, self._key(name), 0, limit - 1)]

    def _read_groups(self, group_ids: list[str]) -> tuple[list[tuple[str, str, list[int]]], list[list[bytes]]]:
        pipeline = self._client.pipeline(transaction=False)
        for group_id in group_ids:
            pipeline.hmget(self._key(f"group:{group_id}"), ["outcome", "reason", "steps"])
            pipeline.hgetall(self._key(f"payloads:{group_id}"))
        answers = self._call(pipeline.execute)
        fields = [tuple(map(text, each)) for each in answers[::2]]
        facts = [
            (outcome, reason, [int(step) for step in steps.split(",") if step]) for outcome, reason, steps in fields
        ]
        return facts, [[payloads[index] for index in sorted(payloads, key=int)] for payloads in answers[1::2]]

    # --- monitoring --------------------------------------------------------------------------------------------------
    def counts(self) -> StoreCounts:
        numbers, *tables = map(_numbers, self._run("counts"))
        names = ("refused", "outcomes", "outcome_members", "reasons", "curriculum")
        return StoreCounts(**numbers, **dict(zip(names, tables, strict=True)))  # type: ignore[arg-type]

    def now(self) -> float:
        """Return the time of the store's clock, seconds."""
        if self._clock is not None:
            return self._clock()
        seconds, microseconds = self._call(self._client.time)
        return float(seconds + microseconds / 1e6)

    def ready_versions(self) -> dict[int, int]:
        """Oldest token version -> number of ready groups."""
        return {int(version): count for version, count in _numbers(self._run("ready_versions")).items()}

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's gauges (plain values); see `ROLES_KEPT`."""
        self.heartbeat([Heartbeat(role_id, gauges)], lease_s=0.0)

    def report_broker(self, name: str, *, incarnation: str, facts: dict[str, Any], lease_s: float) -> Brokers:
        """Report a broker as alive for `lease_s`, and make it the chief if the run has none.

        `facts`: plain values for other brokers. `lease_s`: equal for all brokers.
        """
        chief, fence, *living = self._run("report_broker", name, incarnation, int(lease_s * 1000), encode(facts))
        pairs = zip(living[::2], living[1::2], strict=True)
        return Brokers(text(chief), fence, {text(each): msgspec.msgpack.decode(packed) for each, packed in pairs})

    def roles(self) -> dict[str, dict[str, Any]]:
        """Latest gauges of every role, with `reported_at` and, after progress (`progress_mark`), `progressed_at`."""
        gauges, *times = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in self._run("read_roles"))
        stamps = dict(zip(("reported_at", "progressed_at"), times, strict=True))
        return {
            text(role_id): msgspec.msgpack.decode(packed)
            | {stamp: int(times[role_id]) / 1000 for stamp, times in stamps.items() if role_id in times}
            for role_id, packed in gauges.items()
        }

    def record_event(self, role_id: str, text: str) -> None:
        """Append an event; see `EVENTS_KEPT`."""
        self._run("record_event", role_id, text[:EVENT_CHARACTERS_KEPT], EVENTS_KEPT)

    def events(self, *, limit: int) -> list[Event]:
        """Newest `limit` events, oldest first."""
        packed = self._call(self._client.lrange, self._key("events"), -limit, -1) if limit else []
        rows = [msgspec.msgpack.decode(each, type=tuple[int, str, str]) for each in packed]
        return [Event(at_ms / 1000, role_id, message) for at_ms, role_id, message in rows]

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """Leave a request for a role, replacing any on the same subject."""
        self._run("request", f"{addressee}_requests", subject, value)

    def requests(self, addressee: Addressee) -> dict[str, str]:
        """Subject -> value of pending requests."""
        return self._read_texts(f"{addressee}_requests")

    def take_requests(self, addressee: Addressee, *, subjects: Sequence[str] | None = None) -> dict[str, str]:
        """Remove and return pending requests, all or those on `subjects`."""
        if subjects is not None and not subjects:
            return {}
        flat = self._run("take_requests", f"{addressee}_requests", *(subjects or ()))
        return {text(subject): text(value) for subject, value in zip(flat[::2], flat[1::2], strict=True)}

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the row of a step; see `METRICS_KEPT`."""
        self._run("append_metrics", encode(row), METRICS_KEPT)

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """Stored rows after the first `after` ever appended."""
        last, packed = self._run("read_metrics", after)
        return MetricsRows(last, [msgspec.msgpack.decode(row) for row in packed])

    def cpu_s(self) -> float:
        info = self._call(self._client.info, "cpu")
        return float(info["used_cpu_sys"] + info["used_cpu_user"])

    def memory(self) -> StoreMemory:
        info = self._call(self._client.info, "memory")
        return StoreMemory(int(info["used_memory"]), int(info.get("maxmemory", 0)))

    def full_disk(self) -> str:
        """Description of the full disk that makes the store refuse writes; else empty."""
        # Set by a failed write, until the next success.
        status = self._call(self._client.info, "persistence").get("aof_last_write_status", "ok")
        return describe_store_disk(self._client) if status != "ok" else ""


def _numbers(flat: list[Any]) -> dict[str, int]:
    return {text(name): int(number) for name, number in zip(flat[::2], flat[1::2], strict=True)}


def _check_layout(run_id: str, layout: int) -> None:
    if layout != LAYOUT:
        raise RunConflictError(
            f"run {run_id!r} is stored with key layout {layout}, this version of Slipstream reads {LAYOUT}: "
            "continue with the version that started it or choose another name."
        )
