"""Replay buffer settings: the store, capacity and deadlines, and which groups a step trains on."""

from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, require_folder


# --- the store -------------------------------------------------------------------------------------------------------
class EmbeddedRedisConfig(Config, tag="embedded", tag_field="kind"):
    """A Redis server of the run's own, on a unix socket, with its data in the run folder."""

    durability: Literal["fast", "standard", "strict"] = "standard"
    """`fast`: nothing on disk, as always where all roles run in one process, which is not resumed. `standard`: written
    before every answer, synced to disk every second. `strict`: synced before every answer."""
    max_memory_mib: Annotated[int, Meta(ge=16)] = 1024
    """Limit above which the server refuses writes (it never evicts), MiB."""


STORE_PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
"""Environment variable, because a password in the config would end up in logs, command lines and run folders."""


class RedisConfig(Config, tag="redis", tag_field="kind"):
    """A Redis or Valkey server that is run by somebody else."""

    url: str
    """`redis://HOST:PORT/DB`, `rediss://` (TLS) or `unix://`, with its user where it has one (`rediss://USER@HOST`);
    the password comes from the environment, `SLIPSTREAM_REDIS_PASSWORD`."""
    tls_ca_file: str | None = None
    """PEM file of the authorities that may vouch for a `rediss://` server; null: those of the system."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise ConfigError(f"buffer.store.url must be an address, got one that cannot be read: {error}.") from None
        if parts.password is not None or "password" in parse_qs(parts.query):
            # The address without what may be secret: user and query.
            shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            raise ConfigError(
                f"buffer.store.url must hold no password, got one for {shown}: settings are logged and written down; "
                f"set {STORE_PASSWORD_VARIABLE} to it."
            )
        if self.tls_ca_file is not None and parts.scheme != "rediss":
            raise ConfigError(
                f"buffer.store.tls_ca_file must be null unless buffer.store.url is a rediss:// address, got "
                f"{self.tls_ca_file!r} with {parts.scheme}://: nothing would be verified."
            )


class CapacityConfig(Config):
    """Limits of the store; at a limit no prompt is admitted until groups are over."""

    max_groups: Annotated[int, Meta(ge=1)] | None = None
    """Groups admitted and not over (running, buffered, used, not yet archived); null = as many as pacing admits."""
    max_mib: Annotated[int, Meta(ge=1)] | None = None
    """Encoded trajectories, MiB; prompts in flight still add to it. null = the server's limit."""


class ArchiveConfig(Config):
    """The archive: groups that are over move from the store to Parquet shards in the run folder."""

    enabled: bool = True
    """Whether groups that are over are archived; otherwise they are deleted."""
    groups_per_shard: Annotated[int, Meta(ge=1)] = 1024
    """Number of waiting groups at which a shard is written."""
    flush_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest wait of a group for its shard to fill up, seconds."""
    max_gib: Annotated[float, Meta(gt=0)] = 100.0
    """Size from which on groups leave the store without being archived, GiB; `status` says so."""


# --- groups whose last members do not arrive -------------------------------------------------------------------------
class RefillConfig(Config, tag="refill", tag_field="kind"):
    """A group waits for all of its members; its prompt is leased again, up to `max_attempts` times."""


class TrainShortConfig(Config, tag="train_short", tag_field="kind"):
    """A group becomes ready without its missing members."""

    after_s: Annotated[float, Meta(gt=0)] = 60.0
    """Deadline, seconds since the first member arrived."""
    min_members: Annotated[int, Meta(ge=2)] = 2
    """Sampled members a group needs at the deadline; with fewer it goes on waiting."""


class DropShortConfig(Config, tag="drop", tag_field="kind"):
    """A group short of members expires, and another prompt is admitted for it."""

    after_s: Annotated[float, Meta(gt=0)] = 60.0
    """Deadline, seconds since the first member arrived."""


GroupDeadline = RefillConfig | TrainShortConfig | DropShortConfig


# --- the order of groups ---------------------------------------------------------------------------------------------
class FifoConfig(Config, tag="fifo", tag_field="kind"):
    """Oldest ready group first."""


class FreshestConfig(Config, tag="freshest", tag_field="kind"):
    """Groups in descending order of the version of their oldest token."""


class UniformConfig(Config, tag="uniform", tag_field="kind"):
    """Every ready group with the same probability, seeded by the run's seed and the step."""


