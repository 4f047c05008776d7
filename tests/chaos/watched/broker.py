"""`python -m tests.chaos.watched.broker [--light] [overrides]`: the broker with a journal of its store.

It runs `python -m slipstream.broker`; with `--light`, waits and credits are small enough to matter in a run of seconds.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.broker import __main__ as role
from slipstream.broker import archiver, ingest, router
from slipstream.buffer.archive import shards
from slipstream.buffer.redis import run_store
from slipstream.configs import broker as configs
from tests.chaos.stage import JOURNALS, POINTS
from tests.chaos.watched.journal import Journal, Points
from tests.chaos.watched.store import WatchedStore

_CREDIT_MESSAGES, _CREDIT_BYTES = 24, 24 * 1024
_RETRY_S = 0.3
_REAP_INTERVAL_S = 0.3
_REAP_AFTER_OUTAGE_S = 1.0
_TICK_S = 0.2


def main(arguments: Sequence[str]) -> None:
    overrides = [argument for argument in arguments if argument != "--light"]
    journal = WatchedStore.journal = Journal(Path(JOURNALS), "broker")
    points = WatchedStore.points = Points(Path(POINTS), "broker", on_obey=lambda at: journal.write("obeyed", point=at))
    run_store.RedisStore = WatchedStore
    archiver._GROUPS_PER_SHARD, archiver._FLUSH_S = 64, 2.0
    configs.CLAIM_LEASES = 1  # so that claims lapse as soon as leases
    write_durably = shards.write_durably

    def watched(*given: Any, **named: Any) -> Any:
        points.reach("before_shard")
        return write_durably(*given, **named)

    shards.write_durably = watched
    if len(overrides) != len(arguments):
        lighten()
    role.main(overrides)


def lighten() -> None:
    router._CREDIT_MESSAGES, router._CREDIT_BYTES = _CREDIT_MESSAGES, _CREDIT_BYTES
    router._REAP_INTERVAL_S, router._REAP_AFTER_OUTAGE_S = _REAP_INTERVAL_S, _REAP_AFTER_OUTAGE_S
    ingest._RETRY_S = _RETRY_S
    archiver._TICK_S = _TICK_S


if __name__ == "__main__":
    main(sys.argv[1:])
