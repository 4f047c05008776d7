"""An engine that writes given texts, and a runner around it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.broker.messages import Prompt
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.engine import Completion
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt, make_run
from tests.unit.generators.chat import TEMPLATES, make_chat_tokenizer

QUESTION = [{"role": "user", "content": "what is 12 + 30?"}]


class WritingEngine(ScriptedEngine):
    """Writes one text after the other, token by token; version 2 begins within the second."""

    def __init__(self, texts: Sequence[str | list[int]], *, family: str = "chatml") -> None:
        self.tokenizer = make_chat_tokenizer(family)
        self._end = TEMPLATES[family][1]
        self._texts = list(texts)
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.stops: list[Sequence[str]] = []

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Sequence[str] = ()
    ) -> Completion:
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
        spans = (
            [VersionSpan(0, 1), VersionSpan(2, 2)]
            if number == 1 and len(token_ids) > 2
            else [VersionSpan(0, min(number + 1, 2))]
        )
        return Completion(token_ids, [-0.5 - number - i / 100 for i in range(len(token_ids))], spans, reason)


class RecordingScorer:
    """Gives reward 1 to all samples and records them."""

    def __init__(self) -> None:
        self.samples: list[RewardInput] = []

    async def score(self, sample: RewardInput) -> Reward:
        self.samples.append(sample)
        return Reward(total=1.0, parts={"answer": 1.0})

    def compares(self, data_source: str) -> bool:
        return False


def play(
    agent: dict[str, Any],
    texts: Sequence[str | list[int]],
    *,
    prompt: Prompt | None = None,
    family: str = "chatml",
    max_tokens: int = 400,
    max_length: int = 2000,
    inspect: Callable[[WritingEngine, RecordingScorer], None] | None = None,
    **generators: Any,
) -> Trajectory:
    """The trajectory of an agent whose model writes these texts; `inspect` sees what engine and scorer were given."""
    engine, scorer = WritingEngine(texts, family=family), RecordingScorer()
    run = make_run(
        generators={"agent": agent, "sampling": {"max_tokens": max_tokens}, **generators},
        model={"max_length": max_length},
    )
    runner = AgentRunner(
        run=run,
        engine=engine,
        rewards=scorer,
        encoder=PromptEncoder(engine.tokenizer, max_prompt_tokens=1000),
        generator_id="generator-0",
    )

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
