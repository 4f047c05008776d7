"""RunConfig: all settings of a run, one field per role, and the checks that span roles."""

from math import ceil
from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.advantages import WITH_OWN_BASELINE, RemaxConfig
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.base import Config, ConfigError
from slipstream.configs.broker import BROKER_SILENCE_S, BrokerConfig, WeightsConfig
from slipstream.configs.buffer import AccuracyConfig, BufferConfig, MemoryStoreConfig, ZeroSignalConfig
from slipstream.configs.data import DataConfig, ModelConfig, PrepareStep, ReplayConfig, SftConfig
from slipstream.configs.generators import GeneratorsConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, EvaluationConfig, LearnerConfig


class RunConfig(Config):
    """All settings of a run, one field per role."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,80}$")]
    """Name of the run folder and prefix of the run's keys in the store."""
    model: ModelConfig
    data: DataConfig
    mode: Literal["async", "serial", "replay", "sft"] = "async"
    """`async`: one process per role. `serial`: all roles in one process, one call after the other. `replay`: like
    `serial`, trained from an archive. `sft`: the learner alone, supervised."""
    replay: ReplayConfig = ReplayConfig()
    sft: SftConfig = SftConfig()
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of every random choice of the run."""
    runs_dir: str = "runs"
    """Parent of the run folder."""
    resume: bool = False
    """Continue from the newest checkpoint of the run of this name; without it a name that is taken is refused."""
    prepare: list[PrepareStep] = []
    """Commands that create missing inputs before the roles start, in this order."""
    generators: GeneratorsConfig = GeneratorsConfig()
    broker: BrokerConfig = BrokerConfig()
    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def __post_init__(self) -> None:
        for check in _LEARNER_CHECKS if self.mode == "sft" else (*_LEARNER_CHECKS, *_ROLE_CHECKS):
            check(self)

    @property
    def is_one_process(self) -> bool:
        """Whether all roles run in one process."""
        return self.mode in ("serial", "replay")

    @property
    def mixed_groups_per_step(self) -> int:
        """Groups of a step that come from the archive of another run."""
        mix = self.buffer.mix
        return round(mix.fraction * self.learner.groups_per_step) if mix.archive else 0

    @property
    def claimed_groups_per_step(self) -> int:
        """Groups of a step that come from the store."""
        return self.learner.groups_per_step - self.mixed_groups_per_step

    @property
    def groups_per_version(self) -> int:
        """Groups claimed between two publishes."""
        return self.claimed_groups_per_step * self.weights.publish_every_steps


def _check_lengths(run: RunConfig) -> None:
    longest = run.data.max_prompt_tokens + run.generators.sampling.max_tokens
    if longest > run.model.max_length:
        raise ConfigError(
            f"model.max_length must be >= data.max_prompt_tokens + generators.sampling.max_tokens ({longest}), "
            f"got {run.model.max_length}: a full prompt with a full response would not fit."
        )


def _check_microbatch(run: RunConfig) -> None:
    if run.learner.tokens_per_microbatch < run.model.max_length:
        raise ConfigError(
            f"learner.tokens_per_microbatch must be >= model.max_length ({run.model.max_length}), "
            f"got {run.learner.tokens_per_microbatch}: the longest trajectory would not fit into any microbatch."
        )


def _check_batch_divides(run: RunConfig) -> None:
    updates, ranks = run.algorithm.updates_per_step, run.learner.num_ranks
    if run.learner.groups_per_step % updates:
        raise ConfigError(
            f"learner.groups_per_step must be divisible by algorithm.updates_per_step ({updates}), "
            f"got {run.learner.groups_per_step}: the optimizer updates of a step would see unequal batches."
        )
    trajectories = run.learner.groups_per_step // updates * run.generators.group_size
    if trajectories % ranks:
        raise ConfigError(
            f"the trajectories of one optimizer update ({trajectories} = learner.groups_per_step / "
            f"algorithm.updates_per_step x generators.group_size) must be divisible by learner.num_ranks, got {ranks}."
        )


def _check_advantage_has_a_baseline(run: RunConfig) -> None:
    advantage = run.algorithm.advantage
    if run.generators.group_size == 1 and not isinstance(advantage, WITH_OWN_BASELINE):
        raise ConfigError(
            f"generators.group_size must be >= 2 for algorithm.advantage={advantage.__struct_config__.tag}, got 1: a "
            "group of one has no baseline and every advantage would be zero; moving_baseline is made for it."
        )
    if isinstance(advantage, RemaxConfig) and run.generators.baseline != "greedy":
        raise ConfigError(
            f"generators.baseline must be greedy for algorithm.advantage=remax, got {run.generators.baseline}: its "
            "baseline is the reward of a greedy answer to each prompt."
        )


def _check_serial(run: RunConfig) -> None:
    if run.mode == "serial" and run.learner.num_ranks != 1:
        raise ConfigError(f"mode=serial runs one learner rank, got learner.num_ranks={run.learner.num_ranks}.")
    if run.is_one_process != isinstance(run.buffer.store, MemoryStoreConfig):
        raise ConfigError(
            "buffer/store=memory goes with mode=serial or replay and no other mode: a process cannot see its state."
        )
    if run.is_one_process != (run.weights.transport == "memory"):
        raise ConfigError("weights.transport=memory goes with mode=serial or replay and no other mode.")


def _check_replay(run: RunConfig) -> None:
    if (run.mode == "replay") != bool(run.replay.path):
        raise ConfigError(
            f"mode=replay needs replay.path, the archive folder to train from, and no other mode has one, got "
            f"mode={run.mode} with replay.path={run.replay.path!r}: name one, such as runs/digits_cpu/archive."
        )


def _check_sft(run: RunConfig) -> None:
    if (run.mode == "sft") != bool(run.sft.train_path):
        raise ConfigError(
            f"mode=sft needs sft.train_path, the Parquet file of demonstrations to learn from, and no other mode has "
            f"one, got mode={run.mode} with sft.train_path={run.sft.train_path!r}."
        )


def _check_concurrency(run: RunConfig) -> None:
    most, size = run.generators.max_concurrency, run.generators.members_per_group
    if most < size:
        raise ConfigError(
            f"generators.max_concurrency must be >= {size}, the trajectories of one group (generators.group_size, and "
            f"one more with generators.baseline=greedy), got {most}: no generator could ever ask for a prompt."
        )


def _check_autoscale(run: RunConfig) -> None:
    scale, count = run.generators.autoscale, run.generators.count
    if scale and not scale.min <= count <= scale.max:
        raise ConfigError(
            f"generators.count must lie between generators.autoscale.min and max ({scale.min} to {scale.max}), "
            f"got {count}: it is where the run begins."
        )


def _check_mix(run: RunConfig) -> None:
    mix, per_step = run.buffer.mix, run.learner.groups_per_step
    if mix.archive and not 0 < run.mixed_groups_per_step < per_step:
        raise ConfigError(
            f"buffer.mix.fraction must leave at least one group of a step to each side, got {mix.fraction:g} of "
            f"learner.groups_per_step={per_step}: {run.mixed_groups_per_step} would come from the archive."
        )


def _check_samples_per_insert(run: RunConfig) -> None:
    reuse, per_step = run.buffer.reuse, run.claimed_groups_per_step
    fresh = ceil(reuse.fresh_fraction * per_step)
    if reuse.samples_per_insert is not None and per_step / fresh > reuse.samples_per_insert:
        raise ConfigError(
            f"buffer.reuse.samples_per_insert must be >= groups of a step / fresh groups of a step ({per_step} / "
            f"{fresh} = {per_step / fresh:.3g}), got {reuse.samples_per_insert:g}: pacing admits one prompt for each "
            "fresh group that is trained on, so uses would outrun arrivals and the learner would wait for ever; raise "
            "it, or raise buffer.reuse.fresh_fraction."
        )


def _check_filter(run: RunConfig) -> None:
    """Some group must be able to pass, or the learner would wait for ever."""
    chosen, size = run.buffer.filter, run.generators.group_size
    if isinstance(chosen, ZeroSignalConfig) and run.generators.members_per_group < 2:
        raise ConfigError(
            f"generators.group_size must be >= 2 for buffer/filter=zero_signal, got {size}: a single reward differs "
            "from no other, and every group would be rejected."
        )
    if isinstance(chosen, ZeroSignalConfig) and (learns_from := run.algorithm.signal_beside_rewards):
        raise ConfigError(
            f"buffer/filter=zero_signal rejects groups of equal rewards, got {learns_from}, which such groups do "
            "teach: choose buffer/filter=none or accuracy."
        )
    if isinstance(chosen, AccuracyConfig) and not any(
        chosen.above < right / size < chosen.below for right in range(size + 1)
    ):
        raise ConfigError(
            f"buffer.filter must let through at least one share of right answers in generators.group_size={size}, got "
            f"above={chosen.above:g} and below={chosen.below:g}: every group would be rejected."
        )


def _check_capacity(run: RunConfig) -> None:
    """A step's groups and those that no checkpoint covers yet must fit, or nobody can go on."""
    most, per_step = run.buffer.capacity.max_groups, run.claimed_groups_per_step
    uncovered = run.learner.checkpoint.every_steps * per_step
    kept = run.buffer.reuse.max_groups if run.buffer.reuse.max_uses > 1 else 0
    if most is not None and most < uncovered + kept + per_step:
        raise ConfigError(
            f"buffer.capacity.max_groups must be >= {uncovered + kept + per_step} = {uncovered} used groups that wait "
            f"for a checkpoint (learner.checkpoint.every_steps x {per_step}) + {kept} kept for reuse + {per_step} for "
            f"the next step, got {most}: the store would be full and the learner would wait for ever."
        )


