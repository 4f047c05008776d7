"""ScriptedEngine: pseudo-random tokens at a simulated speed, for tests."""

import asyncio
import math
import random
from collections.abc import Sequence

from slipstream.broker.messages import Update
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad, Images, PromptScores, Stop

END_TOKEN_ID = 1
VOCABULARY = range(2, 12)


class ScriptedEngine:
    """Implements Engine. Tokens are uniform and depend only on the seed.

    Probes always pass, because canaries get the log-probabilities in the last update.
    """

    def __init__(self, engine: ScriptedEngineConfig) -> None:
        self._config = engine
        self._canaries: dict[tuple[int, ...], list[float]] = {}
        self.version = -1

    async def start(self) -> None:
        """No-op."""

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Stop = (), images: Images = ()
    ) -> Completion:
        """`tokens_per_response` tokens, varied by `length_sigma`, with the end token last. Ignores `stop`."""
        script = self._script(sampling.seed)
        length = min(len(script), sampling.max_tokens)
        spans: list[VersionSpan] = []
        for position in range(length):
            # An update may arrive during any sleep.
            if not spans or spans[-1].version != self.version:
                spans.append(VersionSpan(position, self.version))
            await asyncio.sleep(self._config.seconds_per_token)
        logprob = -math.log(len(VOCABULARY))
        reason = "stop" if length == len(script) else "length"
        return Completion(script[:length], [logprob] * length, spans, reason)

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        token_ids, spans = self._script(sampling.seed)[: sampling.max_tokens], [VersionSpan(0, self.version)]
        scores = [await self.prompt_logprobs([*prompt, *token_ids]) for prompt in prompts]
        return [Completion(token_ids, logprobs[-len(token_ids) :], spans, "length") for logprobs in scores]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        uniform = [-math.log(len(VOCABULARY))] * (len(token_ids) - 1)
        return self._canaries.get(tuple(token_ids), uniform)

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        own = await self.prompt_logprobs(token_ids)
        return PromptScores(own, own)

    async def prepare(self, update: Update, received: HostBuckets) -> None:
        """No-op."""

    async def switch(self, update: Update) -> float:
        canaries = zip(update.canary_token_ids, update.canary_logprobs, strict=True)
        self._canaries = {tuple(tokens): logprobs for tokens, logprobs in canaries}
        self.version = update.version
        return 0.0

    def current_load(self) -> EngineLoad:
        return EngineLoad()

    async def check_health(self) -> None:
        """No-op."""

    async def stop(self) -> None:
        """No-op."""

    def _script(self, seed: int) -> list[int]:
        rng, config = random.Random(seed), self._config
        length = config.tokens_per_response
        if config.length_sigma:
            length = max(1, round(length * rng.lognormvariate(0.0, config.length_sigma)))
        return [rng.choice(VOCABULARY) for _ in range(length - 1)] + [END_TOKEN_ID]
