"""python -m tests.integration.lender_process LEARNER ADDRESS: a lender in a separate process, for tests that kill it.

Fetches version 1 from the learner's address, lends it slowly at ADDRESS, and then prints a line.
"""

import sys
import threading
import time

import msgspec

from slipstream.broker.messages import SnapshotSource
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.host_weights import HostWeights
from tests.fakes import KEYS
from tests.unit.broker.weight_versions import make_version

COLUMNS = 2**18
"""Three buckets of 2 MiB, 8 chunks each."""
_CHUNK_S = 0.05


class SlowWeights(HostWeights):
    """Lends a chunk every 50 ms."""

    def read_part(self, version: int, name: str, *, offset: int, num_bytes: int) -> bytes:
        time.sleep(_CHUNK_S)
        return super().read_part(version, name, offset=offset, num_bytes=num_bytes)


def main(learner: str, address: str) -> None:
    fetcher = Fetcher(KEYS, lend_at=address, host_weights=SlowWeights())
    update, _ = make_version(1, num_columns=COLUMNS)
    source = SnapshotSource(learner, "/not/shared", is_lent=True)
    fetcher.fetch(msgspec.structs.replace(update, source=source), cancelled=threading.Event())
    print("lends", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
