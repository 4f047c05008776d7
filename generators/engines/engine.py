"""Engine: the protocol that the vLLM, transformers, and scripted engines implement."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.base import Record
from slipstream.generators.errors import EngineError
from slipstream.runtime.images import PromptImage
from slipstream.runtime.routers import Router, find_routers


class Completion(Record):
    """Response to one request."""

    token_ids: list[int]
    """Includes the end token."""
    logprobs: list[float]
    """One per token, under the sampled distribution (after temperature, top-p, top-k, and min-p)."""
    version_spans: list[VersionSpan]
    """Policy version of each token; `first_token` counts from the start of the response."""
    stop_reason: str
    """`stop` (end token) | `stop_string` (also a stop token) | `length`."""
    experts: np.ndarray | None = None
    """uint8 or int16[T - 1, M, K]: K experts in each of M routers for each token of prompt and response except the
    last, as chosen in the forward pass that sampled the next token. None unless `model.moe.router_replay`."""


class PromptScores(NamedTuple):
    """Log-probabilities of the actual and the likeliest token at all positions but the first, at temperature 1."""

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
        self,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        request_id: str,
        stop: Sequence[str | int] = (),
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Generate one response, possibly across updates. Canceling aborts the request. Raises EngineError.

        A token id in `stop`, or the token that completes a string in it, ends the response. That token may extend past
        the string. `images`: in token order.
        """

    async def sample_probe(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        """Sample like `generate`, but without waiting for open requests. Raises EngineError."""

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """`prompt_scores(token_ids).own`. Raises EngineError."""

    async def prompt_scores(self, token_ids: list[int]) -> PromptScores:
        """Score each token given the tokens before it. Raises EngineError."""

    async def prepare(self, update: Update, received: HostBuckets) -> None:
        """Get ready to switch to a received version, while requests are decoded. May be repeated.

        Raises WeightTransferError; the current weights then stay in place.
        """

    async def switch(self, update: Update) -> float:
        """Switch to the prepared version between two tokens. Returns the pause of generation, seconds.

        Raises UnverifiedWeightsError if the weights are loaded incorrectly.
        """

    def current_load(self) -> EngineLoad:
        """Latest known utilization without calling the engine. Valid between `start` and `stop`."""

    async def check_health(self) -> None:
        """Raise EngineError if the engine is dead or stalled."""

    async def stop(self) -> None:
        """Stop within bounded time."""


def require_routers(module: Any) -> list[Router]:
    """Routers of a model. Raises EngineError if it has none."""
    if routers := find_routers(module):
        return routers
    raise EngineError(
        "model.moe.router_replay must be false for a model without routers that choose by top-k, got "
        f"{type(module).__name__}"
    )


class WeightLayout:
    """Names, order, shapes, and dtypes of a complete update's tensors, for an engine that computes in `dtype`.

    Finds errors that the checksum misses (intact bytes of other tensors) or the probe (a small tensor that was not
    sent).
    """

    def __init__(self, names: CheckpointNames, *, dtype: str) -> None:
        self._expected = {
            name: (list(shape), buckets.dtype_name(wire)) for name, shape, wire in names.metadata(getattr(torch, dtype))
        }

    def check(self, slots: Sequence[TensorSlot]) -> None:
        """Raise WeightTransferError unless `slots` match."""
        self._check_names([slot.name for slot in slots])
        for slot in slots:
            shape, dtype = self._expected[slot.name]
            if slot.shape != shape:
                raise WeightTransferError(
                    f"tensor {slot.name} must have this generator's shape {shape}, got {slot.shape}: "
                    "learner and generator must start from the same model.path"
                )
            if slot.dtype != dtype:
                raise WeightTransferError(f"tensor {slot.name} must have the engine's dtype {dtype}, got {slot.dtype}")

    def _check_names(self, names: list[str]) -> None:
        expected, sent = list(self._expected), set(names)
        if missing := [name for name in expected if name not in sent]:
            raise WeightTransferError(
                f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not"
            )
        if unknown := [name for name in names if name not in self._expected]:
            raise WeightTransferError(
                f"every tensor must belong to a parameter of the model, {unknown[0]} and {len(unknown) - 1} more do not"
            )
        # Check the order, because swapped names with equal shapes pass every other check.
        for index, (name, expected_name) in enumerate(zip(names, expected, strict=False)):
            if name != expected_name:
                raise WeightTransferError(
                    f"tensors must be in the model's order, with {expected_name} at index {index}, got {name}: "
                    "names were swapped or the models differ"
                )
        if len(names) > len(expected):
            raise WeightTransferError(
                f"every parameter must be sent once, got {len(names)} tensors for {len(expected)}"
            )
