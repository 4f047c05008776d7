"""Scores of evaluations: accuracy, reward, pass@k, maj@k, best@k and worst@k, with intervals over the prompts.

Every metric is a ratio of two sums over prompts, so that one bootstrap serves all of them. Those at k are expectations
over the subsets of k among the n answers to a prompt: exact, but for maj@k of many answers.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from slipstream.buffer.records import EvaluationAnswer
from slipstream.buffer.trajectory import Record

_RESAMPLES = 1000
_SEED = 42
_MOST_SUBSETS = 4096
"""Subsets that a majority is averaged over: all of them if there are no more, else so many seeded ones."""
_KINDS = ("pass", "maj", "best", "worst")


class Estimate(Record):
    """A mean with its 95 % interval. Example: Estimate(mean=0.912, low=0.885, high=0.937)."""

    mean: float
    low: float
    high: float


class Score(Record):
    """Scores of a model on a set, or on the part of it with one data source.

    Example: Score(num_prompts=512, num_answers=2048, num_failed=3, metrics={"accuracy": Estimate(...), "pass@4": ...},
        mean_tokens=201.4, max_tokens=512, stop_reasons={"stop": 2011, "length": 37})
    """

    num_prompts: int
    num_answers: int
    num_failed: int
    """Answers whose reward function failed: not right, and without a reward."""
    metrics: dict[str, Estimate]
    mean_tokens: float
    """Tokens that the model wrote."""
    max_tokens: int
    stop_reasons: dict[str, int]


class Sums(NamedTuple):
    """A metric by prompt, in the order of rows; its value is the sum of `total` over that of `number`."""

    total: np.ndarray
    number: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.total.sum() / self.number.sum())


# --- one prompt ------------------------------------------------------------------------------------------------------
def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Probability that one of k answers is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest of k rewards: sum over ranks i of r[i] * C(i, k - 1) / C(n, k), r ascending, i from 0."""
    weights = [comb(rank, k - 1) / comb(len(rewards), k) for rank in range(len(rewards))]
    return float(np.dot(weights, sorted(rewards)))


def majority_at_k(answers: Sequence[str], is_correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent of k answers is right; a tie is decided by lot.

    An empty answer has no vote but its own, so that it never joins others. An answer counts by the share of its
    repetitions that are right.
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
    """Subsets of k of `num` items as rows of zeros and ones."""
    if comb(num, k) <= _MOST_SUBSETS:
        chosen = np.array(list(itertools.combinations(range(num), k)))
    else:
        draws = np.random.default_rng([_SEED, num, k]).random((_MOST_SUBSETS, num))
        chosen = np.argpartition(draws, k - 1, axis=1)[:, :k]
    subsets = np.zeros((len(chosen), num), dtype=np.float32)
    np.put_along_axis(subsets, chosen, 1.0, axis=1)
    return subsets


# --- all prompts -----------------------------------------------------------------------------------------------------
def metric_sums(answers: Iterable[EvaluationAnswer], *, kinds: Sequence[str] = _KINDS) -> dict[str, Sums]:
    """Return the metrics of a set: `accuracy`, `reward`, and those `kinds` at k = 1, 2, 4, ... and at all answers.

    A metric that a prompt has too few answers for is of the other prompts.
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
        # At 1 the others are accuracy and reward.
        if (k > 1 or kind == "pass") and k <= len(rewards if kind in ("best", "worst") else answers):
            yield f"{kind}@{k}", (compute[kind](k), 1)


def estimate(sums: Sums, *, minus: Sums | None = None) -> Estimate:
    """Return the mean and its bootstrap interval over prompts, or those of the paired difference to `minus`.

    Both are of the same prompts: every resample takes the same ones of either.

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
    """Return how often each prompt is drawn in each resample."""
    shares = np.full(num_prompts, 1 / num_prompts)
    return np.random.default_rng(_SEED).multinomial(num_prompts, shares, size=_RESAMPLES).astype(float)


def score(answers: Sequence[EvaluationAnswer]) -> Score:
    """Return the scores of all answers to a set, at least one."""
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
    """Return the answers by data source; nothing unless there are several."""
    sources: dict[str, list[EvaluationAnswer]] = {}
    for answer in answers:
        sources.setdefault(answer.data_source or "unnamed", []).append(answer)
    return sources if len(sources) > 1 else {}


def differences(scored: Mapping[str, Sums], base: Mapping[str, Sums]) -> dict[str, Estimate]:
    """Return by how much a model exceeds another one on the same prompts."""
    same = {name for name, sums in scored.items() if name in base and len(sums.total) == len(base[name].total)}
    return {name: estimate(scored[name], minus=base[name]) for name in scored if name in same}
