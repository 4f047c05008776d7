"""The environment `sums_v1` of the examples, whose conversations verifiers writes down as it was told them."""

import json
from pathlib import Path

import sums_v1
import verifiers.v1 as vf

__all__ = ["ToldEnv", "ToldTaskset"]


class ToldConfig(sums_v1.SumsConfig):
    """The sums, and the folder to write to."""

    folder: str = ""


class ToldTask(sums_v1.SumTask):
    """A sum that keeps what the model was asked and has answered, token by token."""

    folder = Path()

    @vf.intercept
    async def note(self, response: vf.Response, trace: vf.Trace) -> None:
        """Note the tokens of a turn with their log-probabilities."""
        assert response.raw is not None
        (choice,) = response.raw["choices"]
        tokens = [[entry["token"], entry["logprob"]] for entry in choice["logprobs"]["content"]]
        trace.info.setdefault("turns", []).append(tokens)

    @vf.metric
    async def number(self, trace: vf.Trace) -> float:
        """Write the file of this conversation, and name it."""
        messages = [[node.sampled, node.message.role, node.message.content] for node in trace.nodes]
        written = json.dumps({"messages": messages, "turns": trace.info["turns"]})
        (self.folder / f"{self.data.idx}.json").write_text(written)
        return float(self.data.idx)


class ToldTaskset(vf.Taskset[ToldTask, ToldConfig]):
    """The sums of `sums_v1`."""

    def load(self):
        """Make the sums."""
        ToldTask.folder = Path(self.config.folder)
        settings = sums_v1.SumsConfig(size=self.config.size)
        yield from (ToldTask(task.data, self.config.task) for task in sums_v1.SumsTaskset(settings).load())


class ToldEnvConfig(sums_v1.SumsEnvConfig):
    """One seat, which asks for log-probabilities."""

    agent: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(logprobs=True))


class ToldEnv(sums_v1.SumsEnv, vf.Env[ToldEnvConfig]):
    """Two turns."""
