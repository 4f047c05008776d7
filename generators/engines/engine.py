"""Engine: the protocol vLLM, transformers and the scripted engine fulfil."""

from typing import Any, Protocol

from slipstream.broker.messages import OpenEpoch, Update
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.buffer.trajectory import Record, Sampling, VersionSpan


# @@ end_token_ids: which tokens end a response.
def end_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """The tokenizer's end token and those of the checkpoint's generation config; both engines stop at the same ones."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({token_id for token_id in [tokenizer.eos_token_id, *listed] if token_id is not None})


class Completion(Record):
    """What the engine wrote after a prompt.

    Example: Completion(token_ids=[3, 1, 2, 8, 4, 11], logprobs=[-0.1, ...], version_spans=[(0, 2), (3, 3)],
        stop_reason="stop")
    """

    token_ids: list[int]
    """The response, end token included."""
    logprobs: list[float]
    """Log-probability of each, under the distribution really sampled from (after temperature, top-p, top-k)."""
    version_spans: list[VersionSpan]
    """Which version sampled which, `first_token` counted from the start of the response."""
    stop_reason: str
    """`stop` (end token) | `length`."""


class EngineLoad(Record):
    """How full an engine is.

    Example: EngineLoad(kv_usage=0.42, num_waiting=0, num_preempted=3, num_open=64, num_steps=1201)
    """

    kv_usage: float = 0.0
    """Share of the KV cache in use, 0..1; 0 where the engine has no bound of its own."""
    num_waiting: int = 0
    """Requests that it has no room to begin with, those preempted included."""
    num_preempted: int = 0
    """Times a running request lost its place, and its work with it, since the start."""
    num_open: int = 0
    """Requests that are not answered yet."""
    num_steps: int = 0
    """Steps made since the start."""


class Engine(Protocol):
    """Token ids in, token ids out. All methods belong to one asyncio loop.

    Life: start -> (open_epoch, update)* interleaved with generate -> stop. `version` is -1 until the first update.
    """

    @property
    def version(self) -> int:
        """Policy version being sampled from; -1 before the first update."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineError."""
        ...

    async def generate(self, prompt_token_ids: list[int], sampling: Sampling, *, request_id: str) -> Completion:
        """One response. Keeps going across updates. Cancelling the task aborts the request. Raises EngineError."""
        ...

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of token t + 1 given tokens <= t, at temperature 1: len(token_ids) - 1 numbers."""
        ...

    async def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None:
        """Join the weight group. Raises WeightTransferError."""
        ...

    async def update(self, update: Update, fetched: SharedBuckets | None = None) -> float:
        """Pause keeping requests, receive, verify checksums, load, switch version, resume. Returns the pause, seconds.

        `fetched`: its bytes, where they were not broadcast. Raises WeightTransferError while the old version is
        still in and generation has resumed, UnverifiedWeightsError when the new one was loaded, but not whole.
        """
        ...

    def load(self) -> EngineLoad:
        """How full it is, as far as it is known without asking: costs nothing. Between `start` and `stop`."""
        ...

    async def check_health(self) -> None:
        """Raises EngineError when the engine is dead."""
        ...

    async def stop(self) -> None:
        """End everything this engine started, bounded in time."""
        ...
