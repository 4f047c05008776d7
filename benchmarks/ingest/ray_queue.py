"""RayQueue: the same bytes through `ray.util.queue`, an actor in memory: nothing survives it."""

import time

from benchmarks.ingest.paths import Passage, make_payloads
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, unpack


class RayQueue:
    """Batches as large as the broker's calls to its store."""

    def __init__(self, *, num_tokens: int) -> None:
        from ray.util.queue import Queue

        self._payloads = make_payloads(MAX_TRAJECTORIES, num_tokens=num_tokens)
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // len(self._payloads[0])))
        self._queue = Queue(actor_options={"num_cpus": 0})

    def pass_through(self, count: int) -> Passage:
        """See IngestPath."""
        started_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            self._queue.put_nowait_batch(self._payloads[: min(self._at_once, count - start)])
        put_at = time.perf_counter()
        for start in range(0, count, self._at_once):
            for payload in self._queue.get_nowait_batch(min(self._at_once, count - start)):
                unpack(payload)
        return Passage(put_at - started_at, time.perf_counter() - put_at, {})

    def close(self) -> None:
        """See IngestPath."""
        self._queue.shutdown(force=True)
