"""Evaluation: requests answers to held-out prompts and scores them.

Every metric is a ratio of two sums over prompts, so one bootstrap over prompts gives all confidence intervals. Metrics
at k are expectations over size-k subsets of a prompt's answers: exact, except that maj@k of many answers samples them.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from slipstream.buffer.records import EvaluationAnswer, EvaluationResult
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Purpose
from slipstream.configs.base import Record
from slipstream.configs.data import EvalSet
from slipstream.configs.learner import EvaluationConfig
from slipstream.runtime.clock import Clock

_RESAMPLES = 1000
_SEED = 42
_MOST_SUBSETS = 4096
"""Subsets that maj@k samples if more exist."""
_KINDS = ("pass", "maj", "best", "worst")


class Estimate(Record):
    """A mean with its 95 % interval. Example: Estimate(mean=0.912, low=0.885, high=0.937)."""

    mean: float
    low: float
    high: float


class Score(Record):
    """Scores on a set or on one of its data sources.

    Example: Score(num_prompts=512, num_answers=2048, num_failed=3, metrics={"accuracy": Estimate(...), "pass@4": ...},
        mean_tokens=201.4, max_tokens=512, stop_reasons={"stop": 2011, "length": 37})
    """

    num_prompts: int
    num_answers: int
    num_failed: int
    """Answers with a failed reward function. They count as wrong and have no reward."""
    metrics: dict[str, Estimate]
    mean_tokens: float
    """Model-written tokens per answer."""
    max_tokens: int
    stop_reasons: dict[str, int]


class Sums(NamedTuple):
    """One metric per prompt, in row order. Value: sum(total) / sum(number)."""

    total: np.ndarray
    number: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.total.sum() / self.number.sum())


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k answers is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest of k rewards: sum over i >= 0 of r[i] * C(i, k - 1) / C(n, k), r ascending."""
    weights = [comb(rank, k - 1) / comb(len(rewards), k) for rank in range(len(rewards))]
    return float(np.dot(weights, sorted(rewards)))


