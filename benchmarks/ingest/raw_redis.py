"""RawRedis: the same bytes into the same server with redis-py's pipeline, and out again. No checks, no life cycle."""

import time

from benchmarks.ingest.paths import Passage, make_payloads
from benchmarks.ingest.served_run import ServedRun
from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, unpack
from slipstream.buffer.redis.connection import connect


class RawRedis:
    """One client: SET as many to a pipeline as the broker puts into one call, then GET and UNLINK."""

    def __init__(self, served: ServedRun, *, num_tokens: int) -> None:
        self._served = served
        self._client = connect(served.store_url)
        self._payloads = make_payloads(MAX_TRAJECTORIES, num_tokens=num_tokens)
        self._at_once = max(1, min(MAX_TRAJECTORIES, MAX_BYTES // len(self._payloads[0])))

    def pass_through(self, count: int) -> Passage:
        """See IngestPath."""
        before, own_before = self._served.cpu_s()["store"], time.process_time()
        put_s = self._put(count)
        used = {"store": self._served.cpu_s()["store"] - before, "generator": time.process_time() - own_before}
        return Passage(put_s, self._take(count), {name: 1e6 * seconds / count for name, seconds in used.items()})

    def close(self) -> None:
        """See IngestPath."""
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