class PrioritizedConfig(Config, tag="prioritized", tag_field="kind"):
    """Groups with probability proportional to priority ** exponent, and an importance weight on their loss.

    Source: Schaul et al., Prioritized Experience Replay, arXiv:1511.05952, section 3.3-3.4.
    Differs: the priority is the standard deviation of a group's rewards, in steps of powers of two from 1/256 up, so
    that a group whose rewards are all equal is rare but never starves. Weights are those of sampling without
    replacement, and are not divided by the largest: with `correction=1` the expected gradient is that of a uniform
    sample.
    """

    exponent: Annotated[float, Meta(ge=0, le=4)] = 0.6
    """Exponent of the priority; 0 = uniform."""
    correction: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Weight is (groups sampled / (ready groups * inclusion probability)) ** correction; 0 = no weights."""


SamplerConfig = FifoConfig | FreshestConfig | UniformConfig | PrioritizedConfig


# --- groups that teach nothing ---------------------------------------------------------------------------------------
class KeepAllConfig(Config, tag="none", tag_field="kind"):
    """Every complete group may be trained on."""


KEEP_ALL = KeepAllConfig()
"""Default of a store that is opened without a filter."""


class ZeroSignalConfig(Config, tag="zero_signal", tag_field="kind"):
    """Rejects groups whose rewards are all alike: compared with each other, they give no advantage.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    Differs: compares rewards instead of right and wrong, and judges each group when its last member arrives: another
    prompt replaces it at once, while the groups of the step are still coming in.
    """

    min_spread: Annotated[float, Meta(gt=0)] = 1e-6
    """Greatest minus least reward that a group must have; the reward of its greedy baseline is one of them."""


class AccuracyConfig(Config, tag="accuracy", tag_field="kind"):
    """Rejects groups whose share of right answers is not strictly between two bounds.

    above < right / answered < below

    Source: DAPO, arXiv:2503.14476, eq. 11, with bounds of 0 and 1.
    """

    above: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Lower bound of the share, exclusive; 0 = reject groups that are all wrong."""
    below: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Upper bound of the share, exclusive; 1 = reject groups that are all right."""

    def __post_init__(self) -> None:
        if self.above >= self.below:
            raise ConfigError(
                f"buffer.filter.above must be < buffer.filter.below ({self.below:g}), got {self.above:g}: every group "
                "would be rejected."
            )


FilterConfig = KeepAllConfig | ZeroSignalConfig | AccuracyConfig


# --- reuse and staleness ---------------------------------------------------------------------------------------------
class ReuseConfig(Config):
    """Training on a group more than once."""

    max_uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Steps that may train on one group; 1 = no reuse."""
    fresh_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a step's groups that were never trained on, while enough are ready; used groups fill the rest."""
    samples_per_insert: Annotated[float, Meta(ge=1)] | None = None
    """Limit of uses per group that arrived, on average over the run; null = `max_uses` alone bounds them."""
    max_age: Annotated[int, Meta(ge=1)] | None = None
    """Lag beyond which a group is not used again, versions; null = no limit."""
    max_groups: Annotated[int, Meta(ge=1)] = 4096
    """Groups kept for reuse; above it, those that became ready first are released."""

    def __post_init__(self) -> None:
        if 1 / self.fresh_fraction > self.max_uses:
            raise ConfigError(
                f"buffer.reuse.fresh_fraction must be >= 1 / max_uses ({1 / self.max_uses:.3g}), got "
                f"{self.fresh_fraction:g}: each group would have to be used {1 / self.fresh_fraction:.3g} times on "
                f"average to fill the steps, and {self.max_uses} is the most."
            )


class StalenessConfig(Config):
    """Bound on the age of the tokens trained on."""

    max_lag: Annotated[int, Meta(ge=0)] = 4
    """Versions between the learner's and the one that sampled the token; 0 = synchronous."""
    on_stale: Literal["mask", "drop"] = "mask"
    """Treatment of tokens beyond the bound. mask: they leave the loss; the trajectory's reward stays in the baseline of
    its group. drop: a ready group with such a token expires, and another prompt is admitted for it."""
    pacing_lag: Annotated[float, Meta(ge=0)] | None = None
    """Mean lag that pacing admits prompts for, versions, at most `max_lag`; null = `max_lag`. Lower it where answers
    differ much in length: `learner/stale_fraction` falls, and so does the number of groups generated at a time."""

    def __post_init__(self) -> None:
        if self.pacing_lag is not None and self.pacing_lag > self.max_lag:
            raise ConfigError(
                f"buffer.staleness.pacing_lag must be <= max_lag ({self.max_lag}), got {self.pacing_lag:g}: groups "
                "would be admitted that are stale when they are trained on."
            )

    @property
    def window(self) -> float:
        """Versions' worth of groups that may be generated or wait at a time."""
        return (self.max_lag if self.pacing_lag is None else self.pacing_lag) + 1


class MixConfig(Config):
    """Training on stored rollouts of another run beside this run's own."""

    archive: str = ""
    """Folder of the archive; empty: none."""
    fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of a step's groups that come from it, sampled uniformly by the run's seed and the step."""

    def __post_init__(self) -> None:
        require_folder("buffer.mix.archive", self.archive)


class BufferConfig(Config):
    """The store, and the selection of the groups that a step trains on."""

    store: EmbeddedRedisConfig | RedisConfig = EmbeddedRedisConfig()
    """Store of all state that must survive."""
    sampler: SamplerConfig = FifoConfig()
    """Order in which ready groups are claimed."""
    filter: FilterConfig = KEEP_ALL
    """Complete groups to reject before the learner sees them; another prompt is admitted for each."""
    reuse: ReuseConfig = ReuseConfig()
    """Training on groups more than once."""
    mix: MixConfig = MixConfig()
    """Stored rollouts of another run."""
    staleness: StalenessConfig = StalenessConfig()
    """Bound on the age of tokens."""
    group_deadline: GroupDeadline = RefillConfig()
    """Handling of groups whose last members do not arrive."""
    capacity: CapacityConfig = CapacityConfig()
    """Limits at which admission stops."""
    archive: ArchiveConfig = ArchiveConfig()
    """Archive of groups that are over."""
    claim_lease_s: Annotated[float, Meta(gt=0)] = 120.0
    """Lease of a claim: the learner commits or renews it within this time, seconds."""
    max_attempts: Annotated[int, Meta(ge=1)] = 5
    """Claims (or leases) of one group before it goes to quarantine."""
    retry_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time for which a role repeats operations that the store does not answer, while it restarts, seconds."""