def majority_at_k(answers: Sequence[str], is_correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent of k answers is right, with ties broken at random.

    Each empty answer is a separate candidate. A candidate scores the fraction of its repetitions that are right.
    """
    names = [answer or f"\0{index}" for index, answer in enumerate(answers)]
    kinds, members = np.unique(names, return_inverse=True)
    is_of_kind = np.eye(len(kinds), dtype=np.float32)[members]
    right = (np.array(is_correct, dtype=np.float32) @ is_of_kind) / is_of_kind.sum(axis=0)
    votes = _subsets(len(names), k) @ is_of_kind
    is_winner = votes == votes.max(axis=1, keepdims=True)
    return float(((is_winner @ right) / is_winner.sum(axis=1)).mean())


@lru_cache(maxsize=16)
def _subsets(num: int, k: int) -> Float[np.ndarray, "subsets num"]:
    if comb(num, k) <= _MOST_SUBSETS:
        chosen = np.array(list(itertools.combinations(range(num), k)))
    else:
        draws = np.random.default_rng([_SEED, num, k]).random((_MOST_SUBSETS, num))
        chosen = np.argpartition(draws, k - 1, axis=1)[:, :k]
    subsets = np.zeros((len(chosen), num), dtype=np.float32)
    np.put_along_axis(subsets, chosen, 1.0, axis=1)
    return subsets


def metric_sums(answers: Iterable[EvaluationAnswer], *, kinds: Sequence[str] = _KINDS) -> dict[str, Sums]:
    """`accuracy`, `reward`, and each of `kinds` at k = 1, 2, 4, ... and at k = the number of answers.

    Metrics at k leave out prompts with fewer than k answers.
    """
    prompts: dict[int, list[EvaluationAnswer]] = {}
    for answer in answers:
        prompts.setdefault(answer.row, []).append(answer)
    most = max(map(len, prompts.values()), default=0)
    ks = sorted({2**power for power in range(most.bit_length())} | {most}) if most > 1 else []
    by_prompt = [dict(_prompt_sums(prompts[row], ks, kinds)) for row in sorted(prompts)]
    names = dict.fromkeys(name for sums in by_prompt for name in sums)
    columns = {name: np.array([sums.get(name, (0.0, 0)) for sums in by_prompt], dtype=float) for name in names}
    return {name: Sums(*column.T) for name, column in columns.items() if column[:, 1].any()}


def _prompt_sums(
    answers: Sequence[EvaluationAnswer], ks: Sequence[int], kinds: Sequence[str]
) -> Iterator[tuple[str, tuple[float, int]]]:
    correct = [answer.is_correct for answer in answers]
    rewards = [answer.reward for answer in answers if answer.status == "ok"]
    yield "accuracy", (float(sum(correct)), len(answers))
    yield "reward", (float(sum(rewards)), len(rewards))
    compute = {
        "pass": lambda k: pass_at_k(len(answers), sum(correct), k),
        "maj": lambda k: majority_at_k([answer.answer for answer in answers], correct, k),
        "best": lambda k: best_at_k(rewards, k),
        "worst": lambda k: -best_at_k([-reward for reward in rewards], k),
    }
    for kind, k in itertools.product(kinds, ks):
        # At k = 1 the other kinds equal accuracy or reward.
        if (k > 1 or kind == "pass") and k <= len(rewards if kind in ("best", "worst") else answers):
            yield f"{kind}@{k}", (compute[kind](k), 1)


def estimate(sums: Sums, *, minus: Sums | None = None) -> Estimate:
    """Mean, or its paired difference to `minus` on the same prompts, with the bootstrap interval.

    Source: Efron and Tibshirani, An introduction to the bootstrap, chapter 13 (percentile interval).
    """
    weights = _resamples(len(sums.total))
    with np.errstate(invalid="ignore"):
        values = (weights @ sums.total) / (weights @ sums.number)
        if minus is not None:
            values = values - (weights @ minus.total) / (weights @ minus.number)
    low, high = np.nanpercentile(values, (2.5, 97.5))
    return Estimate(sums.mean - (minus.mean if minus else 0.0), float(low), float(high))


@lru_cache(maxsize=4)
def _resamples(num_prompts: int) -> Float[np.ndarray, "resamples prompts"]:
    shares = np.full(num_prompts, 1 / num_prompts)
    return np.random.default_rng(_SEED).multinomial(num_prompts, shares, size=_RESAMPLES).astype(float)


def score(answers: Sequence[EvaluationAnswer]) -> Score:
    """Score at least one answer to a set."""
    return Score(
        num_prompts=len({answer.row for answer in answers}),
        num_answers=len(answers),
        num_failed=sum(answer.status != "ok" for answer in answers),
        metrics={name: estimate(sums) for name, sums in metric_sums(answers).items()},
        mean_tokens=sum(answer.num_tokens for answer in answers) / len(answers),
        max_tokens=max(answer.num_tokens for answer in answers),
        stop_reasons=dict(Counter(answer.stop_reason for answer in answers).most_common()),
    )


def by_source(answers: Iterable[EvaluationAnswer]) -> dict[str, list[EvaluationAnswer]]:
    """Group answers by data source. Empty if all come from one source."""
    sources: dict[str, list[EvaluationAnswer]] = {}
    for answer in answers:
        sources.setdefault(answer.data_source or "unnamed", []).append(answer)
    return sources if len(sources) > 1 else {}


def differences(scored: Mapping[str, Sums], base: Mapping[str, Sums]) -> dict[str, Estimate]:
    """`scored` - `base`, paired, for metrics of both on the same prompts."""
    same = {name for name, sums in scored.items() if name in base and len(sums.total) == len(base[name].total)}
    return {name: estimate(scored[name], minus=base[name]) for name in scored if name in same}


class EvaluationProgress:
    """Estimates when an evaluation ends, from its rate."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def describe(self, answered: int, asked: int) -> str:
        """Example: `12 of 225 answers are in, about 65 s left`."""
        if answered and self._first is None:
            self._first = self._clock(), answered
        since, before = self._first or (0.0, 0)
        left = ""
        if self._first and answered > before:
            left = f", about {(self._clock() - since) / (answered - before) * (asked - answered):.0f} s left"
        return f"{answered} of {asked} answers are in{left}"


class Evaluator:
    """Opens evaluations in the store, one per held-out set."""

    def __init__(
        self, store: Store, config: EvaluationConfig, *, sets: list[EvalSet], num_rows: Mapping[str, int]
    ) -> None:
        """`num_rows`: prompts per set."""
        self._store = store
        self._sets = sets
        self._monitored = {each.name: config.rows(num_rows[each.name])[0] for each in sets}
        self._final = {each.name: config.rows(num_rows[each.name])[1] for each in sets}
        self._open: list[str] = []

    def open_monitor(self, *, step: int, fence: int, version: int) -> str:
        """Request the monitored rows. Returns the evaluation's name, unique also after a rollback (`fence`)."""
        name = f"step-{step}-{fence}"
        self._request(name, version=version, rows=self._monitored)
        self._open.append(name)
        return name

    def open_final(self, name: str, *, version: int) -> str:
        """Request the rows for before and after training. Returns `name`, numbered after requests without reward."""
        # A resumed run finds its predecessor's answers. They are final, so an evaluation without any reward needs a new
        # name.
        for number in itertools.count(1):
            fresh = name if number == 1 else f"{name}-{number}"
            results = self._results(fresh).values()
            if not 0 < sum(each.num_answered for each in results) == sum(each.num_failed for each in results):
                break
        self._request(fresh, version=version, rows=self._final)
        return fresh

    def num_answered(self, name: str) -> int:
        return sum(result.num_answered for result in self._results(name).values())

    def num_asked(self, name: str) -> int:
        return sum(result.num_asked for result in self._results(name).values())

    def result(self, name: str) -> dict[Purpose, EvaluationResult] | None:
        """Results by set, or None while answers are missing."""
        complete = {purpose: result for purpose, result in self._results(name).items() if result.is_complete}
        return complete if len(complete) == len(self._sets) else None

    def unfinished(self) -> list[str]:
        return [name for name in self._open if not self.result(name)]

    def metrics(self, evaluated: Mapping[Purpose, EvaluationResult]) -> dict[str, float]:
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
        """The newest monitored one since the last call, or None."""
        newest = None
        for name in list(self._open):
            if result := self.result(name):
                self._open.remove(name)
                newest = result
        return newest

    def _results(self, name: str) -> dict[Purpose, EvaluationResult]:
        results = {each.name: self._store.evaluation(f"{name}-{each.name}") for each in self._sets}
        return {purpose: result for purpose, result in results.items() if result}

    def _request(self, name: str, *, version: int, rows: Mapping[str, range]) -> None:
        for each in self._sets:
            name_of_set, own = f"{name}-{each.name}", list(rows[each.name])
            self._store.open_evaluation(name_of_set, purpose=each.name, version=version, rows=own, samples=each.samples)
