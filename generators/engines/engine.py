"""Engine: the protocol that the vLLM, transformers, and scripted engines implement."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.broker.messages import Update
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.base import Record
from slipstream.runtime.images import PromptImage

Stop = Sequence[str | int]
"""Texts and token ids that end a response."""
Images = Sequence[PromptImage]


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
    """Unanswered requests."""
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
        """`prompt_scores(token_ids).own`. Raises EngineError."""

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
