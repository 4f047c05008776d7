"""Engine: the protocol of vLLM, transformers and scripted engines.

WeightLayout: the tensors a complete update of a model must hold, checked before any byte arrives.

A checksum shows that the bytes sent are those received, not that they are the right tensors, and a probe may miss a
small tensor that kept its old value. Comparing names, order, shapes and dtype with the model finds both for certain.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, TensorSlot, Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.broker.weights.shared_buckets import SharedBuckets
from slipstream.broker.weights.transport import WeightReceiver
from slipstream.buffer.trajectory import Sampling, VersionSpan
from slipstream.configs.base import Record
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


class WeightLayout:
    """Names, shapes and dtypes of one model's tensors, as an engine that computes in `dtype` gets them."""

    def __init__(self, names: CheckpointNames, *, dtype: str) -> None:
        self._expected = {
            name: (list(shape), buckets.dtype_name(wire)) for name, shape, wire in names.metadata(getattr(torch, dtype))
        }

    def check(self, slots: Sequence[TensorSlot]) -> None:
        """Raise WeightTransferError unless `slots` are the model's tensors, in its order and dtypes."""
        self._check_names([slot.name for slot in slots])
        for slot in slots:
            shape, dtype = self._expected[slot.name]
            if slot.shape != shape:
                raise WeightTransferError(
                    f"tensor {slot.name} must have shape {shape} as in this generator's model, got {slot.shape}: "
                    "learner and generator must start from the same model.path"
                )
            if slot.dtype != dtype:
                raise WeightTransferError(
                    f"tensor {slot.name} must travel as the engine holds it, in {dtype}, got {slot.dtype}"
                )

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
        # Order, because swapped names of equal shape pass every other check.
        for index, (name, expected_name) in enumerate(zip(names, expected, strict=False)):
            if name != expected_name:
                raise WeightTransferError(
                    f"tensors must come in the model's order, which has {expected_name} at index {index}, got {name}: "
                    "names were swapped or the models differ"
                )
        if len(names) > len(expected):
            raise WeightTransferError(
                f"every parameter must be sent once, got {len(names)} tensors for {len(expected)}"
            )


def receive_update(receiver: WeightReceiver, update: Update, fetched: SharedBuckets | None) -> list[tuple[str, Tensor]]:
    """Return an update's tensors, checksums verified, from `fetched` or else from the weight group (blocking).

    The tensors are views of buffers that the next update reuses: load them at once. Raises WeightTransferError.
    """
    if fetched is not None:
        buckets.verify(fetched.tensors, expected=update.checksums)
        return buckets.unpack(fetched.tensors, update.slots)
    return receiver.receive(
        update.slots, bucket_bytes=update.bucket_bytes, checksums=update.checksums, timeout_s=update.timeout_s
    )
