"""Evaluator: asks generators to answer held-out prompts, and reads what came of it."""

import itertools

from slipstream.buffer.store import EvaluationResult, Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.learner import EvaluationConfig

PURPOSES: tuple[Purpose, ...] = ("sampled", "greedy")
"""Temperature 1 and temperature 0."""


class Evaluator:
    """Opens evaluations in the store. The first `monitor_prompts` rows serve while training, the rows after them
    before and after it, so that early stopping does not choose what is reported.
    """

    def __init__(self, store: Store, config: EvaluationConfig) -> None:
        self._store = store
        self._config = config
        self._open: list[str] = []

    def open_monitor(self, *, step: int, fence: int, version: int) -> str:
        """Ask for the monitored rows; returns the name of the evaluation.

        `fence`: of the claim that the step trained on. It tells a step from the same step done again after a resume.
        """
        name = f"step-{step}-{fence}"
        self._ask(name, version=version, rows=range(self._config.monitor_prompts))
        self._open.append(name)
        return name

    def open_final(self, name: str, *, version: int) -> str:
        """Ask for the rows that are kept for before and after; returns the name of the evaluation.

        Another than `name` when that was asked before and no reward function answered: it would never be any better.
        """
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        fresh = next(each for each in names if not self._has_failed(each))
        first = self._config.monitor_prompts
        self._ask(fresh, version=version, rows=range(first, first + self._config.final_prompts))
        return fresh

    def num_answered(self, name: str) -> int:
        """Answers in, of both purposes."""
        return sum(result.num_answered for result in self._found(name))

    def result(self, name: str) -> dict[Purpose, EvaluationResult] | None:
        """Both results by purpose, or None while answers are missing."""
        found = {purpose: self._store.evaluation(f"{name}-{purpose}") for purpose in PURPOSES}
        complete = {purpose: result for purpose, result in found.items() if result and result.is_complete}
        return complete if len(complete) == len(PURPOSES) else None

    def take_finished(self) -> dict[Purpose, EvaluationResult] | None:
        """The newest monitored evaluation that has become complete since the last call, else None."""
        newest = None
        for name in list(self._open):
            if result := self.result(name):
                self._open.remove(name)
                newest = result
        return newest

    def _has_failed(self, name: str) -> bool:
        """Whether there are answers, and no reward for any of them."""
        found = self._found(name)
        return any(each.num_answered for each in found) and all(each.num_failed == each.num_answered for each in found)

    def _found(self, name: str) -> list[EvaluationResult]:
        found = [self._store.evaluation(f"{name}-{purpose}") for purpose in PURPOSES]
        return [result for result in found if result]

    def _ask(self, name: str, *, version: int, rows: range) -> None:
        for purpose in PURPOSES:
            self._store.open_evaluation(f"{name}-{purpose}", purpose=purpose, version=version, rows=list(rows))
