"""Staging: a version's weights, copied into flat buckets so that the learner can go on while they travel."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.broker.weights.records import TensorSlot
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.batching.collate import plain_microbatch
from slipstream.learner.engines.engine import TrainEngine

# @@ The canary: fixed sequences whose log-probabilities show whether an engine holds the learner's weights.
SEQUENCE_TOKENS = 16
"""Length of a canary sequence, tokens."""


def canary_token_ids(*, seed: int, vocab_size: int, num_sequences: int, max_length: int) -> np.ndarray:
    """int64[num_sequences, min(16, max_length)]: the same for the whole run."""
    generator = np.random.default_rng([seed, vocab_size])
    return generator.integers(0, vocab_size, size=(num_sequences, min(SEQUENCE_TOKENS, max_length)))


@torch.no_grad()
def canary_logprobs(engine: TrainEngine, token_ids: np.ndarray) -> list[list[float]]:
    """The learner's log-probability of token t + 1 given tokens <= t, temperature 1, for each sequence. Collective."""
    logprobs = engine.forward(plain_microbatch(token_ids).to(engine.device))["logprobs"]
    return logprobs.reshape(len(token_ids), -1).tolist()


Canary = tuple[list[list[int]], list[list[float]]]
"""Sequences, and the learner's log-probability of each token but the first, at the version being published."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One version, ready to be sent."""

    update: Update
    """What members are told; epoch and members are filled in when it is sent."""
    buckets: list[torch.Tensor]
    """uint8, as they travel."""

    @property
    def version(self) -> int:
        """Which."""
        return self.update.version

    @property
    def checksum(self) -> str:
        """Over the checksums of all buckets."""
        return buckets.combine(self.update.checksums)


class Stager:
    """Copies weights into buckets that nobody sends from. Belongs to the learner's main thread."""

    def __init__(self, config: WeightsConfig, *, wire_dtype: torch.dtype) -> None:
        self._config = config
        self._wire_dtype = wire_dtype
        self._plan: tuple[list[TensorSlot], list[int]] | None = None
        self._is_pinned = False

    def stage(
        self,
        *,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        canary: Canary,
        reuse: Staged | None = None,
    ) -> Staged:
        """All weights as `version`; the buckets of `reuse`, which nobody needs any more, are written over."""
        if self._plan is None:
            weights = self._make_plan(weights)
        slots, sizes = self._planned
        # One after the other: sharded weights are whole on this rank only while they are read.
        packed = buckets.pack(
            ((name, tensor.detach()) for name, tensor in weights),
            slots,
            sizes=sizes,
            reuse=reuse.buckets if reuse else [],
            is_pinned=self._is_pinned,
        )
        update = Update(
            epoch=0,
            members=[],
            version=version,
            slots=slots,
            bucket_bytes=sizes,
            checksums=buckets.checksums(packed),
            canary_token_ids=canary[0],
            canary_logprobs=canary[1],
            max_probe_diff=self._config.max_probe_diff,
            timeout_s=self._config.transfer_timeout_s,
        )
        return Staged(update, packed)

    @property
    def _planned(self) -> tuple[list[TensorSlot], list[int]]:
        assert self._plan is not None, "the first version makes the plan"
        return self._plan

    def _make_plan(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """From the first version; returns its weights, in host memory."""
        tensors = []
        for name, tensor in weights:
            self._is_pinned |= tensor.device.type == "cuda"
            tensors.append((name, tensor.detach().cpu()))
        metadata = [(name, tuple(tensor.shape), self._wire_dtype) for name, tensor in tensors]
        self._plan = buckets.plan(metadata, bucket_bytes=self._config.bucket_bytes)
        return tensors
