"""RedisStore: the store in Redis or Valkey; the one door to it."""

from slipstream.buffer.redis.store_batches import RedisBatches
from slipstream.buffer.redis.store_prompts import RedisEvaluations, RedisPrompts
from slipstream.buffer.redis.store_run import RedisRun
from slipstream.buffer.redis.store_trajectories import RedisFinished, RedisTrajectories
from slipstream.buffer.redis.store_watching import RedisWatching


class RedisStore(
    RedisPrompts, RedisTrajectories, RedisBatches, RedisFinished, RedisEvaluations, RedisWatching, RedisRun
):
    """All of `buffer.store.Store`: the parts share one connection pool and one run id. Safe to share among threads.

    Life cycle: `open_run_store(url, run_id, timeout_s=...)` connects, `open_run` creates the run or finds it again,
    `close` lets go of connections. Nothing is kept in this process but what never changes (the run's seed and rows).
    """


__all__ = ["RedisStore"]
