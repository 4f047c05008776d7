"""Store: the protocol of a run's durable state.

Group life cycle: open -> ready -> claimed(step, fence) -> used(step) -> retired. With reuse, a used group may be
claimed again. Before it is used, a group may instead be rejected, expired, or quarantined, with a reason; its admission
is then returned. Each transition is atomic. With an archive, a finished group stays stored until it is archived.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slipstream.buffer.accounting import Audit, StoreCounts, StoreMemory
from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.records import (
    Addressee,
    CheckpointPointer,
    Claim,
    EvaluationAnswer,
    EvaluationResult,
    Event,
    FinishedGroup,
    Heartbeat,
    Insertion,
    Lease,
    MetricsRows,
    RunState,
    StepEntry,
    VersionEntry,
)
from slipstream.buffer.sampling import NOTHING_SKIPPED, NotReady, RowCount, SamplingRules, Upcoming
from slipstream.buffer.store_rules import NO_FENCE, Brokers
from slipstream.buffer.trajectory import Purpose, TrajectoryHeader
from slipstream.configs.buffer import KEEP_ALL, FilterConfig, GroupDeadline
from slipstream.configs.data import CurriculumConfig
from slipstream.runtime.clock import Clock


class Store(Protocol):
    """All operations: synchronous, atomic, about a millisecond per hundred ids.

    Time is the store's clock. Every operation may be repeated after a lost answer, and raises StoreUnavailableError if
    the store does not answer, RunConflictError before `open_run`.
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
        """Create or find the run. Raises RunConflictError for settings that the stored run must not change.

        `num_rows` and `seed` determine the order of the training prompts. `keeps_finished`: keep finished groups until
        `forget`. `max_uses`: steps that may train on one group. `group_filter`: complete groups to reject.
        `curriculum`: measure the success rate of each row.
        """

    def run_state(self) -> RunState: ...

    def run_config_json(self) -> str: ...

    def set_phase(self, phase: str, *, detail: str = "") -> None: ...

    def announce_version(self, version: int) -> None:
        """Start accepting tokens of `version`. No-op for lower versions."""

    def commit_version(self, version: int) -> None:
        """Record that all members applied and verified `version`. No-op for lower versions."""

    def record_version(self, entry: VersionEntry) -> None:
        """Record a set of weights before it is announced. Repeating the last entry is a no-op."""

    def versions(self) -> list[VersionEntry]:
        """Return every recorded set of weights, in order."""

    # --- leases ------------------------------------------------------------------------------------------------------
    def lease(
        self,
        *,
        owner: str,
        max_groups: int,
        group_size: int,
        lease_s: float,
        admission_limit: int,
        has_baseline: bool = False,
        version: int | None = None,
        max_evaluations: int | None = None,
        upcoming: Upcoming = NOTHING_SKIPPED,
    ) -> list[Lease]:
        """Lease prompts: open evaluations, then returned prompts, new prompts, and more evaluations.

        In `max_groups`, `group_size` evaluation rows count as one group. `version`: lease evaluations of this version
        only. `max_evaluations`: rows leased ahead of other prompts.

        New prompts are admitted while `admitted < admission_limit`. A negative limit also withholds returned prompts:
        only evaluations are leased. Training prompts are leased only in the phases starting and training. A group has
        `group_size` members; with `has_baseline` the last one is greedy. `upcoming` prompts outside the curriculum's
        band are skipped: they finish immediately and are not admitted.
        """

    def heartbeat(self, roles: Sequence[Heartbeat], *, lease_s: float) -> int:
        """Report roles as `report_role` does, and extend the named leases that owners still hold.

        Returns the number extended. Owners name their leases, so a lease that was lost in transit lapses.
        """

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """Give prompts back, to be leased again with attempt + 1 for the missing members. Returns their number.

        Skips lapsed leases, and those of other owners if `owner` is given.
        """

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """Give back all prompts leased to `owner`. Returns their number."""

    def follow_clock(self, *, jump_s: float, lease_s: float, claim_lease_s: float, fence: int = NO_FENCE) -> None:
        """Correct the deadlines of leases, claims, and incomplete groups. Call it before `reap`.

        If the store's clock jumped forward by `jump_s`, they move along. In any case the remaining time is capped at
        `lease_s` or `claim_lease_s`, which it exceeds after a jump back (`jump_s=0`). Restricted to the chief.
        """

    def reap(self, *, group_deadline: GroupDeadline | None = None, fence: int = NO_FENCE) -> list[str]:
        """Take back lapsed leases and claims; quarantine groups that were tried too often.

        Incomplete groups beyond `group_deadline` become ready (unless the filter rejects them) or expire. Returns a log
        line per event. Raises StaleFenceError unless `fence` is the chief's (`store_rules`).
        """

    def report_broker(self, name: str, *, incarnation: str, facts: dict[str, Any], lease_s: float) -> Brokers:
        """Report a broker as alive for `lease_s`, making it the chief if the run has none.

        `facts`: plain values for other brokers. All brokers of a run pass the same `lease_s`.
        """

    # --- images of prompts -------------------------------------------------------------------------------------------
    def put_images(self, images: Mapping[str, bytes]) -> None:
        """Store images by name for the rest of the run, skipping existing names."""

    def images(self, names: list[str]) -> dict[str, bytes]:
        """Return name -> bytes of those that are stored."""

    # --- trajectories ------------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]], *, guest: str = "") -> list[Insertion]:
        """Store trajectories, idempotent on id; return their outcomes in order. Durable (as configured) on return.

        Evaluation answers are counted and finish immediately. A refused trajectory leaves no trace: the caller has it
        resent (`store_full`) or passes it to `quarantine`. A completed group atomically becomes ready or is rejected by
        the filter. `guest`: the guest that wrote them, if any.
        """

    def quarantine_guest(self, guest: str, *, reason: str) -> int:
        """Refuse a guest's trajectories from now on; quarantine its unused groups, and return their number.

        Its groups are those with any member from it. A claimed one follows when its claim lapses or is rolled back. A
        used one is not sampled again, and follows if a rollback undoes its use.
        """

    def quarantined_guests(self) -> dict[str, str]:
        """Return quarantined guest -> reason."""

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Count a rejected frame in `refused[reason]`, and keep its first bytes in a bounded list."""

    # --- batches -----------------------------------------------------------------------------------------------------
    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """Claim `num_groups` groups for `step` of a learner at `version`, or return why it cannot yet.

        Stale groups leave the queue first, by the rules. An earlier claim of the step is taken back, so a retry is
        safe. Raises StaleFenceError for a committed step.
        """

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until `num_groups` groups are ready; False after `timeout_s`."""

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Return each group's encoded trajectories by index. Raises StaleFenceError for a group without any."""

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """Extend the claim's lease. Raises StaleFenceError."""

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """Remove groups from a claim; return their number. Raises StaleFenceError.

        Skips groups outside the claim. Groups trained on before are only released, not used again. Claim the step again
        to refill it.
        """

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """Mark the claim's groups as used, set RunState.step, and add `entry` to the ledger, atomically.

        Committing the same claim again is a no-op. Raises StaleFenceError for a lapsed claim or a step out of order.
        """

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """Record a durable checkpoint of all steps <= pointer.step; retire their groups, and return their number.

        Reusable groups stay until the run is finishing. The ledger up to the pointer is final. Raises StaleFenceError
        if it covers uncommitted steps, or if `fence` is not RunState.fence.
        """

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        """Resume from a checkpoint: groups that are claimed, or were used after `to_step`, return to the queue.

        Returns their number and the new RunState.fence, which locks out every earlier learner.

        Removes ledger entries after `to_step`. Versions stay announced: trajectories of undone versions may still
        arrive. A live claim counts as an attempt, so a group that crashes every learner ends in quarantine.
        """

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """Return the entries of committed steps, in order."""

    # --- finished groups ---------------------------------------------------------------------------------------------
    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """Return the oldest `limit` finished groups, without removing them."""

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        """Delete archived groups; return their number. Skips unfinished groups. Restricted to the chief."""

    def audit(self) -> Audit:
        """Recompute the accounting from the stored data: seconds for a hundred thousand groups."""

    # --- evaluations -------------------------------------------------------------------------------------------------
    def open_evaluation(
        self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int], samples: int = 1
    ) -> None:
        """Have generators answer held-out rows with `version` only. Idempotent on id."""

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """Return the totals so far; None if it was never opened."""

    def evaluation_answers(self, evaluation_id: str) -> list[EvaluationAnswer]:
        """Return the answers so far, unordered. They expire a day after the last one."""

    # --- monitoring --------------------------------------------------------------------------------------------------
    def counts(self) -> StoreCounts: ...

    def now(self) -> float:
        """Return the store's clock, seconds."""

    def ready_versions(self) -> dict[int, int]:
        """Return oldest token version -> number of ready groups."""

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's gauges (plain values); see `ROLES_KEPT`."""

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return the latest gauges of every stored role, with `reported_at`, seconds of the store's clock.

        After progress (`progress_mark`), also with `progressed_at`.
        """

    def record_event(self, role_id: str, text: str) -> None:
        """Append an event; see `EVENTS_KEPT`."""

    def events(self, *, limit: int) -> list[Event]:
        """Return the newest `limit` events, oldest first."""

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """Leave a request for a role, replacing any on the same subject."""

    def requests(self, addressee: Addressee) -> dict[str, str]:
        """Return subject -> value of pending requests."""

    def take_requests(self, addressee: Addressee, *, subjects: Sequence[str] | None = None) -> dict[str, str]:
        """Remove and return pending requests (subject -> value), all or those on `subjects`."""

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the row of a step; see `METRICS_KEPT`."""

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """Return the stored rows after the first `after` ever appended."""

    def cpu_s(self) -> float: ...

    def memory(self) -> StoreMemory: ...

    def full_disk(self) -> str:
        """Describe the full disk that makes the store refuse writes; else empty."""

    def close(self) -> None: ...


_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """A period of failing store calls. Life cycle: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence per call."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, for a Nack; empty while the store works."""

    @property
    def seconds(self) -> float:
        """Duration so far; 0 without an outage."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def record(self, error: StoreUnavailableError) -> None:
        """Record a failed call; report it every few seconds."""
        now = self._clock()
        if self._began_at is None:
            self._began_at = self._next_report_at = now
        self.reason = "store_cannot_write" if isinstance(error, StoreCannotWriteError) else "store_unavailable"
        if now >= self._next_report_at:
            self._next_report_at = now + _REPORT_INTERVAL_S
            self._report(f"waiting for the store for {self.seconds:.0f} s: {error}")

    def end(self) -> None:
        """Record a successful call."""
        if self._began_at is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._began_at, self.reason = None, ""
