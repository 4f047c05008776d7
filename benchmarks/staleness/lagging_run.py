"""LaggingRun: one training run in this process whose generator is kept a fixed number of versions behind.

The learner is the product's own `Trainer`; after each step the generator adopts the new version. With replay, each
fresh batch is followed by steps on batches drawn from the newest ones kept.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.staleness.lagging_generator import LaggingGenerator
from benchmarks.staleness.plans import METHODS
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.convert import convert
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import join_ranks

EVALUATE_EVERY = 20
"""Steps of the learner, on fresh and replayed batches, from one evaluation to the next."""
KEPT_BATCHES = 8
"""Fresh batches that replayed ones are drawn from."""
GOAL = 0.9
"""Accuracy whose time is measured."""
_FINAL_EVALUATIONS = 5
_ANSWER_TOKENS = 6
"""Five digits and the end."""
_CPU = torch.device("cpu")


class Plan(NamedTuple):
    """What tells one run from another."""

    method: str
    """Of METHODS."""
    lag: int
    """Versions that the generator is behind."""
    replay: int
    """Steps on replayed batches after each fresh one."""
    seed: int
    """Of prompts and sampling."""
    steps: int
    """Fresh batches."""
    groups: int
    """Groups of a batch."""
    learning_rate: float
    """Of a method with one update per step."""


class Point(NamedTuple):
    """An evaluation."""

    step: int
    """Fresh batches trained on so far."""
    samples: int
    """Trajectories generated so far."""
    seconds: float
    """Processor time of generating and training so far; evaluations are left out."""
    accuracy: float
    """Held-out, sampled at temperature 1."""
    ess: float
    """Effective sample size of the last step, share of its tokens."""


def run_plan(plan: Plan, *, model: str) -> dict[str, Any]:
    """Train as planned from the model in a folder; returns the plan and what came of it as plain values."""
    torch.set_num_threads(1)
    started_at = time.monotonic()
    run = LaggingRun(plan, config=make_config(plan, model=model))
    points = list(run.points())
    return (
        plan._asdict()
        | summarise(points)
        | {
            "diverged": run.diverged,
            "generate_s": run.spent["generate"],
            "train_s": run.spent["train"],
            "wall_s": time.monotonic() - started_at,
            "points": [point._asdict() for point in points],
        }
    )


def make_config(plan: Plan, *, model: str) -> RunConfig:
    """The default task with the plan's algorithm, at a constant learning rate."""
    method = METHODS[plan.method]
    run = load(
        [
            "experiment=digits_cpu",
            "learner/engine=torch",
            "learner.device=cpu",
            f"model.path={model}",
            f"seed={plan.seed}",
            f"learner.groups_per_step={plan.groups}",
            f"learner.max_steps={plan.steps}",
            f"learner.optimizer.learning_rate={plan.learning_rate * method.rate}",
            "learner.optimizer.schedule=constant",
            "learner.optimizer.warmup_steps=0",
            "learner.tokens_per_microbatch=4096",
            f"generators.sampling.max_tokens={_ANSWER_TOKENS}",
        ]
    )
    return msgspec.structs.replace(run, algorithm=convert(method.algorithm, AlgorithmConfig))


def summarise(points: list[Point]) -> dict[str, Any]:
    """Accuracy of the last evaluations, and when the goal was first reached."""
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
    """Life: points, once."""

    def __init__(self, plan: Plan, *, config: RunConfig) -> None:
        self._plan = plan
        self._config = config
        ranks = join_ranks(rank=0, size=1, device=_CPU, timeout_s=60)
        self.trainer = build_trainer(config, ranks=ranks, device=_CPU)
        """The product's own."""
        self._generator = LaggingGenerator(config, lag=plan.lag)
        self._kept: deque[list[list[Trajectory]]] = deque(maxlen=KEPT_BATCHES)
        self._random = random.Random(plan.seed)
        self._version = 0
        self._metrics: dict[str, float] = {}
        self.spent = {"generate": 0.0, "train": 0.0}
        """Processor time, seconds."""
        self.diverged = False
        """Whether it ended early because a loss was not finite."""
        self._adopt()

    def points(self) -> Iterator[Point]:
        """Train, telling where it stands at the start and again and again."""
        every = max(1, EVALUATE_EVERY // (1 + self._plan.replay))
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
        """A fresh batch, and the replayed ones; returns the fresh one."""
        with self._timed("generate"):
            fresh = self._generator.generate(num_groups=self._plan.groups)
        self._train(fresh)
        self._kept.append(fresh)
        for _ in range(self._plan.replay):
            self._train(self._random.choice(self._kept))
        return fresh

    def _train(self, groups: list[list[Trajectory]]) -> None:
        with self._timed("train"):
            self._metrics = self.trainer.step(
                groups, learner_version=self._version, step=self._version + 1, max_lags=[None] * len(groups)
            )
        self._version += 1
        self._adopt()

    def _adopt(self) -> None:
        self._generator.adopt(self._version, self.trainer.engine.gather_parameters())

    def _evaluate(self, step: int) -> Point:
        accuracy = self._generator.accuracy(self.trainer.engine.gather_parameters())
        samples = step * self._plan.groups * self._config.generators.group_size
        return Point(step, samples, sum(self.spent.values()), accuracy, self._metrics.get("learner/ess", 1.0))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started_at = time.process_time()
        yield
        self.spent[part] += time.process_time() - started_at
