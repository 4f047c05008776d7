"""Settings of the replay buffer: store, limits, deadlines, and group selection."""

from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, Positive, require, require_folder


# --- the store -------------------------------------------------------------------------------------------------------
class EmbeddedRedisConfig(Config, tag="embedded", tag_field="kind"):
    """A Redis server owned by the run, on a Unix socket, with its data in the run folder."""

    durability: Literal["fast", "standard", "strict"] = "standard"
    """`fast`: no data on disk; always used if all roles run in one process, which cannot be resumed. `standard`:
    written before every answer, synced to disk every second. `strict`: synced before every answer."""
    max_memory_mib: Annotated[int, Meta(ge=16)] = 1024
    """Memory limit above which the server rejects writes (it never evicts), MiB."""


STORE_PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
"""Not a setting: those appear in logs, command lines, and run folders."""


class RedisConfig(Config, tag="redis", tag_field="kind"):
    """An external Redis or Valkey server."""

    url: str
    """`redis://HOST:PORT/DB`, `rediss://` (TLS), or `unix://`, with a user if required (`rediss://USER@HOST`). The
    password comes from the environment variable `SLIPSTREAM_REDIS_PASSWORD`."""
    tls_ca_file: str | None = None
    """PEM file of the certificate authorities trusted for a `rediss://` server; null = those of the system."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise ConfigError(f"buffer.store.url must be an address, got one that cannot be read: {error}.") from None
        is_fit = parts.password is None and "password" not in parse_qs(parts.query)
        # Without user and query, which may be secret.
        got = f"one for {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        why = f"settings are logged and saved; set {STORE_PASSWORD_VARIABLE} instead"
        require(is_fit, "buffer.store.url", "not contain a password", got=got, why=why)
        is_fit, must = self.tls_ca_file is None or parts.scheme == "rediss", "be null without a rediss:// address"
        got = f"{self.tls_ca_file!r} with {parts.scheme}://"
        require(is_fit, "buffer.store.tls_ca_file", must, got=got, why="nothing would be verified")


class ArchiveConfig(Config):
    """The archive: finished groups move from the store to Parquet shards in the run folder."""

    max_gib: Annotated[float, Meta(ge=0)] = 100.0
    """Maximum archive size, GiB. When reached, finished groups are deleted instead of archived, and `status` reports
    it; 0 = no archive."""

    @property
    def is_enabled(self) -> bool:
        return self.max_gib > 0


# --- groups with missing members -------------------------------------------------------------------------------------
class RefillConfig(Config, tag="refill", tag_field="kind"):
    """A group waits for all members; its prompt is leased again, up to five times."""


class TrainShortConfig(Config, tag="train_short", tag_field="kind"):
    """A group becomes ready without its missing members."""

    after_s: Positive = 60.0
    """Deadline after the arrival of the first member, seconds."""
    min_members: Annotated[int, Meta(ge=2)] = 2
    """Sampled members needed at the deadline; with fewer, a group keeps waiting."""


class DropShortConfig(Config, tag="drop", tag_field="kind"):
    """An incomplete group expires, and another prompt is admitted for it."""

    after_s: Positive = 60.0
    """Deadline after the arrival of the first member, seconds."""


GroupDeadline = RefillConfig | TrainShortConfig | DropShortConfig


# --- the order of groups ---------------------------------------------------------------------------------------------
class FifoConfig(Config, tag="fifo", tag_field="kind"):
    """Oldest ready group first."""


class FreshestConfig(Config, tag="freshest", tag_field="kind"):
    """Groups in descending order of the version of their oldest token."""


class UniformConfig(Config, tag="uniform", tag_field="kind"):
    """Every ready group with the same probability, seeded by the run seed and the step."""


class PrioritizedConfig(Config, tag="prioritized", tag_field="kind"):
    """Groups with probability proportional to priority ** exponent, and an importance weight on their loss.

    Source: Schaul et al., Prioritized Experience Replay, arXiv:1511.05952, section 3.3-3.4.
    Differs: the priority is the standard deviation of a group's rewards, rounded to powers of two from 1/256 up, so
    groups with equal rewards are rare but never starve. Weights are exact for sampling without replacement, and not
    divided by their maximum: the expected gradient equals that of a uniform sample.
    """

    exponent: Annotated[float, Meta(ge=0, le=4)] = 0.6
    """Exponent of the priority; 0 = uniform."""


SamplerConfig = FifoConfig | FreshestConfig | UniformConfig | PrioritizedConfig


# --- filters of groups without a signal ------------------------------------------------------------------------------
class KeepAllConfig(Config, tag="none", tag_field="kind"):
    """Keeps every complete group."""


KEEP_ALL = KeepAllConfig()


class ZeroAdvantageConfig(Config, tag="zero_advantage", tag_field="kind"):
    """Rejects groups with equal rewards: compared with each other, they have no advantage.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    Differs: compares rewards instead of correctness, and judges a group when its last member arrives, so that its
    replacement starts early.
    """


class AccuracyConfig(Config, tag="accuracy", tag_field="kind"):
    """Rejects groups unless their fraction of correct answers is strictly between two bounds.

    min_accuracy < correct / answered < max_accuracy

    Source: DAPO, arXiv:2503.14476, eq. 11, with bounds of 0 and 1.
    """

    min_accuracy: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Lower bound of the fraction, exclusive; 0 = reject groups with only wrong answers."""
    max_accuracy: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Upper bound of the fraction, exclusive; 1 = reject groups with only correct answers."""

    def __post_init__(self) -> None:
        low, must = self.min_accuracy, f"be < buffer.filter.max_accuracy ({self.max_accuracy:g})"
        why = "every group would be rejected"
        require(low < self.max_accuracy, "buffer.filter.min_accuracy", must, got=low, why=why)


FilterConfig = KeepAllConfig | ZeroAdvantageConfig | AccuracyConfig


# --- reuse and staleness ---------------------------------------------------------------------------------------------
class ReuseConfig(Config):
    """Training on a group more than once."""

    max_uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Steps that may train on one group; 1 = no reuse."""
    fresh_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Fraction of a step's groups that were never trained on, if enough are ready; used groups fill the rest."""
    samples_per_insert: Annotated[float, Meta(ge=1)] | None = None
    """Limit of uses per arrived group, averaged over the run; null = only `max_uses` applies."""
    max_age: Annotated[int, Meta(ge=1)] | None = None
    """Lag above which a group is not reused, versions; null = no limit."""
    max_groups: Annotated[int, Meta(ge=1)] = 4096
    """Groups kept for reuse; beyond it, those that became ready first are released."""

    def __post_init__(self) -> None:
        fresh, must = self.fresh_fraction, f"be >= 1 / max_uses ({1 / self.max_uses:.3g})"
        why = f"to fill the steps, each group would have to be used {1 / fresh:.3g} times on average"
        require(1 / fresh <= self.max_uses, "buffer.reuse.fresh_fraction", must, got=fresh, why=why)


