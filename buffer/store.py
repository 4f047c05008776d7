"""Store: the protocol of the durable state, implemented in Redis.

Group life cycle: open -> ready -> claimed(step, fence) -> used(step) -> retired. With reuse, a used group may be
claimed again. A group that leaves this path before being used is rejected, expired, or quarantined with a reason, and
its admission is returned. Each transition is one atomic operation. If the run has an archive, a finished group stays
stored until it is archived.
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
    """All operations. Synchronous and atomic; each takes about a millisecond per hundred ids.

    Time is the store's own clock. Every method raises StoreUnavailableError if the store does not answer, and
    RunConflictError before `open_run`. Every operation may be repeated after a lost answer.
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
        """Create the run, or find the existing one. Raises RunConflictError if the store holds another run.

        `num_rows` and `seed` determine the order of the training prompts. `keeps_finished`: keep finished groups until
        `forget`, for an archiver. `max_uses`: number of steps that may train on one group. `group_filter`: which
        complete groups to reject instead of making them ready. `curriculum`: measure the success rate of each row. The
        run stores both.
        """

    def run_state(self) -> RunState: ...

    def run_config_json(self) -> str:
        """Return the config passed to `open_run`."""

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """Set the phase of the run and its reason."""

    def announce_version(self, version: int) -> None:
        """Start accepting tokens of `version`. Has no effect if a higher version was announced."""

    def commit_version(self, version: int) -> None:
        """Record that all members applied and verified `version`. Has no effect if a higher version was committed."""

    def record_version(self, entry: VersionEntry) -> None:
        """Record a set of weights before it is announced. Repeating the last entry has no effect."""

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
        """Lease prompts in this order: open evaluations, returned prompts, new prompts, more of the evaluations.

        `max_groups` limits the number of groups; the slot of one group holds as many evaluation rows as a group has
        members. `version`: lease evaluations of this version only. `max_evaluations`: maximum number of evaluation rows
        leased ahead of other prompts.

        New training prompts are admitted only while `admitted < admission_limit` and the phase is starting or training.
        No training prompt is leased in later phases. A group needs `group_size` members; with `has_baseline` the last
        one is decoded greedily. `upcoming` prompts with a row outside the curriculum's band are skipped: they finish
        immediately and are not admitted.
        """

    def heartbeat(self, roles: Sequence[Heartbeat], *, lease_s: float) -> int:
        """Report roles as `report_role` does, and extend the named leases that their owners still hold.

        Returns the number of extended leases. Each owner names the leases it is working on, so a lease whose answer was
        lost in transit lapses. A few dozen roles share one call.
        """

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """Return prompts to be leased again with attempt + 1, keeping stored members. Return their number.

        Lapsed leases are skipped; so are those of other owners if `owner` is given.
        """

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """Return all prompts leased to `owner`, and their number."""

    def follow_clock(self, *, jump_s: float, lease_s: float, claim_lease_s: float, fence: int = NO_FENCE) -> None:
        """Correct deadlines after the store's clock jumped by `jump_s`, forward or back. Call it before `reap`.

        Leases, claims, and incomplete groups keep their remaining time, capped at `lease_s` or `claim_lease_s`, which a
        clock set back would exceed. Restricted to the chief, like `reap`.
        """

    def reap(self, *, group_deadline: GroupDeadline | None = None, fence: int = NO_FENCE) -> list[str]:
        """Take back lapsed leases and claims, and quarantine groups that were tried too often.

        Groups that wait too long for their last members become ready without them (unless the run's filter rejects
        them), or expire, as `group_deadline` says. Returns one log line per event. Raises StaleFenceError unless
        `fence` is the chief's (see `store_rules.Brokers`).
        """

    def report_broker(self, name: str, *, incarnation: str, facts: dict[str, Any], lease_s: float) -> Brokers:
        """Report a broker as alive for `lease_s`, make it the chief if there is none, and return the live brokers.

        `facts`: plain values for the other brokers. All brokers of a run pass the same `lease_s`.
        """

    # --- images of prompts -------------------------------------------------------------------------------------------
    def put_images(self, images: Mapping[str, bytes]) -> None:
        """Store images by name for the rest of the run. Existing names are kept unchanged."""

    def images(self, names: list[str]) -> dict[str, bytes]:
        """Return name -> bytes of the named images that are stored."""

    # --- trajectories ------------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]], *, guest: str = "") -> list[Insertion]:
        """Store trajectories, idempotent on id; return one outcome each, in order. Durable (as configured) on return.

        Evaluation answers are counted and finish immediately. A refused trajectory leaves no trace: the caller either
        has it resent (`store_full`) or passes it to `quarantine`, which counts it. A group that becomes complete is
        ready, or rejected by the run's filter, in the same atomic operation. `guest`: the guest that wrote them.
        Trajectories of a quarantined guest are refused (`guest_quarantined`).
        """

    def quarantine_guest(self, guest: str, *, reason: str) -> int:
        """Ban a guest permanently, quarantine its groups that were never trained on, and return their number.

        A group with any member from the guest counts as its group. A claimed group follows when its claim lapses or is
        rolled back. A used group is not sampled again, and follows if a rollback undoes its use.
        """

    def quarantined_guests(self) -> dict[str, str]:
        """Return quarantined guest -> reason."""

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Keep the first bytes of a rejected frame, in a bounded list, and count it in `refused[reason]`."""

    # --- batches -----------------------------------------------------------------------------------------------------
    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """Claim exactly `num_groups` groups for `step` of a learner at `version`, or return why it cannot yet.

        Stale groups leave the queue first, as the rules say. A step has one claim: an earlier claim is taken back
        first, so retrying after a lost answer is safe. Raises StaleFenceError for a committed step.
        """

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until `num_groups` groups are ready, for at most `timeout_s`. Return whether they are."""

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Return each group's encoded trajectories, by index. Raises StaleFenceError for a group without any."""

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """Extend the claim's lease. Raises StaleFenceError."""

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """Remove groups that the learner will not train on from a claim; return their number. Raises StaleFenceError.

        Groups outside the claim are skipped. A group that was trained on before is only released and not used again.
        Claim the step again to refill it.
        """

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """Mark the claim's groups as used and set RunState.step to claim.step. Raises StaleFenceError.

        Adds `entry` to the step ledger in the same atomic operation. Committing the same claim again has no effect.
        """

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """Record a durable checkpoint of every step <= pointer.step, retire their groups, and return their number.

        Groups that may be used again stay until the run is finishing. A resumed run starts from the pointer, so the
        ledger up to it is final. Raises StaleFenceError if it covers steps that are not committed here, or if `fence`
        is not RunState.fence.
        """

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        """Resume from a checkpoint: groups that are claimed, or were used after `to_step`, become ready again.

        Return their number and the new RunState.fence, which is greater than that of every earlier learner.

        Removes ledger entries after `to_step`. Announced versions stay announced, because trajectories of undone
        versions may still arrive. A live claim counts as an attempt, so a group that crashes every learner ends in
        quarantine.
        """

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """Return the entries of committed steps from `first_step` on, in order."""

    # --- finished groups ---------------------------------------------------------------------------------------------
    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """Return the oldest `limit` finished groups that are stored, without removing them."""

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        """Delete archived groups and return their number. Unfinished groups are skipped. Restricted to the chief."""

    def audit(self) -> Audit:
        """Recompute the accounting from the stored data. Reads all groups: seconds for a hundred thousand."""

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
        """Return the store's clock, seconds, comparable with the times in records."""

    def ready_versions(self) -> dict[int, int]:
        """Return oldest token version -> number of ready groups. Reads every ready group."""

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's gauges (plain values), stamped with the store's time.

        Above `ROLES_KEPT` roles, a new one replaces the one with the oldest report.
        """

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return the latest gauges of every stored role, including `reported_at`, seconds of the store's clock.

        A role that ever made progress (`progress_mark`) also has `progressed_at`, the time of its last progress.
        """

    def record_event(self, role_id: str, text: str) -> None:
        """Append an event; the newest `EVENTS_KEPT` are kept."""

    def events(self, *, limit: int) -> list[Event]:
        """Return the newest `limit` events, oldest first."""

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """Leave a request for a role of the run, replacing any on the same subject."""

    def requests(self, addressee: Addressee) -> dict[str, str]:
        """Return subject -> value of pending requests."""

    def take_requests(self, addressee: Addressee, *, subjects: Sequence[str] | None = None) -> dict[str, str]:
        """Remove pending requests, all or those on `subjects`, and return subject -> value; each is returned once."""

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the row of a step; the newest `METRICS_KEPT` are kept."""

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """Return the stored rows after the first `after` ever appended, and the number ever appended."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of the store's server; 0 for a store without its own process."""

    def memory(self) -> StoreMemory:
        """Return memory use and limit of the store's server."""

    def full_disk(self) -> str:
        """Describe the full disk that makes the store refuse writes; empty while it accepts them."""

    def close(self) -> None:
        """Close all connections to the server."""


_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """A period of failing store calls. Life: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence per call."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, as sent to peers in a Nack; empty while the store works."""

    @property
    def seconds(self) -> float:
        """Duration so far; 0 without an outage."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def record(self, error: StoreUnavailableError) -> None:
        """Record a failed call, and report it if a report is due."""
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