def _check_checkpoint(run: RunConfig) -> None:
    """A run resumed within a version would count what trained it twice: to its version, and to the next one."""
    every, per_version = run.learner.checkpoint.every_steps, run.weights.publish_every_steps
    if every % per_version:
        raise ConfigError(
            f"learner.checkpoint.every_steps must be a multiple of weights.publish_every_steps={per_version}, got "
            f"{every}: a checkpoint stands at the end of a policy version."
        )


def _check_sharding(run: RunConfig) -> None:
    if not isinstance(run.learner.engine, DeepSpeedEngineConfig) and run.learner.num_ranks > 1:
        raise ConfigError(
            f"learner/engine=torch runs one rank, got learner.num_ranks={run.learner.num_ranks}: "
            "choose learner/engine=deepspeed."
        )


def _check_peer_patience(run: RunConfig) -> None:
    broker = run.broker
    if broker.peer_timeout_s < 2 * broker.heartbeat_s:
        raise ConfigError(
            f"broker.peer_timeout_s must be >= 2 x broker.heartbeat_s ({2 * broker.heartbeat_s}), "
            f"got {broker.peer_timeout_s}: one late ping would count as a death."
        )
    if broker.heartbeat_s > BROKER_SILENCE_S / 2:
        raise ConfigError(
            f"broker.heartbeat_s must be <= {BROKER_SILENCE_S / 2:g}, half of the silence after which a peer connects "
            f"anew, got {broker.heartbeat_s:g}: a role with nothing to say would drop its connection again and again."
        )
    if broker.lease_s < 3 * broker.heartbeat_s:
        raise ConfigError(
            f"broker.lease_s must be >= 3 x broker.heartbeat_s ({3 * broker.heartbeat_s:g}), got {broker.lease_s:g}: "
            "pings renew leases, and those of a generator that is well would lapse in between."
        )


_LEARNER_CHECKS = (_check_microbatch, _check_sharding, _check_replay, _check_sft)
"""Of every mode."""
_ROLE_CHECKS = (
    _check_lengths,
    _check_batch_divides,
    _check_advantage_has_a_baseline,
    _check_serial,
    _check_mix,
    _check_concurrency,
    _check_autoscale,
    _check_samples_per_insert,
    _check_filter,
    _check_capacity,
    _check_checkpoint,
    _check_peer_patience,
)
"""Of the modes in which a learner has generators."""
