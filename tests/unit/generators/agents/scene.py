"""An engine that writes given texts, a scorer, and a runner around both."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.engine import Completion, ScriptedEngine
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt, make_run
from tests.unit.generators.chat import TEMPLATES, make_chat_tokenizer

QUESTION = [{"role": "user", "content": "what is 12 + 30?"}]


class WritingEngine(ScriptedEngine):
    """Writes the texts in order, token by token. Version 2 begins within the second text."""

    def __init__(self, texts: Sequence[str | list[int]], *, family: str = "chatml") -> None:
        self.tokenizer = make_chat_tokenizer(family)
        self._end = TEMPLATES[family][1]
        self._texts = list(texts)
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.stops: list[Sequence[str]] = []

    async def generate(self, prompt_token_ids, sampling, *, request_id, stop=()) -> Completion:
        number = len(self.requests)
        self.requests.append((prompt_token_ids, sampling, request_id))
        self.stops.append(stop)
        text = self._texts[number]
        is_stopped = any(each in text for each in stop)
        ending = self.tokenizer.encode("" if is_stopped else self._end, add_special_tokens=False)
        own = text if isinstance(text, list) else self.tokenizer.encode(text, add_special_tokens=False)
        token_ids = [*own, *ending]
        reason = "stop_string" if is_stopped else "stop"
        if len(token_ids) > sampling.max_tokens:
            token_ids, reason = token_ids[: sampling.max_tokens], "length"
        spans = [VersionSpan(0, min(number + 1, 2))]
        if number == 1 and len(token_ids) > 2:
            spans = [VersionSpan(0, 1), VersionSpan(2, 2)]
        return Completion(token_ids, [-0.5 - number - i / 100 for i in range(len(token_ids))], spans, reason)


async def broken_engine(*arguments: object, **settings: object) -> None:
    raise TypeError("no such argument")


REWARD = Reward(total=1.0, parts={"answer": 1.0})


class RecordingScorer:
    def __init__(self) -> None:
        self.samples: list[RewardInput] = []

    async def score(self, sample: RewardInput) -> Reward:
        self.samples.append(sample)
        return REWARD

    def compares(self, data_source: str) -> bool:
        return False


def make_runner(engine: WritingEngine, *, scorer: RecordingScorer | None = None, token="", **run: Any) -> AgentRunner:
    encoder = PromptEncoder(engine.tokenizer, max_prompt_tokens=1000)
    parts = {"engine": engine, "rewards": scorer or RecordingScorer(), "encoder": encoder}
    return AgentRunner(run=make_run(**run), generator_id="generator-0", token=token, **parts)


def play(
    agent: dict, texts, *, prompt=None, family="chatml", max_tokens=400, max_length=2000, inspect=None, **generators
) -> Trajectory:
    """The trajectory of an agent whose model writes these texts. `inspect` gets engine and scorer afterwards."""
    engine, scorer = WritingEngine(texts, family=family), RecordingScorer()
    generators = {"agent": agent, "sampling": {"max_tokens": max_tokens}, **generators}
    runner = make_runner(engine, scorer=scorer, generators=generators, model={"max_length": max_length})

    async def run() -> Trajectory:
        await runner.start()
        try:
            return await runner.answer(prompt or make_prompt(QUESTION), 1)
        finally:
            await runner.close()

    trajectory = asyncio.run(run())
    if inspect:
        inspect(engine, scorer)
    return trajectory


def written(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """Text after the prompt in contiguous runs, with whether the model wrote it."""
    starts = [0, *(np.flatnonzero(np.diff(trajectory.model_mask)) + 1)]
    tokenizer = make_chat_tokenizer("chatml")
    runs = zip(starts[1:], [*starts[2:], len(trajectory.token_ids)], strict=True)
    return [(tokenizer.decode(trajectory.token_ids[a:b]), bool(trajectory.model_mask[a])) for a, b in runs]
