"""Watch: what each role has done so far, read from the store as anybody may."""

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from tests.chaos.recovery import Work


class Watch:
    """Looks without waiting: while the store is away there is nothing to be seen."""

    def __init__(self, url: str, run_id: str) -> None:
        self._store: RedisStore = open_run_store(url, run_id, timeout_s=10.0)
        self._num_looks = 0

    @property
    def store(self) -> RedisStore:
        """What it looks through."""
        return self._store

    def look(self, pids: dict[str, int]) -> dict[str, Work]:
        """Work by role name; `pids` are those of the newest processes."""
        try:
            return self._read(pids)
        except ReplayBufferError:
            return {}

    def _read(self, pids: dict[str, int]) -> dict[str, Work]:
        self._num_looks += 1
        counts, roles = self._store.counts(), self._store.roles()
        # Only a broker accepts trajectories and hands out new prompts; only a learner moves the step.
        arrived = counts.accepted + counts.duplicates + counts.superseded
        work: dict[str, Work] = {
            "store": (self._num_looks,),
            "broker": (arrived + counts.admitted,),
            "learner": (self._store.run_state().step,),
        }
        for name, pid in pids.items():
            gauges = roles.get(name, {})
            if name not in work and gauges.get("pid") == pid:
                work[name] = (int(gauges.get("trajectories", 0) - gauges.get("outbox", 0)),)
        return work
