"""ScriptedEngine: the same tokens for the same seed, at a pretended speed, without a model; for tests of protocols."""

import asyncio
import math
import random
import time

from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import WeightReceiver
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.generators.engines.engine import Completion, EngineLoad
from slipstream.generators.engines.weight_layout import receive

END_TOKEN_ID = 1
"""Ends every response that is not cut off."""
VOCABULARY = range(2, 12)
"""What the other tokens are drawn from, each with the same probability."""


class ScriptedEngine:
    """Fulfils Engine. It claims to compute whatever canary log-probabilities came with the last update."""

    def __init__(self, engine: ScriptedEngineConfig, *, receiver: WeightReceiver | None = None) -> None:
        """Without a receiver an update changes the version alone."""
        self._config = engine
        self._receiver = receiver
        self._canaries: dict[tuple[int, ...], list[float]] = {}
        self._version = -1

    @property
    def version(self) -> int:
        """Policy version being sampled from; -1 before the first update."""
        return self._version

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str) -> Completion:
        """`tokens_per_response` tokens, the last of them the end token, or `max_tokens` if those are fewer."""
        script = self._script(sampling.seed)
        length = min(len(script), sampling.max_tokens)
        spans: list[VersionSpan] = []
        for position in range(length):
            if not spans or spans[-1].version != self._version:
                spans.append(VersionSpan(position, self._version))
            await asyncio.sleep(self._config.seconds_per_token)
        logprob = -math.log(len(VOCABULARY))
        reason = "stop" if length == len(script) else "length"
        return Completion(script[:length], [logprob] * length, spans, reason)

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """The canary's numbers, or uniform ones."""
        uniform = [-math.log(len(VOCABULARY))] * (len(token_ids) - 1)
        return self._canaries.get(tuple(token_ids), uniform)

    async def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group, if there is a receiver. Raises WeightTransferError."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.open_epoch, opening, rank=rank)

    async def update(self, update: Update, fetched: SharedBuckets | None = None) -> float:
        """Receive and verify, if there is a receiver; then take the version. Raises WeightTransferError."""
        started_at = time.perf_counter()
        if self._receiver is not None:
            await asyncio.to_thread(receive, self._receiver, update, fetched)
        canaries = zip(update.canary_token_ids, update.canary_logprobs, strict=True)
        self._canaries = {tuple(tokens): logprobs for tokens, logprobs in canaries}
        self._version = update.version
        return time.perf_counter() - started_at

    def load(self) -> EngineLoad:
        """There is always room."""
        return EngineLoad()

    async def check_health(self) -> None:
        """Always well."""

    async def stop(self) -> None:
        """Leave the weight group."""
        if self._receiver is not None:
            self._receiver.close()

    def _script(self, seed: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.choice(VOCABULARY) for _ in range(self._config.tokens_per_response - 1)] + [END_TOKEN_ID]
