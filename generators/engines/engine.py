"""Engine: the protocol that the vLLM and transformers engines implement, and a scripted engine for tests."""

import asyncio
import math
import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.broker.messages import Update
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.base import Record
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.generators.errors import EngineError
from slipstream.runtime.images import PromptImage

Stop = Sequence[str | int]
"""Texts and token ids that end a response."""
Images = Sequence[PromptImage]


def no_routers(module: object) -> EngineError:
    """Error for `model.moe.router_replay` with a model without routers."""
    return EngineError(
        "model.moe.router_replay must be false for a model without routers that choose by top-k, got "
        f"{type(module).__name__}"
    )


class Completion(Record):
    """Response to one request."""

    token_ids: list[int]
    """Includes the end token."""
    logprobs: list[float]
    """One per token, after temperature, top-p, top-k, and min-p."""
    version_spans: list[VersionSpan]
    """`first_token` counts from the start of the response."""
    stop_reason: str
    """`stop` (end token) | `stop_string` (also a stop token) | `length`."""
    experts: np.ndarray | None = None
    """uint8 or int16[T - 1, M, K]: K experts in each of M routers for each token of prompt and response except the
    last, as chosen when the next token was sampled. None unless `model.moe.router_replay`."""


class PromptScores(NamedTuple):
    """Log-probabilities at temperature 1 of the actual and the likeliest token, without the first position."""

    own: list[float]
    likeliest: list[float]


class EngineLoad(Record):
    """Utilization of an engine."""

    kv_usage: float = 0.0
    """Fraction of the KV cache in use, 0..1; 0 if it is unbounded."""
    num_waiting: int = 0
    """Requests queued for cache space, including preempted ones."""
    num_preempted: int = 0
    """Since start."""
    num_open: int = 0
    """Requests without an answer yet."""
    num_steps: int = 0
    """Since start."""


class Engine(Protocol):
    """Generates token ids from token ids, on one asyncio loop.

    Life cycle: start -> (prepare -> switch)* interleaved with generate -> stop.
    """

    version: int
    """Current policy version; -1 before the first update."""

    async def start(self) -> None:
        """Load the model and wait until it serves requests. Raises EngineError."""

    async def generate(
        self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str, stop: Stop = (), images: Images = ()
    ) -> Completion:
        """Generate one response, possibly across updates. Canceling aborts the request. Raises EngineError.

        The token that ends the response may extend past the string in `stop`. `images`: in token order.
        """

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        """Sample like `generate`, but without waiting for open requests. Raises EngineError."""

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of the prompt's own tokens (`prompt_scores(token_ids).own`). Raises EngineError."""

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        """Score each token given the tokens before it. Raises EngineError."""

    async def prepare(self, update: Update, received: HostBuckets) -> None:
        """Get ready to switch to a received version, while requests are decoded. May be repeated.

        Raises WeightTransferError, and keeps the current weights.
        """

    async def switch(self, update: Update) -> float:
        """Switch to the prepared version between two tokens. Returns the pause, seconds.

        Raises UnverifiedWeightsError.
        """

    def current_load(self) -> EngineLoad:
        """Latest known utilization without calling the engine. Valid between `start` and `stop`."""

    async def check_health(self) -> None:
        """Raise EngineError if the engine is dead or stalled."""

    async def stop(self) -> None:
        """Stop within bounded time."""


END_TOKEN_ID = 1
VOCABULARY = range(2, 12)


class ScriptedEngine:
    """Pseudo-random tokens at a simulated speed. Tokens are uniform and depend only on the seed.

    Probes always pass, because canaries get the log-probabilities in the last update.
    """

    def __init__(self, engine: ScriptedEngineConfig) -> None:
        self._config = engine
        self._canaries: dict[tuple[int, ...], list[float]] = {}
        self.version = -1

    async def start(self) -> None:
        """No-op: no process and no model exist."""

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
        """No-op: a version changes no weights."""

    async def switch(self, update: Update) -> float:
        canaries = zip(update.canary_token_ids, update.canary_logprobs, strict=True)
        self._canaries = {tuple(tokens): logprobs for tokens, logprobs in canaries}
        self.version = update.version
        return 0.0

    def current_load(self) -> EngineLoad:
        return EngineLoad()

    async def check_health(self) -> None:
        """No-op: no process can die."""

    async def stop(self) -> None:
        """No-op: no process needs to end."""

    def _script(self, seed: int) -> list[int]:
        rng, config = random.Random(seed), self._config
        length = config.tokens_per_response
        if config.length_sigma:
            length = max(1, round(length * rng.lognormvariate(0.0, config.length_sigma)))
        return [rng.choice(VOCABULARY) for _ in range(length - 1)] + [END_TOKEN_ID]
