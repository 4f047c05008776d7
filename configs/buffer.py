"""The replay buffer: where it lives, how much it holds, how batches are drawn from it."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config
from slipstream.configs.drawing import (
    KEEP_ALL,
    AccuracyConfig,
    FifoConfig,
    FreshestConfig,
    KeepAllConfig,
    MixConfig,
    PrioritizedConfig,
    ReuseConfig,
    StalenessConfig,
    UniformConfig,
    ZeroSignalConfig,
)


# @@ The archive: what is kept of groups that are over.
class ArchiveConfig(Config):
    """Groups that are over leave the store for Parquet shards in the run folder."""

    enabled: bool = True
    """Whether there is one; without it, groups that are over are gone."""
    groups_per_shard: Annotated[int, Meta(ge=1)] = 1024
    """A shard is written when this many groups wait."""
    max_shard_mib: Annotated[int, Meta(ge=1)] = 256
    """Encoded trajectories a shard is made of, MiB: a shard of long ones has fewer groups."""
    flush_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest a group waits for its shard to fill up, seconds."""


class EmbeddedRedisConfig(Config, tag="embedded", tag_field="kind"):
    """A Redis server of the run's own, on a unix socket, its data in the run folder."""

    durability: Literal["fast", "standard", "strict"] = "standard"
    """Nothing on disk | written before every answer, synced every second | synced before every answer."""
    max_memory_mib: Annotated[int, Meta(ge=16)] = 1024
    """Writes are refused above it (`noeviction`), MiB."""


class RedisConfig(Config, tag="redis", tag_field="kind"):
    """A Redis or Valkey server somebody else runs."""

    url: str
    """`redis://`, `rediss://` or `unix://`; the password comes from the environment, `SLIPSTREAM_REDIS_PASSWORD`."""


class MemoryStoreConfig(Config, tag="memory", tag_field="kind"):
    """The in-process twin; only for `mode=serial` and `mode=replay`."""


class RefillConfig(Config, tag="refill", tag_field="kind"):
    """A group waits for all of its members, however often its prompt must be leased (up to `max_attempts`)."""


class TrainShortConfig(Config, tag="train_short", tag_field="kind"):
    """A group short of members is trained on as it is."""

    after_s: Annotated[float, Meta(gt=0)] = 60.0
    """Since its first member arrived, seconds."""
    min_members: Annotated[int, Meta(ge=2)] = 2
    """With fewer sampled ones it waits on."""


class DropShortConfig(Config, tag="drop", tag_field="kind"):
    """A group short of members expires, and another prompt is admitted for it."""

    after_s: Annotated[float, Meta(gt=0)] = 60.0
    """Since its first member arrived, seconds."""


GroupDeadline = RefillConfig | TrainShortConfig | DropShortConfig
"""Any of them."""


class CapacityConfig(Config):
    """How much the store may hold; at the limit no prompt is admitted until some of it is over."""

    max_groups: Annotated[int, Meta(ge=1)] | None = None
    """Groups admitted and not over (running, buffered, used, not yet archived); absent: what pacing lets in."""
    max_mib: Annotated[int, Meta(ge=1)] | None = None
    """Encoded trajectories, MiB; prompts under way still add to it. Absent: what the server takes."""


class BufferConfig(Config):
    """The store and what is drawn from it."""

    store: EmbeddedRedisConfig | RedisConfig | MemoryStoreConfig = EmbeddedRedisConfig()
    """Who holds the state that must survive."""
    sampler: FifoConfig | FreshestConfig | UniformConfig | PrioritizedConfig = FifoConfig()
    """Which ready groups a step claims."""
    filter: KeepAllConfig | ZeroSignalConfig | AccuracyConfig = KEEP_ALL
    """Which complete groups are rejected before the learner sees them, another prompt admitted for each."""
    reuse: ReuseConfig = ReuseConfig()
    """Whether groups are trained on again."""
    mix: MixConfig = MixConfig()
    """Whether stored rollouts are trained on beside them."""
    staleness: StalenessConfig = StalenessConfig()
    """The bound, and what happens beyond it."""
    group_deadline: GroupDeadline = RefillConfig()
    """What happens to a group whose last members do not come."""
    capacity: CapacityConfig = CapacityConfig()
    """When to stop admitting prompts."""
    archive: ArchiveConfig = ArchiveConfig()
    """Where groups go that are over."""
    claim_lease_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time a learner has to commit a claim or renew it, seconds."""
    max_attempts: Annotated[int, Meta(ge=1)] = 5
    """Claims (or leases) of one group before it is put into quarantine."""
    patience_s: Annotated[float, Meta(gt=0)] = 60.0
    """How long a role goes on trying when the store does not answer (while it restarts), seconds."""
