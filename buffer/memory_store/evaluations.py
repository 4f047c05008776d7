"""MemoryStore, evaluations: held-out rows asked and answered."""

from buffer.leases import evaluation_group_id
from buffer.memory_store.state import Group, MemoryState, OpenEvaluation
from buffer.records import EvaluationResult
from buffer.trajectory import Purpose


class MemoryEvaluations(MemoryState):
    """Operations on evaluations."""

    def open_evaluation(self, evaluation_id: str, *, purpose: Purpose, version: int, rows: list[int]) -> None:
        """See `Store.open_evaluation`."""
        with self._changed:
            run = self._opened()
            if evaluation_id in self._evaluations:
                return
            asked = list(dict.fromkeys(rows))
            self._evaluations[evaluation_id] = OpenEvaluation(purpose, version, len(asked))
            for row in asked:
                run.evaluation_sequence += 1
                group = Group(evaluation_group_id(evaluation_id, row), purpose, 1, run.evaluation_sequence)
                self._groups[group.id] = group
                self._evaluation_pending[group.sequence] = group.id

    def evaluation(self, evaluation_id: str) -> EvaluationResult | None:
        """See `Store.evaluation`."""
        with self._changed:
            stored = self._evaluations.get(evaluation_id)
            if stored is None:
                return None
            return EvaluationResult(
                id=evaluation_id,
                purpose=stored.purpose,
                version=stored.version,
                num_prompts=stored.num_prompts,
                num_answered=len(stored.answered),
                num_correct=stored.num_correct,
                num_failed=stored.num_failed,
            )
