"""Grades reasoning-gym tasks with their own verifiers."""

from functools import cache
from typing import Any

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.generators.rewards.reward import RewardInput

UNRELIABLE = {
    "boxnet": "its answers are None",
    "composite": "it needs settings of its own",
    "graph_color": "its answers are None",
    "propositional_logic": "its answers are None",
    "rubiks_cube": "its answers are None",
    "rush_hour": "its answers are None",
}
"""Task -> why its verifier does not give the reference answer a score of 1."""
_OF_TUPLES = ("arc_agi", "rearc")
"""Their verifiers expect tuples instead of lists."""


class ReasoningGym:
    """Score, 0..1, of a reasoning-gym task's verifier for the text in the last <answer>.

    The ground truth is a record with `answer` and `metadata`, or the answer with `metadata` in `extra_info`. The task's
    name is `metadata.source_dataset`, or the last part of `data_source`.
    """

    def __init__(self) -> None:
        try:
            # Local import, because it is optional and takes seconds.
            from reasoning_gym import get_score_answer_fn
            from reasoning_gym.utils import extract_answer
        except ImportError as error:
            raise ConfigError(
                f"generators.reward.function=reasoning_gym needs the library, got {error}: "
                "pip install 'slipstream[tasks]'."
            ) from error
        self._extract, self._verifier = extract_answer, cache(get_score_answer_fn)

    def __call__(self, sample: RewardInput) -> Reward:
        truth = sample.ground_truth
        entry = truth if isinstance(truth, dict) else {"answer": truth, **sample.extra_info}
        if not isinstance(entry.get("metadata"), dict) or "answer" not in entry:
            raise ValueError(
                "a row of reasoning_gym must have `answer` and a record `metadata` in its ground truth, or the latter "
                f"in extra_info, got {', '.join(entry)}"
            )
        task = str(entry["metadata"].get("source_dataset") or sample.data_source.rpartition("/")[2])
        if task in UNRELIABLE:
            raise ValueError(f"the task {task!r} of reasoning-gym cannot be graded: {UNRELIABLE[task]}")
        if task in _OF_TUPLES:
            entry = {**entry, "metadata": {name: _as_tuples(value) for name, value in entry["metadata"].items()}}
        score = float(self._verifier(task)(self._extract(sample.response), entry))
        return Reward(total=score, is_correct=score >= 1)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
