"""Staging: copies a version's weights into flat buckets, so that the learner trains on while they are sent."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.broker.messages import Update
from slipstream.broker.weights import buckets
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.engines.engine import TrainEngine

SEQUENCE_TOKENS = 16
"""Length of a canary sequence, tokens."""

Canary = tuple[list[list[int]], list[list[float]]]
"""Canary sequences, and the learner's log-probability of each token but the first at the version being published.

An engine whose log-probabilities differ does not hold the learner's weights.
"""


# --- the canary ------------------------------------------------------------------------------------------------------


def canary_token_ids(*, seed: int, vocab_size: int, num_sequences: int, max_length: int) -> np.ndarray:
    """Random sequences, int64[num_sequences, min(16, max_length)], the same for the whole run."""
    generator = np.random.default_rng([seed, vocab_size])
    return generator.integers(0, vocab_size, size=(num_sequences, min(SEQUENCE_TOKENS, max_length)))


@torch.no_grad()
def canary_logprobs(engine: TrainEngine, token_ids: np.ndarray, *, layout: Layout) -> list[list[float]]:
    """The learner's log-probability of token t + 1 given tokens <= t, temperature 1, for each sequence, by the layout
    that trains. Collective."""
    num_sequences, length = token_ids.shape
    trained = np.arange(1, length)
    samples = [
        Sample(sequence, trained, index * len(trained), group_id=str(index)) for index, sequence in enumerate(token_ids)
    ]
    logprobs = torch.zeros(num_sequences * len(trained))
    # Every rank computes all of it: a sharded model needs the same calls from each.
    for microbatch in collate(samples, layout=layout):
        logprobs[microbatch.indices] = engine.forward(microbatch.to(engine.device))["logprobs"].float().cpu()
    return logprobs.reshape(num_sequences, -1).tolist()


# --- buckets ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Staged:
    """A version that is ready to be sent."""

    update: Update
    """Announcement to the members; epoch and members are filled in when it is sent."""
    buckets: list[torch.Tensor]
    """uint8, one tensor per message of a broadcast."""

    @property
    def version(self) -> int:
        return self.update.version

    @property
    def checksum(self) -> str:
        """Checksum over the checksums of all buckets."""
        return buckets.combine(self.update.checksums)


class Stager:
    """Copies weights into buckets that are not being sent. Belongs to the learner's main thread."""

    def __init__(self, config: WeightsConfig, *, metadata: Iterable[buckets.TensorMeta]) -> None:
        """`metadata`: of all tensors of a version, in the order in which they are laid out."""
        self._config = config
        self._slots, self._sizes = buckets.plan(metadata, bucket_bytes=config.bucket_bytes)

    def stage(
        self,
        *,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        canary: Canary,
        reuse: Staged | None = None,
    ) -> Staged:
        """Copy all weights as `version`; overwrites the buckets of `reuse`, a version that nobody needs any more."""
        # One tensor at a time: gathered from shards, all of them together may not fit on this rank.
        packed = buckets.pack(weights, self._slots, sizes=self._sizes, reuse=reuse.buckets if reuse else [])
        update = Update(
            epoch=0,
            members=[],
            version=version,
            slots=self._slots,
            bucket_bytes=self._sizes,
            checksums=buckets.checksums(packed),
            canary_token_ids=canary[0],
            canary_logprobs=canary[1],
            max_probe_diff=self._config.max_probe_diff,
            timeout_s=self._config.transfer_timeout_s,
        )
        return Staged(update, packed)