class StalenessConfig(Config):
    """Bound on the age of trained tokens."""

    max_lag: Annotated[int, Meta(ge=0)] = 4
    """Maximum age of a trained token, in versions of the policy; 0 = synchronous and on-policy. Larger values hide
    slower generation, but make training more off-policy."""
    on_stale: Literal["mask", "drop"] = "mask"
    """Tokens beyond the bound. `mask`: they leave the loss, but their reward stays in the baseline of the group.
    `drop`: a ready group with such a token expires, and another prompt is admitted for it."""
    target_lag: Annotated[float, Meta(ge=0)] | Literal["auto"] = "auto"
    """Mean lag for which pacing admits prompts, versions, at most `max_lag`. `auto`: the lowest at which the learner
    hardly waits for groups, adjusted during the run (with `mode=serial`, `max_lag`)."""

    def __post_init__(self) -> None:
        lag, why = self.target_lag, "groups would be admitted that are stale by the time they are trained on"
        is_fit, must = lag == "auto" or lag <= self.max_lag, f"be <= max_lag ({self.max_lag})"
        require(is_fit, "staleness.target_lag", must, got=lag, why=why)

    @property
    def window(self) -> float:
        """Largest number of groups that are generated or waiting, in versions' worth."""
        return (self.max_lag if self.target_lag == "auto" else self.target_lag) + 1


class ReplayMixConfig(Config):
    """Training on stored rollouts of another run in addition to new ones."""

    archive: str = ""
    """Folder of the archive; empty = none."""
    fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Fraction of a step's groups taken from it, sampled uniformly."""

    def __post_init__(self) -> None:
        require_folder("replay_mix.archive", self.archive)


class BufferConfig(Config):
    """The store, and the selection of groups for a step."""

    store: EmbeddedRedisConfig | RedisConfig = EmbeddedRedisConfig()
    """Store of all state that must survive a crash."""
    sampler: SamplerConfig = FifoConfig()
    """Order in which ready groups are claimed."""
    filter: FilterConfig = KEEP_ALL
    """Complete groups to reject before training; another prompt is admitted for each."""
    reuse: ReuseConfig = ReuseConfig()
    """Training on groups more than once."""
    group_deadline: GroupDeadline = RefillConfig()
    """Handling of groups with missing members."""
    archive: ArchiveConfig = ArchiveConfig()
    """Archive of finished groups."""
