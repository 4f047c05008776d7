"""RedisStore, prompts: leases out, renewed, returned, lapsed."""

from slipstream.buffer.records import EvaluationResult, Lease
from slipstream.buffer.redis.connection import RedisConnection, text
from slipstream.buffer.redis.scripts.batches import REAP_CLAIMS
from slipstream.buffer.redis.scripts.prompts import (
    LEASE,
    REAP_GROUPS,
    REAP_LEASES,
    RENEW_LEASES,
    RETURN_LEASES,
    RETURN_LEASES_OF,
)
from slipstream.buffer.redis.scripts.watching import OPEN_EVALUATION
from slipstream.buffer.redis.store_run import RedisRun
from slipstream.buffer.trajectory import Purpose
from slipstream.buffer.transitions import lapsed_claim_message, lapsed_lease_message, make_lease, short_group_message
from slipstream.configs.buffer import GroupDeadline, RefillConfig, TrainShortConfig


# @@ RedisStore, evaluations: held-out rows asked and answered.
class RedisEvaluations(RedisConnection):
    """Operations on evaluations."""

    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """See `Store.open_evaluation`."""
        self._run(OPEN_EVALUATION, evaluation_id, purpose, version, *dict.fromkeys(rows))

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """See `Store.evaluation`."""
        with self._mapped_errors():
            stored = self._client.hgetall(self._key(f"evaluation:{evaluation_id}"))
        if not stored:
            return None
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        return EvaluationResult(
            id=evaluation_id,
            purpose=fields["purpose"],
            version=int(fields["version"]),
            num_prompts=int(fields["num_prompts"]),
            num_answered=int(fields["num_answered"]),
            num_correct=int(fields["num_correct"]),
            num_failed=int(fields["num_failed"]),
        )


_REAPED_AT_ONCE = 500
"""Bounds how long one script keeps the server busy."""


class RedisPrompts(RedisRun):
    """Operations on prompt leases."""

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
        """See `Store.lease`."""
        num_rows, seed = self._rows_and_seed()
        lease_ms = int(lease_s * 1000)
        leased = self._run(LEASE, owner, max_groups, group_size, lease_ms, admission_limit, int(has_baseline))
        return [
            make_lease(
                text(group),
                attempt=int(attempt),
                purpose=text(purpose),  # type: ignore[arg-type]
                indices=missing,
                num_rows=num_rows,
                seed=seed,
            )
            for group, attempt, purpose, missing in leased
        ]

    def renew_leases(self, *, owner: str, lease_s: float, lease_ids: list[str]) -> int:
        """See `Store.renew_leases`."""
        return self._run(RENEW_LEASES, owner, int(lease_s * 1000), *dict.fromkeys(lease_ids))

    def return_leases(self, *, lease_ids: list[str], reason: str, owner: str = "") -> int:
        """See `Store.return_leases`."""
        return self._run(RETURN_LEASES, self._max_attempts, reason, owner, *lease_ids)

    def return_leases_of(self, *, owner: str, reason: str) -> int:
        """See `Store.return_leases_of`."""
        return self._run(RETURN_LEASES_OF, self._max_attempts, reason, owner)

    def reap(self, *, group_deadline: GroupDeadline | None = None) -> list[str]:
        """See `Store.reap`."""
        return [
            *self._reap_leases("leases"),
            *self._reap_leases("evaluation_leases"),
            *self._reap_groups(group_deadline),
            *self._reap_claims(),
        ]

    def _reap_groups(self, deadline: GroupDeadline | None) -> list[str]:
        if deadline is None or isinstance(deadline, RefillConfig):
            return []
        fewest = deadline.min_members if isinstance(deadline, TrainShortConfig) else 0
        events = self._run(REAP_GROUPS, int(deadline.after_s * 1000), fewest, _REAPED_AT_ONCE)
        return [
            short_group_message(text(group), members=members, size=size, deadline=deadline)
            for group, members, size in events
        ]

    def _reap_leases(self, kind: str) -> list[str]:
        events = self._run(REAP_LEASES, self._max_attempts, kind, _REAPED_AT_ONCE)
        return [
            lapsed_lease_message(
                text(group), attempt=int(attempt), owner=text(owner), is_quarantined=fate == b"quarantined"
            )
            for group, attempt, owner, fate in events
        ]

    def _reap_claims(self) -> list[str]:
        return [
            lapsed_claim_message(int(step), num_ready=num_ready, quarantined=[text(group) for group in quarantined])
            for step, num_ready, quarantined in self._run(REAP_CLAIMS, self._max_attempts)
        ]
