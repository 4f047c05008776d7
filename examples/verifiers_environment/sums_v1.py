"""A verifiers environment (0.4): a sum, doubted once by the environment, with a rubric of two rewards and a metric."""

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
        """Whether it is no longer than forty characters."""
        return float(len(_last(trace)) <= 40)

    @vf.metric
    async def words(self, trace) -> float:
        """Its number of words."""
        return float(len(_last(trace).split()))


class SumsConfig(vf.TasksetConfig):
    """Number of sums, at most 1600, and their seed."""

    size: int = 100
    seed: int = 0


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Sums of two numbers from 10 to 49, each once."""

    def load(self):
        """Make the sums."""
        pairs = list(itertools.product(range(10, 50), repeat=2))
        for a, b in random.Random(self.config.seed).sample(pairs, self.config.size):
            yield SumTask(SumData(prompt=f"what is {a} + {b}?", answer=str(a + b)), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    """One seat: the model."""

    agent: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    """Asks, and asks again whatever the answer."""

    async def run(self, task, agents) -> None:
        """Two turns of one conversation."""
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            if not first.terminated:
                await talk.turn("are you sure?")


def _last(trace) -> str:
    return next((str(m.content or "") for m in reversed(trace.branches[-1].messages) if m.role == "assistant"), "")
