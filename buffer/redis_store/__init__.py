"""RedisStore: the store in Redis or Valkey; the one door to it."""

from buffer.redis_store.batches import RedisBatches
from buffer.redis_store.evaluations import RedisEvaluations
from buffer.redis_store.finished import RedisFinished
from buffer.redis_store.prompts import RedisPrompts
from buffer.redis_store.run import RedisRun
from buffer.redis_store.trajectories import RedisTrajectories
from buffer.redis_store.watching import RedisWatching


class RedisStore(
    RedisPrompts, RedisTrajectories, RedisBatches, RedisFinished, RedisEvaluations, RedisWatching, RedisRun
):
    """All of `buffer.store.Store`: the parts share one connection pool and one run id. Safe to share among threads.

    Life cycle: `open_store(url, run_id, timeout_s=...)` connects, `open_run` creates the run or finds it again,
    `close` lets go of connections. Nothing is kept in this process but what never changes (the run's seed and rows).
    """


__all__ = ["RedisStore"]
