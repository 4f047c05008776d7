"""Bare paths from generator to learner to compare Slipstream with: Redis, a Ray queue, TransferQueue."""

import os
import time
from typing import Any

import numpy as np

from benchmarks.ingest.paths import ANY_LEASE, Passage, make_payloads, make_trajectory
from benchmarks.ingest.served_run import ServedRun
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, unpack
from slipstream.buffer.redis.connection import connect


class RawRedis:
    """The same bytes into the same server with redis-py: SET in pipelines of the broker's batch size, MGET, UNLINK.

    No validation and no life cycle.
    """

    def __init__(self, served: ServedRun, *, num_tokens: int) -> None:
        self._served = served
        self._client = connect(served.store_url)
        self._payloads = make_payloads(MAX_TRAJECTORIES, num_tokens=num_tokens)
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // len(self._payloads[0])))

    def pass_through(self, count: int) -> Passage:
        before, own_before = self._served.cpu_s()["store"], time.process_time()
        put_s = self._put(count)
        used = {"store": self._served.cpu_s()["store"] - before, "generator": time.process_time() - own_before}
        return Passage(put_s, self._take(count), {name: 1e6 * seconds / count for name, seconds in used.items()})

    def close(self) -> None:
        self._client.close()

    def _put(self, count: int) -> float:
        started_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            pipeline = self._client.pipeline(transaction=False)
            for number in range(start, min(start + self._at_once, count)):
                pipeline.set(f"raw:{number}", self._payloads[number % len(self._payloads)])
            pipeline.execute()
        return time.perf_counter() - started_at

    def _take(self, count: int) -> float:
        started_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            keys = [f"raw:{number}" for number in range(start, min(start + self._at_once, count))]
            pipeline = self._client.pipeline(transaction=False)
            pipeline.mget(keys)
            pipeline.unlink(*keys)
            for payload in pipeline.execute()[0]:
                unpack(payload)
        return time.perf_counter() - started_at


class RayQueue:
    """The same bytes through `ray.util.queue`, an in-memory actor, in batches of the broker's size."""

    def __init__(self, *, num_tokens: int) -> None:
        from ray.util.queue import Queue

        self._payloads = make_payloads(MAX_TRAJECTORIES, num_tokens=num_tokens)
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // len(self._payloads[0])))
        self._queue = Queue(actor_options={"num_cpus": 0})

    def pass_through(self, count: int) -> Passage:
        started_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            self._queue.put_nowait_batch(self._payloads[: min(self._at_once, count - start)])
        put_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            for payload in self._queue.get_nowait_batch(min(self._at_once, count - start)):
                unpack(payload)
        return Passage(put_at - started_at, time.perf_counter() - put_at, {})

    def close(self) -> None:
        self._queue.shutdown(force=True)


_PARTITION = "benchmark"


class TransferQueuePath:
    """The same arrays through TransferQueue (arXiv:2507.01663) with SimpleStorage, its in-memory default."""

    def __init__(self, *, num_tokens: int) -> None:
        # Read at import.
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
        import transfer_queue

        self._queue = transfer_queue
        self._queue.init()
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // (9 * num_tokens)))
        self._fields = self._make_fields(num_tokens)

    def pass_through(self, count: int) -> Passage:
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
        self._queue.close()

    def _make_fields(self, num_tokens: int) -> Any:
        import torch
        from tensordict import TensorDict

        rng = np.random.default_rng(0)
        made = [make_trajectory(ANY_LEASE, n, num_tokens=num_tokens, rng=rng) for n in range(self._at_once)]
        names = ("token_ids", "model_mask", "generator_logprobs")
        arrays = {name: torch.from_numpy(np.stack([getattr(each, name) for each in made])) for name in names}
        return TensorDict(arrays, batch_size=len(made))
