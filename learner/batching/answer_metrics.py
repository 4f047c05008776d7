"""Metrics of the answers of a step, by the kind of task that they belong to."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.buffer.trajectory import Trajectory

ANSWER_METRICS = {
    "trajectories": "trajectories claimed",
    "reward_mean": "mean reward of those whose reward function answered",
    "correct_fraction": "share of these that are entirely right",
    "failed_fraction": "share masked because their reward function or agent loop failed",
    "length_mean": "mean number of tokens that the model wrote",
    "turns_mean": "mean number of its turns",
    "stop_<reason>": "share that ended for that reason: `stop`, `length`, `turn_limit`, ...",
    "part_<name>": "mean of a part of the reward, over those that have it",
    "agent_<name>": "mean of a number that the agent loop counts, such as `tool_calls`, over those that have it",
}
"""Name -> description, as `learner/by_source/<source>/<name>`; a name without an answer that it is about is missing."""
BY_SOURCE = "learner/by_source/<source>/<name>"
_MOST_SOURCES = 32
_OTHERS = "others"


def describe_answers(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the metrics of sampled answers; beyond 32 sources, those with the fewest answers are one, `others`."""
    by_source: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_source.setdefault(trajectory.data_source or "unnamed", []).append(trajectory)
    ranked = sorted(by_source, key=lambda source: -len(by_source[source]))
    if rare := ranked[_MOST_SOURCES:]:
        by_source[_OTHERS] = [trajectory for source in rare for trajectory in by_source.pop(source)]
    return {
        BY_SOURCE.replace("<source>", source).replace("<name>", name): value
        for source, answers in by_source.items()
        for name, value in _describe(answers).items()
    }


def _describe(answers: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [answer.reward for answer in answers if answer.reward.status == "ok"]
    found = {
        "trajectories": float(len(answers)),
        "failed_fraction": 1 - len(rewards) / len(answers),
        "length_mean": _mean(int(np.count_nonzero(answer.model_mask)) for answer in answers),
        "turns_mean": _mean(answer.num_turns for answer in answers),
    }
    if rewards:
        found["reward_mean"] = _mean(reward.total for reward in rewards)
        found["correct_fraction"] = _mean(reward.is_correct for reward in rewards)
    stops = Counter(answer.stop_reason for answer in answers)
    found |= {f"stop_{reason}": count / len(answers) for reason, count in stops.items()}
    found |= {f"part_{name}": value for name, value in _means([reward.parts for reward in rewards]).items()}
    found |= {f"agent_{name}": value for name, value in _means([answer.metrics for answer in answers]).items()}
    return found


def _means(records: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for record in records for name in record})
    return {name: _mean(record[name] for record in records if name in record) for name in names}


def _mean(values: Iterable[float]) -> float:
    known = [*values]
    # Numbers of numpy, which no record takes, become plain ones.
    return float(sum(known) / len(known))
