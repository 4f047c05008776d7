"""Engine: the protocol of vLLM, transformers and scripted engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Record, Sampling, VersionSpan
from slipstream.generators.errors import EngineError
from slipstream.runtime.images import PromptImage
from slipstream.runtime.routers import Router, find_routers


class Completion(Record):
    """One response.

    Example: Completion(token_ids=[3, 1, 2, 8, 4, 11], logprobs=[-0.1, ...], version_spans=[(0, 2), (3, 3)],
        stop_reason="stop")
    """

    token_ids: list[int]
    """Tokens of the response, including its end token."""
    logprobs: list[float]
    """One per token, under the distribution sampled from (after temperature, top-p, top-k)."""
    version_spans: list[VersionSpan]
    """Policy version of each token; `first_token` counts from the start of the response."""
    stop_reason: str
    """`stop` (end token) | `stop_string` | `length`."""
    experts: np.ndarray | None = None
    """uint8 or int16[T - 1, M, K]: the experts of each token of prompt and response but the last, in each router, as
    the pass chose them that sampled the next token of the response; None unless `model.router_replay`."""


class PromptScores(NamedTuple):
    """Log-probabilities of the tokens of a text but the first, at temperature 1, and of the likeliest token there."""

    own: list[float]
    likeliest: list[float]


class EngineLoad(Record):
    """Utilisation of an engine.

    Example: EngineLoad(kv_usage=0.42, num_waiting=0, num_preempted=3, num_open=64, num_steps=1201)
    """

    kv_usage: float = 0.0
    """Share of the KV cache in use, 0..1; 0 for an engine without a bound."""
    num_waiting: int = 0
    """Requests queued for room in the cache, including preempted ones."""
    num_preempted: int = 0
    """Preemptions since the start; each recomputes a running request."""
    num_open: int = 0
    """Requests that are not answered yet."""
    num_steps: int = 0
    """Decoding steps since the start."""


class Engine(Protocol):
    """Generates token ids from token ids. All methods belong to one asyncio loop.

    Life: start -> (open_epoch, update)* interleaved with generate -> stop.
    """

    @property
    def version(self) -> int:
        """Policy version that tokens are sampled from; -1 before the first update."""
        ...

    @property
    def device(self) -> str:
        """Device that receives broadcasts, as `device_name` names it; known once started."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineError."""
        ...

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        request_id: str,
        stop: Sequence[str] = (),
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Generate one response, across updates if need be. Cancelling aborts the request. Raises EngineError.

        It ends with the token that completes one of the texts in `stop`, which may go on behind that text.
        `images`: those of the prompt, in the order of their tokens.
        """
        ...

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        """Sample as `generate` does, without waiting for open requests. Raises EngineError."""
        ...

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of token t + 1 given tokens <= t, at temperature 1: len(token_ids) - 1 values."""
        ...

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        """Return the same with the log-probability of the likeliest token at each place. Raises EngineError."""
        ...

    async def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group. Raises WeightTransferError."""
        ...

    async def update(self, update: Update, fetched: SharedBuckets | None = None) -> float:
        """Pause without aborting requests, receive, verify, load, switch the version, resume.

        `fetched` holds the bytes of an update that is not broadcast. Returns the pause, seconds. Raises
        WeightTransferError if the previous weights are still loaded (generation continues with them),
        UnverifiedWeightsError if the new ones are loaded incorrectly.
        """
        ...

    def current_load(self) -> EngineLoad:
        """Return the latest known utilisation, without a call to the engine. Between `start` and `stop`."""
        ...

    async def check_health(self) -> None:
        """Raise EngineError if the engine is dead or stalled."""
        ...

    async def stop(self) -> None:
        """End everything this engine started, within bounded time."""
        ...


@runtime_checkable
class ProfiledEngine(Protocol):
    """An engine with a profiler of its own."""

    async def profile(self, *, is_on: bool) -> list[Path]:
        """Begin to record steps, or end it; returns the files that were written. Raises EngineError."""
        ...


def require_routers(module: Any) -> list[Router]:
    """The model's routers. Raises EngineError without any."""
    if routers := find_routers(module):
        return routers
    raise EngineError(
        "model.router_replay must be false for a model without routers that choose by top-k, got "
        f"{type(module).__name__}"
    )


def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """End tokens of the tokenizer and of the checkpoint's generation config: all engines stop at the same tokens."""
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({token_id for token_id in [tokenizer.eos_token_id, *configured] if token_id is not None})
