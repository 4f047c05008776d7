"""The store: every operation on the state that must survive, stated once for Redis and its in-memory twin.

Life of a group: open -> ready -> claimed(step, fence) -> used(step) -> retired. A used group may be claimed again,
where the run says so. A group that falls out of this line before it was used is rejected, expired or quarantined, with
a reason, and gives its admission back. Each transition is one atomic operation below. A group that is over stays stored until the archive has it, where
the run keeps one.
"""

from typing import Any, Protocol

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.records import (
    Addressee,
    CheckpointPointer,
    Claim,
    EvaluationResult,
    Event,
    FinishedGroup,
    Insertion,
    Lease,
    MetricsRows,
    RunState,
    StepEntry,
    VersionEntry,
)
from slipstream.buffer.sampling import NotReady, SamplingRules
from slipstream.buffer.trajectory import Purpose, TrajectoryHeader
from slipstream.configs.buffer import KEEP_ALL, FilterConfig, GroupDeadline


class Store(Protocol):
    """All operations. Synchronous; each is atomic and takes about a millisecond per hundred ids.

    Time is the store's own clock. Every method raises StoreUnavailableError when the store does not answer.
    """

    # --- the run -------------------------------------------------------------------------------------------------
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
        """Create the run, or find it again. Raises RunConflictError when another run lives here.

        `keeps_finished`: groups that are over stay until `forget`, for an archiver. `max_uses`: steps that may train on
        one group. `group_filter`: which complete groups are rejected instead of becoming ready; the run keeps it.
        """
        ...

    def run_state(self) -> RunState:
        """Where the run stands. Raises RunConflictError when no run was opened."""
        ...

    def run_config_json(self) -> str:
        """The config `open_run` was given."""
        ...

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """Move the run on."""
        ...

    def announce_version(self, version: int) -> None:
        """From now on tokens of `version` may arrive. Never goes back."""
        ...

    def record_version(self, entry: VersionEntry) -> None:
        """Enter a set of weights before it is announced. A repeat of the last entry changes nothing."""
        ...

    def versions(self) -> list[VersionEntry]:
        """Every set of weights entered, in order."""
        ...

    def commit_version(self, version: int) -> None:
        """All members adopted and verified `version`."""
        ...

    # --- prompts -------------------------------------------------------------------------------------------------
    def lease(
        self,
        *,
        owner: str,
        max_groups: int,
        group_size: int,
        lease_s: float,
        admission_limit: int,
        has_baseline: bool = False,
    ) -> list[Lease]:
        """Hand out prompts: open evaluations first, then returned prompts, then new ones.

        New training prompts are admitted only while `admitted < admission_limit` and the phase is starting or
        training; no training prompt at all is leased in later phases. A group needs `group_size` members; the last of
        them is decoded greedily where it `has_baseline`.
        """
        ...

    def renew_leases(self, *, owner: str, lease_s: float, lease_ids: list[str]) -> int:
        """Push the deadline of these leases, where `owner` has them; returns how many.

        They are what the owner still works on: a lease whose answer got lost on the way lapses by itself.
        """
        ...

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """Put prompts back, to be leased again with attempt + 1; members already stored stay. Returns how many.

        Ids of leases that are over are skipped, and so are those of others when an `owner` is named.
        """
        ...

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """The same for everything `owner` holds."""
        ...

    def reap(self, *, group_deadline: GroupDeadline | None = None) -> list[str]:
        """Return lapsed leases and lapsed claims; quarantine what was tried too often.

        Groups that wait too long for their last members become ready without them, where the run's filter lets them,
        or expire, as the deadline says.

        One line per event, for the log.
        """
        ...

    # --- trajectories --------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[tuple[TrajectoryHeader, bytes]]) -> list[Insertion]:
        """Store trajectories, idempotent on id; one outcome each, same order. Durable (as configured) on return.

        Evaluation trajectories are counted into their evaluation and not kept. A refused one leaves no trace: the
        caller has it sent again (`store_full`) or gives it to `quarantine`, which counts it. A group that is complete
        becomes ready, or is rejected by the run's filter in the same instant.
        """
        ...

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Keep the first bytes of a refused frame for `python -m buffer refused`, capped in number.

        Counts `refused[reason]`.
        """
        ...

    # --- batches -------------------------------------------------------------------------------------------------
    def claim(
        self, *, step: int, version: int, num_groups: int, rules: SamplingRules, lease_s: float
    ) -> Claim | NotReady:
        """Take exactly `num_groups` groups for `step` of a learner at `version`, or say why that cannot be yet.

        Groups that are too old for it leave the queue first, as the rules say. A step has one claim: an earlier one is
        taken back first, so that asking again after a lost answer is safe. Raises StaleFenceError for a committed step.
        """
        ...

    def wait_ready(self, *, num_groups: int, timeout_s: float) -> bool:
        """Block until at least `num_groups` groups are ready, at most `timeout_s`. Returns whether they are."""
        ...

    def fetch(self, group_ids: list[str]) -> list[list[bytes]]:
        """Encoded trajectories of each group, by index. Raises StaleFenceError for a group that has none (any more)."""
        ...

    def renew_claim(self, claim: Claim, *, lease_s: float) -> None:
        """Push the claim's deadline. Raises StaleFenceError."""
        ...

    def reject(self, claim: Claim, *, group_ids: list[str], reason: str) -> int:
        """Take groups out of a claim that the learner will not train on. Returns how many; raises StaleFenceError.

        Groups that are not (any more) in the claim are skipped; one that was trained on before is only let go: it will
        not be used again. Claim the step again to have it filled up.
        """
        ...

    def commit(self, claim: Claim, entry: StepEntry) -> None:
        """The step used these groups: they are `used`, and RunState.step is claim.step. Raises StaleFenceError.

        `entry` goes into the step ledger in the same instant. Committing the same claim again changes nothing.
        """
        ...

    def checkpoint(self, pointer: CheckpointPointer, *, fence: int) -> int:
        """A durable checkpoint covers every step <= pointer.step: their groups are retired. Returns how many.

        Those that may be used again are not, until the run is finishing.
        The pointer is what a resumed run starts from, so the ledger up to it holds for good. Raises StaleFenceError when it
        covers steps that are not committed here, and when `fence` is not RunState.fence.
        """
        ...

    def roll_back(self, *, to_step: int, to_version: int) -> int:
        """The learner resumes from a checkpoint: groups claimed, or used after `to_step`, are ready again.

        Their ledger entries go. What was announced stays so: trajectories of versions that went with them may still
        arrive. A claim that was live counts as an attempt: a group that ends every learner that claims it goes to
        quarantine.
        """
        ...

    def ledger(self, *, first_step: int = 1) -> list[StepEntry]:
        """Entries of the committed steps from `first_step` on, in order."""
        ...

    # --- groups that are over ------------------------------------------------------------------------------------
    def finished(self, *, limit: int) -> list[FinishedGroup]:
        """The oldest `limit` groups that are over and still stored; they stay."""
        ...

    def forget(self, group_ids: list[str]) -> int:
        """The archive has these: drop what is stored of them. Returns how many; others are skipped."""
        ...

    def audit(self) -> Audit:
        """Add everything up anew from what is stored. Reads all groups: seconds for a hundred thousand."""
        ...

    # --- evaluation ----------------------------------------------------------------------------------------------
    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """Ask generators to answer held-out rows. Idempotent on id."""
        ...

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """How far it is; None when never opened."""
        ...

    # --- watching ------------------------------------------------------------------------------------------------
    def counts(self) -> StoreCounts:
        """Where everything is."""
        ...

    def now(self) -> float:
        """The store's clock, seconds: what `reported_at` and the times in records are compared with."""
        ...

    def ready_versions(self) -> dict[int, int]:
        """Oldest version of a token -> number of ready groups with it. Reads every ready group."""
        ...

    def report_role(self, role_id: str, gauges: dict[str, Any]) -> None:
        """Publish a role's newest gauges (plain values), stamped with the store's time.

        A thousand roles are kept: a new one beyond them replaces the one that was not reported of for longest.
        """
        ...

    def roles(self) -> dict[str, dict[str, Any]]:
        """The newest gauges of every role that is kept, with `reported_at`, seconds of the store's clock.

        A role that ever reported progress (`buffer/records.py`) has `progressed_at` beside it: when it last made any.
        """
        ...

    def record_event(self, role_id: str, text: str) -> None:
        """Keep a sentence about something that went wrong with a role; the newest few hundred are kept."""
        ...

    def events(self, *, limit: int) -> list[Event]:
        """The newest `limit` events, oldest first."""
        ...

    def request(self, addressee: Addressee, subject: str, value: str) -> None:
        """Ask the launcher or the broker of the run for something; replaces a request on the same subject."""
        ...

    def take_requests(self, addressee: Addressee) -> dict[str, str]:
        """What it was asked for since the last call, subject to value; each request is given out once."""
        ...

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row (a step); the newest thousand are kept."""
        ...

    def metrics(self, *, after: int = 0) -> MetricsRows:
        """Rows after the `after`-th (counted from the first ever appended) that are kept, and how many ever were."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
