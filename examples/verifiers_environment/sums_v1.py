"""A verifiers environment (0.4): a sum, questioned once by the environment, with two rewards and a metric."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["SumsEnv", "SumsTaskset"]


class SumData(vf.TaskData):
    """A sum and its value."""

    answer: str


class SumTask(vf.Task[SumData]):
    """The rubric: it sees the whole conversation."""

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        """Whether the last answer ends with the sum."""
        return float(_last(trace).endswith(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        """Whether the last answer has at most 40 characters."""
        return float(len(_last(trace)) <= 40)

    @vf.metric
    async def words(self, trace) -> float:
        """Number of words in the last answer."""
        return float(len(_last(trace).split()))


class SumsConfig(vf.TasksetConfig):
    """Number of sums, at most 1600, and their seed."""

    size: int = 100
    seed: int = 0


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Distinct sums of two numbers from 10 to 49."""

    def load(self):
        """Yield each sum as a task with its answer."""
        pairs = list(itertools.product(range(10, 50), repeat=2))
        for a, b in random.Random(self.config.seed).sample(pairs, self.config.size):
            yield SumTask(SumData(prompt=f"what is {a} + {b}?", answer=str(a + b)), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    """A single agent: the model."""

    agent: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    """Asks for the sum, then asks whether the model is sure."""

    async def run(self, task, agents) -> None:
        """Run the two turns."""
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            if not first.terminated:
                await talk.turn("are you sure?")


def _last(trace) -> str:
    return next((str(m.content or "") for m in reversed(trace.branches[-1].messages) if m.role == "assistant"), "")
