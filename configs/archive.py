"""The archive: what is kept of groups that are over."""

from typing import Annotated

from msgspec import Meta

from configs.base import Config


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
