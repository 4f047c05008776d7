"""Evaluator: requests answers to held-out prompts through the store, and reads the results."""

import itertools
from collections.abc import Mapping

from slipstream.buffer.records import EvaluationResult
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.data import HeldoutSet
from slipstream.configs.learner import EvaluationConfig
from slipstream.learner.metrics.scores import by_source, metric_sums


class Evaluator:
    """Opens evaluations in the store, one per set of held-out prompts, over rows that `EvaluationConfig` chooses."""

    def __init__(
        self, store: Store, config: EvaluationConfig, *, sets: list[HeldoutSet], num_rows: Mapping[str, int]
    ) -> None:
        """`num_rows`: number of prompts of each set."""
        self._store = store
        self._sets = sets
        self._monitored = {each.name: config.rows(num_rows[each.name])[0] for each in sets}
        self._final = {each.name: config.rows(num_rows[each.name])[1] for each in sets}
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
        """Answers of all sets so far."""
        return sum(result.num_answered for result in self._results(name).values())

    def result(self, name: str) -> dict[Purpose, EvaluationResult] | None:
        """Results by set; None while answers are missing."""
        complete = {purpose: result for purpose, result in self._results(name).items() if result.is_complete}
        return complete if len(complete) == len(self._sets) else None

    def unfinished(self) -> list[str]:
        """Names of the monitored evaluations that lack answers."""
        return [name for name in self._open if not self.result(name)]

    def metrics(self, evaluated: Mapping[Purpose, EvaluationResult]) -> dict[str, float]:
        """Return the metrics of an evaluation, by their keys in a row."""
        found: dict[str, float] = {}
        for name, result in evaluated.items():
            found[f"eval/accuracy_{name}"] = result.accuracy
            answers = self._store.evaluation_answers(result.id)
            sums = metric_sums(answers, kinds=("pass",))
            found |= {f"eval/{metric}_{name}": each.mean for metric, each in sums.items() if metric != "pass@1"}
            for source, part in by_source(answers).items():
                means = metric_sums(part, kinds=())
                found |= {f"eval/by_source/{source}/{metric}_{name}": each.mean for metric, each in means.items()}
            found["eval/version"] = result.version
        return found

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
        results = {each.name: self._store.evaluation(f"{name}-{each.name}") for each in self._sets}
        return {purpose: result for purpose, result in results.items() if result}

    def _request(self, name: str, *, version: int, rows: Mapping[str, range]) -> None:
        for each in self._sets:
            self._store.open_evaluation(
                f"{name}-{each.name}",
                purpose=each.name,
                version=version,
                rows=list(rows[each.name]),
                samples=each.samples,
            )
