"""Store: the protocol of the durable state, implemented in Redis.

Life of a group: open -> ready -> claimed(step, fence) -> used(step) -> retired. A used group may be claimed again where
the run allows reuse. A group that leaves this line before it was used is rejected, expired or quarantined, with a
reason, and gives its admission back. Each transition is one atomic operation. A group that is over stays stored until
it is archived, if the run has an archive.
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
    """All operations. Synchronous; each is atomic and takes about a millisecond per hundred ids.

    Time is the store's own clock. Every method raises StoreUnavailableError when the store does not answer, and
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
        """Create the run, or find it again. Raises RunConflictError when another run lives here.

        `num_rows`: those to train on, from which, with `seed`, the order of prompts follows.
        `keeps_finished`: groups that are over stay until `forget`, for an archiver. `max_uses`: steps that may train on
        one group. `group_filter`: complete groups to reject instead of making them ready. `curriculum`: measures the
        success rate of each row. The run keeps both.
        """
        ...

    def run_state(self) -> RunState:
        """Return the state of the run."""
        ...

    def run_config_json(self) -> str:
        """Return the config given to `open_run`."""
        ...

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """Set the phase of the run and its reason."""
        ...

    def announce_version(self, version: int) -> None:
        """Accept tokens of `version` from now on. A lower one changes nothing."""
        ...

    def commit_version(self, version: int) -> None:
        """Record that all members applied and verified `version`. A lower one changes nothing."""
        ...

    def record_version(self, entry: VersionEntry) -> None:
        """Enter a set of weights before it is announced. A repeat of the last entry changes nothing."""
        ...

    def versions(self) -> list[VersionEntry]:
        """Return every set of weights entered, in order."""
        ...

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
        """Lease prompts: open evaluations first, then returned prompts, then new ones, then more of the evaluations.

        There is room for `max_groups`, or in place of each for as many rows of evaluations as it would have members.
        `version`: only evaluations of that one. `max_evaluations`: most of their rows that come before other prompts.

        New training prompts are admitted only while `admitted < admission_limit` and the phase is starting or
        training; no training prompt is leased in later phases. A group needs `group_size` members; the last of them is
        decoded greedily if it `has_baseline`. Those of the `upcoming` ones whose row lies outside the curriculum's band
        are skipped: over at once, and not admitted.
        """
        ...

    def heartbeat(self, roles: Sequence[Heartbeat], *, lease_s: float) -> int:
        """Report roles as `report_role` does, and extend the named leases that their owners still hold.

        Returns the number of extended leases. An owner names the leases it works on, so that one whose answer was lost
        on the way lapses by itself. A few dozen roles share one call.
        """
        ...

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """Return prompts, to be leased again with attempt + 1; members already stored stay. Return their number.

        Leases that are over are skipped, and so are those of others if an `owner` is named.
        """
        ...

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """Return every prompt that `owner` holds; return their number."""
        ...

    def follow_clock(self, *, jump_s: float, lease_s: float, claim_lease_s: float, fence: int = NO_FENCE) -> None:
        """Keep deadlines right after the store's clock has jumped forward by `jump_s`, or back; call it before `reap`.

        Leases, claims and groups short of members keep the time they had left. None of them gets more than `lease_s` or
        `claim_lease_s`, which a clock that was set back would give them. For the chief, as `reap` is.
        """
        ...

    def reap(self, *, group_deadline: GroupDeadline | None = None, fence: int = NO_FENCE) -> list[str]:
        """Take back lapsed leases and claims, and quarantine groups that were tried too often.

        Groups that wait too long for their last members become ready without them, if the run's filter lets them, or
        expire, as `group_deadline` says. Returns one log line per event. Raises StaleFenceError unless `fence` is the
        chief's (see `buffer.chief`).
        """
        ...

    def report_broker(self, name: str, *, incarnation: str, facts: dict[str, Any], lease_s: float) -> Brokers:
        """Report a broker as alive for `lease_s`, and make it the chief if there is none; return who is alive.

        `facts`: plain values for the others. Every broker of a run names the same `lease_s`.
        """
        ...

    # --- images of prompts -----------------------------------------------------------------------------------------
    def put_images(self, images: Mapping[str, bytes]) -> None:
        """Keep images by name, each once, for the run; those that are there stay as they are."""
        ...

    def images(self, names: list[str]) -> dict[str, bytes]:
        """Return the bytes of the named images that are stored."""
        ...

    # --- trajectories ------------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]], *, guest: str = "") -> list[Insertion]:
        """Store trajectories, idempotent on id; return one outcome each, in order. Durable (as configured) on return.

        Answers to evaluations are counted, and over at once: they stay stored as such groups do. A refused trajectory
        leaves no trace: the caller has it sent again (`store_full`) or passes it to `quarantine`, which counts it. A
        group that becomes complete is ready, or rejected by the run's filter, in the same instant. `guest`: the guest
        who wrote them; what a quarantined one wrote is refused (`guest_quarantined`).
        """
        ...

    def quarantine_guest(self, guest: str, *, reason: str) -> int:
        """Refuse a guest for good, and quarantine its groups that nothing was trained on; return their number.

        A group with one member of the guest is the guest's. Those in a claim follow when it lapses or is rolled back;
        those in use are not sampled again, and follow when a rollback undoes their use.
        """
        ...

    def quarantined_guests(self) -> dict[str, str]:
        """Return quarantined guest -> reason."""
        ...

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Keep the first bytes of a rejected frame, capped in number, and count it in `refused[reason]`."""
        ...

    # --- batches -----------------------------------------------------------------------------------------------------
    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """Claim exactly `num_groups` groups for `step` of a learner at `version`, or say why not yet.

        Stale groups leave the queue first, as the rules say. A step has one claim: an earlier one is taken back first,
        so that asking again after a lost answer is safe. Raises StaleFenceError for a committed step.
        """
        ...

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until at least `num_groups` groups are ready, at most `timeout_s`. Return whether they are."""
        ...

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Return the encoded trajectories of each group, by index. Raises StaleFenceError for a group without any."""
        ...

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """Extend the claim's lease. Raises StaleFenceError."""
        ...

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """Remove groups from a claim that the learner will not train on; return their number. Raises StaleFenceError.

        Groups that are not in the claim are skipped; one that was trained on before is only released: it will not be
        used again. Claim the step again to have it filled up.
        """
        ...

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """Mark the claim's groups as used and set RunState.step to claim.step. Raises StaleFenceError.

        `entry` goes into the step ledger in the same instant. Committing the same claim again changes nothing.
        """
        ...

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """Declare a durable checkpoint of every step <= pointer.step: their groups are retired. Return their number.

        Groups that may be used again stay until the run is finishing. A resumed run starts from the pointer, so the
        ledger up to it is final. Raises StaleFenceError when it covers steps that are not committed here, and when
        `fence` is not RunState.fence.
        """
        ...

    def roll_back(self, *, to_step: int, to_version: int) -> tuple[int, int]:
        """Resume from a checkpoint: groups claimed, or used after `to_step`, are ready again.

        Return their number and the new RunState.fence, which is greater than that of any learner before.

        Ledger entries after `to_step` are removed. Announced versions stay announced: trajectories of versions that
        were taken back may still arrive. A live claim counts as an attempt: a group that ends every learner that
        claims it goes to quarantine.
        """
        ...

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """Return the entries of the committed steps from `first_step` on, in order."""
        ...

    # --- groups that are over ----------------------------------------------------------------------------------------
    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """Return the oldest `limit` groups that are over and still stored; they stay."""
        ...

    def forget(self, group_ids: list[str], *, fence: int = NO_FENCE) -> int:
        """Delete groups that are over and archived; return their number. Others are skipped. For the chief alone."""
        ...

    def audit(self) -> Audit:
        """Recompute the accounting from what is stored. Reads all groups: seconds for a hundred thousand."""
        ...

    # --- evaluations -------------------------------------------------------------------------------------------------
    def open_evaluation(
        self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int], samples: int = 1
    ) -> None:
        """Have generators answer held-out rows with `version`; answers of others are refused. Idempotent on id."""
        ...

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """Return the totals so far; None when it was never opened."""
        ...

    def evaluation_answers(self, evaluation_id: str) -> list[EvaluationAnswer]:
        """Return the answers so far, in no order; nothing a day after the last one."""
        ...

    # --- monitoring --------------------------------------------------------------------------------------------------
    def counts(self) -> StoreCounts:
        """Return the counters of the store."""
        ...

    def now(self) -> float:
        """Return the store's clock, seconds, to compare with the times in records."""
        ...

    def ready_versions(self) -> dict[int, int]:
        """Return oldest version of a token -> number of ready groups. Reads every ready group."""
        ...

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's newest gauges (plain values), stamped with the store's time.

        Above `ROLES_KEPT`, a new role replaces the one that did not report for longest.
        """
        ...

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return the newest gauges of every stored role, with `reported_at`, seconds of the store's clock.

        A role that ever made progress (`progress_mark`) has `progressed_at` beside it: the time of its last progress.
        """
        ...

    def record_event(self, role_id: str, text: str) -> None:
        """Append an event; the newest `EVENTS_KEPT` are stored."""
        ...

    def events(self, *, limit: int) -> list[Event]:
        """Return the newest `limit` events, oldest first."""
        ...

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """Leave a request to a role of the run; it replaces one on the same subject."""
        ...

    def requests(self, addressee: Addressee) -> dict[str, str]:
        """Return subject -> value of the requests that nobody has taken."""
        ...

    def take_requests(self, addressee: Addressee, *, subjects: Sequence[str] | None = None) -> dict[str, str]:
        """Return subject -> value of the requests that nobody has taken, of all or of these; each is returned once."""
        ...

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row (a step); the newest `METRICS_KEPT` are stored."""
        ...

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """Return the stored rows after the `after`-th ever appended, and the number ever appended."""
        ...

    def cpu_s(self) -> float:
        """Return the processor seconds of the store's server; 0 for one without a process of its own."""
        ...

    def memory(self) -> StoreMemory:
        """Return the memory of the store's server, and its limit."""
        ...

    def full_disk(self) -> str:
        """Return the disk for want of which the store takes no writes, in words; empty while it takes them."""
        ...

    def close(self) -> None:
        """Release all connections to the server."""
        ...


_REPORT_INTERVAL_S = 5.0


class StoreOutage:
    """An interval in which calls of the store fail. Life: (record* -> end)*."""

    def __init__(self, *, report: Callable[[str], object], clock: Clock = time.monotonic) -> None:
        """`report` receives one sentence at a time."""
        self._report = report
        self._clock = clock
        self._began_at: float | None = None
        self._next_report_at = 0.0
        self.reason = ""
        """`store_unavailable` | `store_cannot_write`, as peers receive it in a Nack; empty while the store works."""

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
        """Record that a call has succeeded."""
        if self._began_at is not None:
            self._report(f"the store works again after {self.seconds:.1f} s")
        self._began_at, self.reason = None, ""
