"""RedisStore, generator side: leases, arriving trajectories, evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.buffer.codec import Packed, chunks, decode, encode
from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.records import (
    FRAME_BYTES_KEPT,
    FRAMES_KEPT,
    ROLES_KEPT,
    EvaluationAnswer,
    EvaluationResult,
    Heartbeat,
    Insertion,
    Lease,
    progress_mark,
    stored_answer,
)
from slipstream.buffer.redis.connection import RedisConnection, is_out_of_memory, text
from slipstream.buffer.sampling import NOTHING_SKIPPED, Upcoming
from slipstream.buffer.store_rules import (
    NO_FENCE,
    asked_answers,
    evaluation_sequence,
    lapsed_claim_message,
    lapsed_lease_message,
    make_lease,
    short_group_message,
)
from slipstream.buffer.trajectory import Purpose, TrajectoryHeader
from slipstream.configs.buffer import GroupDeadline, RefillConfig, TrainShortConfig

_REAPED_AT_ONCE = 500
"""Bounds the time that one script blocks the server."""
_BEATS_AT_ONCE = 64


class RedisPrompts(RedisConnection):
    """Operations on leases, trajectories, and evaluations."""

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

        In `max_groups`, `group_size` evaluation rows count as one group. `version`: of evaluations to lease.
        `max_evaluations`: rows leased ahead of other prompts.

        New prompts are admitted while `admitted < admission_limit`. A negative limit also withholds returned prompts,
        as do phases other than starting and training. With `has_baseline` a group's last member is greedy. `upcoming`
        prompts outside the curriculum's band finish immediately and are not admitted.
        """
        num_rows, seed = self._rows_and_seed()
        arguments: list[Any] = [owner, max_groups, group_size, int(lease_s * 1000), admission_limit, int(has_baseline)]
        first, last = "-inf", "+inf"
        if version is not None:
            first, last = str(evaluation_sequence(version, 0)), f"({evaluation_sequence(version + 1, 0)}"
        arguments += [first, last, 2**31 if max_evaluations is None else max_evaluations]
        flags = "".join("1" if is_explored else "0" for is_explored in upcoming.explored)
        leased = self._run("lease", *arguments, upcoming.first, flags, *upcoming.rows(num_rows=num_rows, seed=seed))
        return [
            make_lease(
                text(group), attempt=int(attempt), purpose=text(purpose), indices=missing, num_rows=num_rows, seed=seed
            )
            for group, attempt, purpose, missing in leased
        ]

    def put_images(self, images: Mapping[str, bytes]) -> None:
        """Store images by name for the rest of the run."""
        key, pipeline = self._key("images"), self._client.pipeline(transaction=False)
        # Check first: images are large, and a full server refuses even redundant writes.
        for name in images:
            pipeline.hexists(key, name)
        for name, is_stored in zip(images, self._call(pipeline.execute), strict=True):
            if not is_stored:
                pipeline.hsetnx(key, name, images[name])
        self._call(pipeline.execute)

    def images(self, names: list[str]) -> dict[str, bytes]:
        """Name -> bytes of those that are stored."""
        found = self._call(self._client.hmget, self._key("images"), names) if names else []
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def heartbeat(self, roles: Sequence[Heartbeat], *, lease_s: float) -> int:
        """Report roles, and extend the named leases that owners still hold; returns their number.

        A lease that was lost in transit is not named and lapses.
        """
        num_renewed = 0
        for at in range(0, len(roles), _BEATS_AT_ONCE):
            arguments: list[Any] = []
            for each in roles[at : at + _BEATS_AT_ONCE]:
                head = (each.role_id, progress_mark(each.gauges), each.owner, list(dict.fromkeys(each.lease_ids)))
                arguments += [encode(head), encode(each.gauges)]
            num_renewed += self._run("heartbeat", ROLES_KEPT, int(lease_s * 1000), *arguments)
        return num_renewed

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """Give prompts back, to be leased again with attempt + 1 for the missing members; returns their number.

        Skips lapsed leases, and those of others than `owner` if given.
        """
        return self._run("return_leases", self._max_attempts, reason, owner, *lease_ids)

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """Give back all prompts leased to `owner`. Returns their number."""
        return self._run("return_leases_of", self._max_attempts, reason, owner)

    def follow_clock(self, *, jump_s: float, lease_s: float, claim_lease_s: float, fence: int = NO_FENCE) -> None:
        """Correct the deadlines of leases, claims, and incomplete groups. Call it before `reap`.

        After a forward jump of the store's clock by `jump_s`, they move along. The remaining time is capped at
        `lease_s` or `claim_lease_s`, which it exceeds after a jump back (`jump_s=0`). Restricted to the chief.
        """
        milliseconds = [int(seconds * 1000) for seconds in (jump_s, lease_s, claim_lease_s)]
        self._run_as_chief("follow_clock", fence, *milliseconds)

    def reap(self, *, group_deadline: GroupDeadline | None = None, fence: int = NO_FENCE) -> list[str]:
        """Take back lapsed leases and claims; quarantine groups that were tried too often.

        Incomplete groups beyond `group_deadline` become ready (unless filtered) or expire. Returns a log line per
        event. Raises StaleFenceError unless `fence` is the chief's (`store_rules`).
        """
        events = self._reap_leases("leases", fence) + self._reap_leases("evaluation_leases", fence)
        if group_deadline is not None and not isinstance(group_deadline, RefillConfig):
            fewest = group_deadline.min_members if isinstance(group_deadline, TrainShortConfig) else 0
            after_ms = int(group_deadline.after_s * 1000)
            events += [
                short_group_message(text(group), members=members, size=size, deadline=group_deadline)
                for group, members, size in self._run_as_chief("reap_groups", fence, after_ms, fewest, _REAPED_AT_ONCE)
            ]
        claims = self._run_as_chief("reap_claims", fence, self._max_attempts)
        return events + [
            lapsed_claim_message(int(step), num_ready=num_ready, quarantined=list(map(text, groups)))
            for step, num_ready, groups in claims
        ]

    def _reap_leases(self, kind: str, fence: int) -> list[str]:
        events = self._run_as_chief("reap_leases", fence, self._max_attempts, kind, _REAPED_AT_ONCE)
        return [
            lapsed_lease_message(
                text(group), attempt=int(attempt), owner=text(owner), is_quarantined=fate == b"quarantined"
            )
            for group, attempt, owner, fate in events
        ]

    # --- trajectories ------------------------------------------------------------------------------------------------
    def insert(self, trajectories: list[Packed], *, guest: str = "") -> list[Insertion]:
        """Store trajectories, idempotent on id; return their outcomes in order. Durable (as configured) on return.

        Evaluation answers finish immediately. A refused trajectory leaves no trace: the caller has it resent
        (`store_full`) or passes it to `quarantine`. A completed group atomically becomes ready or is rejected. `guest`:
        their author, if a guest.
        """
        # Training trajectories share calls; the few evaluation answers are sent one by one.
        train = [packed for packed in trajectories if packed[0].purpose == "train"]
        words = (word for chunk in chunks(train) for word in self._insert_chunk(chunk, guest))
        return [
            _insertion(next(words) if header.purpose == "train" else self._insert_evaluation(header, payload))
            for header, payload in trajectories
        ]

    def quarantine(self, reason: str, frame: bytes) -> None:
        """Count a rejected frame in `refused[reason]`, and keep its first bytes."""
        self._run("quarantine_frame", reason, encode((reason, frame[:FRAME_BYTES_KEPT])), FRAMES_KEPT)

    def quarantine_guest(self, guest: str, *, reason: str) -> int:
        """Refuse a guest's trajectories; quarantine unused groups with any member from it, and return their number.

        A claimed one follows when its claim lapses or is rolled back. A used one is not sampled again, and follows if a
        rollback undoes its use.
        """
        return self._run("quarantine_guest", guest, reason)

    def quarantined_guests(self) -> dict[str, str]:
        """Quarantined guest -> reason."""
        return self._read_texts("guests")

    def quarantined_frames(self) -> list[tuple[str, bytes]]:
        """(reason, first bytes) of the newest rejected frames, newest first."""
        entries = self._call(self._client.lrange, self._key("quarantine"), 0, -1)
        return [msgspec.msgpack.decode(entry, type=tuple[str, bytes]) for entry in entries]

    def _insert_chunk(self, chunk: list[Packed], guest: str) -> list[str]:
        """Insert in one call. It checks only once whether memory is full."""
        arguments: list[bytes] = []
        for header, payload in chunk:
            fields: list[Any] = [header.id, header.group_id, header.index, header.group_size]
            fields += [header.oldest_version, header.newest_version]
            fields += [header.checksum, header.attempt, header.written_tokens, header.reward]
            fields += [int(header.reward_status == "ok"), int(header.is_correct), int(header.is_greedy)]
            # Numbers as text, because a script's numbers are doubles.
            arguments += [msgspec.msgpack.encode(list(map(str, fields))), payload]
        try:
            return text(self._run("insert", guest, *arguments)).split()
        except StoreUnavailableError as error:
            if not is_out_of_memory(error):
                raise
            # Not an outage: senders keep them until the learner has made room.
            return ["store_full"] * len(chunk)

    def _insert_evaluation(self, header: TrajectoryHeader, payload: bytes) -> str:
        evaluation_id, _, answer = header.group_id.rpartition(":")
        is_failed = header.reward_status != "ok"
        is_correct = header.is_correct and not is_failed
        arguments: list[Any] = [header.group_id, evaluation_id, answer, header.newest_version]
        arguments += [int(is_correct), int(is_failed), header.purpose, header.attempt, header.oldest_version]
        arguments += [encode(stored_answer(header, payload)), payload]
        return text(self._run("insert_evaluation", *arguments))

    # --- evaluations -------------------------------------------------------------------------------------------------
    def open_evaluation(
        self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int], samples: int = 1
    ) -> None:
        """Have generators answer held-out rows with `version` only. Idempotent on id."""
        base = evaluation_sequence(version, 0)
        self._run("open_evaluation", evaluation_id, purpose, version, base, *asked_answers(rows, samples=samples))

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """Totals so far; None if it was never opened."""
        fields = self._read_texts(f"evaluation:{evaluation_id}")
        return msgspec.convert(fields | {"id": evaluation_id}, EvaluationResult, strict=False) if fields else None

    def evaluation_answers(self, evaluation_id: str) -> list[EvaluationAnswer]:
        """Answers so far, unordered. They expire a day after the last one."""
        stored = self._call(self._client.hvals, self._key(f"answers:{evaluation_id}"))
        return [decode(answer, EvaluationAnswer) for answer in stored]


def _insertion(word: str) -> Insertion:
    if word in ("inserted", "ready"):
        return Insertion(outcome="inserted", group_is_ready=word == "ready")
    if word in ("duplicate", "superseded"):
        return Insertion(outcome=word)  # type: ignore[arg-type]
    return Insertion(outcome="refused", reason=word)
