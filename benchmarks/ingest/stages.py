"""What single stages of the way cost, in microseconds of one processor per trajectory."""

import time

import numpy as np

from benchmarks.ingest.paths import make_trajectory
from benchmarks.ingest.served_run import GROUP_SIZE, ServedRun
from slipstream.buffer.codec import check_header, pack
from slipstream.buffer.records import Lease
from slipstream.buffer.redis.connection import connect

_LEASE = Lease("0-0", group_id="0", purpose="train", row=0, ordinal=0, attempt=0, indices=[])
_SECONDS = 0.3


def check_us(num_tokens: int) -> float:
    """The broker's look at header and payload."""
    trajectory = make_trajectory(_LEASE, 0, num_tokens=num_tokens, randomness=np.random.default_rng(0))
    header, payload = pack(trajectory, lease_id=_LEASE.id, purpose="train", group_size=GROUP_SIZE)
    count, started_at = 0, time.process_time()
    while time.process_time() - started_at < _SECONDS:
        check_header(header, payload)
        count += 1
    return 1e6 * (time.process_time() - started_at) / count


def script_us(served: ServedRun) -> float:
    """What the server has spent in scripts that were called, microseconds; nearly all of it inserts."""
    client = connect(served.store_url)
    try:
        return float(client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"])
    finally:
        client.close()
