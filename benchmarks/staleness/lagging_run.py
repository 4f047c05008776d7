"""LaggingRun: one in-process training run with a generator that stays a fixed number of versions behind.

The learner is the product's own `Trainer`; the generator gets the weights after each step. With replay, each fresh
batch is followed by steps on batches drawn from the newest stored ones.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.staleness.lagging_generator import LaggingGenerator
from benchmarks.staleness.plans import Plan, make_config
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import join_ranks

EVALUATION_INTERVAL_STEPS = 20
"""Learner steps, on fresh and replayed batches, between evaluations."""
REPLAY_CAPACITY = 8
"""Number of fresh batches to draw replayed ones from."""
GOAL = 0.9
"""Accuracy to measure the time to."""
_FINAL_EVALUATIONS = 5
_CPU = torch.device("cpu")


class Point(NamedTuple):
    """Evaluation of a run after one of its steps."""

    step: int
    """Fresh batches trained on so far."""
    samples: int
    """Trajectories generated up to this step."""
    seconds: float
    """CPU time of generation and training so far, excluding evaluations."""
    accuracy: float
    """On held-out prompts, sampled at temperature 1."""
    ess: float
    """Effective sample size of the last step, as a fraction of its tokens."""


def run_plan(plan: Plan, *, model: str) -> dict[str, Any]:
    """Train as planned from the model in a folder; return plan and outcome as plain values."""
    torch.set_num_threads(1)
    started_at = time.monotonic()
    run = LaggingRun(plan, config=make_config(plan, model=model))
    points = list(run.points())
    return (
        plan._asdict()
        | summarize(points)
        | {
            "diverged": run.diverged,
            "generate_s": run.spent["generate"],
            "train_s": run.spent["train"],
            "wall_s": time.monotonic() - started_at,
            "points": [point._asdict() for point in points],
        }
    )


def summarize(points: list[Point]) -> dict[str, Any]:
    """Return the mean accuracy of the last evaluations, and when the goal was first reached."""
    last = [point.accuracy for point in points[-_FINAL_EVALUATIONS:]]
    reached = next((point for point in points if point.accuracy >= GOAL), None)
    return {
        "final": sum(last) / len(last),
        "best": max(point.accuracy for point in points),
        "goal_step": reached and reached.step,
        "goal_samples": reached and reached.samples,
        "goal_s": reached and reached.seconds,
    }


class LaggingRun:
    """One run. Life: `points`, once."""

    def __init__(self, plan: Plan, *, config: RunConfig) -> None:
        self._plan = plan
        self._config = config
        ranks = join_ranks(rank=0, size=1, device=_CPU, timeout_s=60)
        self.trainer = build_trainer(config, ranks=ranks)
        self._generator = LaggingGenerator(config, lag=plan.lag)
        self._replayable: deque[list[list[Trajectory]]] = deque(maxlen=REPLAY_CAPACITY)
        self._random = random.Random(plan.seed)
        self._version = 0
        self._metrics: dict[str, float] = {}
        self.spent = {"generate": 0.0, "train": 0.0}
        """CPU seconds of each part."""
        self.diverged = False
        """Whether the run ended early because a loss was not finite."""
        self._update_generator()

    def points(self, *, every_steps: int = EVALUATION_INTERVAL_STEPS) -> Iterator[Point]:
        """Train, yielding an evaluation at the start and after every `every_steps` learner steps."""
        every = max(1, every_steps // (1 + self._plan.replay))
        yield self._evaluate(0)
        for step in range(1, self._plan.steps + 1):
            try:
                self.step()
            except DivergenceError:
                self.diverged = True
                return
            if step % every == 0:
                yield self._evaluate(step)

    def step(self) -> list[list[Trajectory]]:
        """Train on a fresh batch and on replayed ones; return the fresh one."""
        with self._timed("generate"):
            fresh = self._generator.generate(num_groups=self._plan.groups)
        self._train(fresh)
        self._replayable.append(fresh)
        for _ in range(self._plan.replay):
            self._train(self._random.choice(self._replayable))
        return fresh

    def _train(self, groups: list[list[Trajectory]]) -> None:
        with self._timed("train"):
            self._metrics = self.trainer.step(
                groups, learner_version=self._version, step=self._version + 1, max_lags=[None] * len(groups)
            )
        self._version += 1
        self._update_generator()

    def _update_generator(self) -> None:
        self._generator.add_version(self._version, self.trainer.engine.gather_parameters())

    def _evaluate(self, step: int) -> Point:
        accuracy = self._generator.accuracy(self.trainer.engine.gather_parameters())
        samples = step * self._plan.groups * self._config.generators.group_size
        return Point(step, samples, sum(self.spent.values()), accuracy, self._metrics.get("learner/ess", 1.0))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started_at = time.process_time()
        yield
        self.spent[part] += time.process_time() - started_at
