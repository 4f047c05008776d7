"""Evaluator: requests answers to held-out prompts through the store, and reads the results."""

import itertools

from slipstream.buffer.records import EvaluationResult
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.learner import EvaluationConfig

PURPOSES: tuple[Purpose, ...] = ("sampled", "greedy")
"""Temperature 1 and temperature 0."""


class Evaluator:
    """Opens evaluations in the store, over the rows that `EvaluationConfig.rows` chooses."""

    def __init__(self, store: Store, config: EvaluationConfig, *, num_rows: int) -> None:
        """`num_rows`: number of held-out prompts."""
        self._store = store
        self._monitored, self._final = config.rows(num_rows)
        self._open: list[str] = []

    def open_monitor(self, *, step: int, fence: int, version: int) -> str:
        """Request the monitored rows; returns the name of the evaluation.

        `fence`, the token of the step's claim, tells the step from the same one trained again after a rollback.
        """
        name = f"step-{step}-{fence}"
        self._request(name, version=version, rows=self._monitored)
        self._open.append(name)
        return name

    def open_final(self, name: str, *, version: int) -> str:
        """Request the rows that are held back for before and after training; returns the name of the evaluation.

        That is `name`, with a number if earlier requests of that name were answered without a single reward.
        """
        # Opening is idempotent: a resumed run finds the answers to the request of its predecessor. Only an evaluation
        # whose reward function failed throughout is requested anew, since its answers are final.
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        fresh = next(each for each in names if not self._has_failed(each))
        self._request(fresh, version=version, rows=self._final)
        return fresh

    def num_answered(self, name: str) -> int:
        """Answers of both purposes so far."""
        return sum(result.num_answered for result in self._results(name).values())

    def result(self, name: str) -> dict[Purpose, EvaluationResult] | None:
        """Results by purpose; None while answers are missing."""
        complete = {purpose: result for purpose, result in self._results(name).items() if result.is_complete}
        return complete if len(complete) == len(PURPOSES) else None

    def take_finished(self) -> dict[Purpose, EvaluationResult] | None:
        """Newest monitored evaluation that became complete since the last call; None if none did."""
        newest = None
        for name in list(self._open):
            if result := self.result(name):
                self._open.remove(name)
                newest = result
        return newest

    def _has_failed(self, name: str) -> bool:
        """Whether there are answers, and none of them has a reward."""
        results = self._results(name).values()
        return any(each.num_answered for each in results) and all(
            each.num_failed == each.num_answered for each in results
        )

    def _results(self, name: str) -> dict[Purpose, EvaluationResult]:
        results = {purpose: self._store.evaluation(f"{name}-{purpose}") for purpose in PURPOSES}
        return {purpose: result for purpose, result in results.items() if result}

    def _request(self, name: str, *, version: int, rows: range) -> None:
        for purpose in PURPOSES:
            self._store.open_evaluation(f"{name}-{purpose}", purpose=purpose, version=version, rows=list(rows))
