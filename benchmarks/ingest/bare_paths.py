"""TransferQueuePath: the same arrays through TransferQueue (arXiv:2507.01663), in memory: nothing survives it."""

import time
from typing import Any

import numpy as np

from benchmarks.ingest.paths import Passage, make_trajectory
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES
from slipstream.buffer.records import Lease

_PARTITION = "benchmark"
_LEASE = Lease("0-0", group_id="0", purpose="train", row=0, ordinal=0, attempt=0, indices=[])


class TransferQueuePath:
    """Its key-value interface with SimpleStorage, its default; batches as large as the broker's calls to its store."""

    def __init__(self, *, num_tokens: int) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._queue.init()
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // (9 * num_tokens)))
        self._fields = self._make_fields(num_tokens)

    def pass_through(self, count: int) -> Passage:
        """See IngestPath."""
        batches = [
            [str(number) for number in range(start, min(start + self._at_once, count))]
            for start in range(0, count, self._at_once)
        ]
        started_at = time.perf_counter()
        for keys in batches:
            self._queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=self._fields[: len(keys)])
        put_at = time.perf_counter()
        for keys in batches:
            self._queue.kv_batch_get(keys=keys, partition_id=_PARTITION)
        taken_at = time.perf_counter()
        for keys in batches:
            self._queue.kv_clear(keys=keys, partition_id=_PARTITION)
        return Passage(put_at - started_at, taken_at - put_at, {})

    def close(self) -> None:
        """See IngestPath."""
        self._queue.close()

    def _make_fields(self, num_tokens: int) -> Any:
        import torch
        from tensordict import TensorDict

        randomness = np.random.default_rng(0)
        made = [make_trajectory(_LEASE, n, num_tokens=num_tokens, randomness=randomness) for n in range(self._at_once)]
        names = ("token_ids", "model_mask", "generator_logprobs")
        arrays = {name: torch.from_numpy(np.stack([getattr(each, name) for each in made])) for name in names}
        return TensorDict(arrays, batch_size=len(made))
