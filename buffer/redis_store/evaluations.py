"""RedisStore, evaluations: held-out rows asked and answered."""

from buffer.records import EvaluationResult
from buffer.redis_scripts.watching import OPEN_EVALUATION
from buffer.redis_store.door import RedisDoor
from buffer.trajectory import Purpose


class RedisEvaluations(RedisDoor):
    """Operations on evaluations."""

    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """See `Store.open_evaluation`."""
        self._run(OPEN_EVALUATION, evaluation_id, purpose, version, *dict.fromkeys(rows))

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """See `Store.evaluation`."""
        with self._reaching():
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
