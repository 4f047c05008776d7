"""RunConfig: all settings of a run, and the checks that span roles."""

import re
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.algorithm_terms import RemaxConfig
from slipstream.configs.base import Config, ConfigError, require, require_storage
from slipstream.configs.broker import BrokerConfig, LoggingConfig, MetricsConfig, WeightsConfig
from slipstream.configs.buffer import (
    AccuracyConfig,
    BufferConfig,
    RedisConfig,
    ReplayMixConfig,
    StalenessConfig,
    ZeroAdvantageConfig,
)
from slipstream.configs.cluster import PORTS, ClusterConfig
from slipstream.configs.data import DataConfig, ModelConfig, PrepareStep, ReplayConfig, SftConfig
from slipstream.configs.engines import VllmEngineConfig
from slipstream.configs.generators import GeneratorsConfig, SingleTurnConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, EvaluationConfig, LearnerConfig, ProfileConfig

NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}\Z"
"""Excludes `.`, `..`, and separators, because the name becomes a folder."""


class StorageConfig(Config):
    """Copy of a run in an object store."""

    uri: str | None = None
    """Object store for checkpoints, archive, and models: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, or
    `file:///FOLDER`. Credentials come from the environment. null = keep everything in the run folder."""


class RunConfig(Config):
    """All settings of a run."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    """Name of the run folder and prefix of its keys in the store: up to 80 of `A-Z a-z 0-9 . _ -`, not starting with a
    dot."""
    model: ModelConfig
    data: DataConfig
    mode: Literal["async", "evaluate", "serial", "replay", "sft"] = "async"
    """`async`: one process per role. `evaluate`: like `async`, but ends after the evaluation before training. `serial`:
    all roles in one process, one call at a time. `replay`: like `serial`, training on an archive. `sft`: supervised,
    only the learner."""
    replay: ReplayConfig = ReplayConfig()
    sft: SftConfig = SftConfig()
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of all random choices of the run."""
    runs_dir: str = "runs"
    """Parent of the run folder."""
    storage: StorageConfig = StorageConfig()
    resume: bool | Literal["auto"] = False
    """`true`: continue the run with this name from its newest checkpoint, which must exist. `false`: the name must be
    unused, or belong to a run that ended before publishing weights. `auto`: continue the run if it exists, otherwise
    start it."""
    prepare: list[PrepareStep] = []
    """Commands that create missing inputs before the roles start, in order."""
    generators: GeneratorsConfig = GeneratorsConfig()
    cluster: ClusterConfig = ClusterConfig()
    broker: BrokerConfig = BrokerConfig()
    buffer: BufferConfig = BufferConfig()
    staleness: StalenessConfig = StalenessConfig()
    replay_mix: ReplayMixConfig = ReplayMixConfig()
    weights: WeightsConfig = WeightsConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    profile: ProfileConfig = ProfileConfig()
    logging: LoggingConfig = LoggingConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        require_storage("storage.uri", self.storage.uri, is_fit=not self.is_one_process)
        for check in _LEARNER_CHECKS if self.mode == "sft" else (*_LEARNER_CHECKS, *_ROLE_CHECKS):
            check(self)

    @property
    def has_roles(self) -> bool:
        """Whether each role is a process, and generators are some of them."""
        return self.mode in ("async", "evaluate")

    @property
    def is_one_process(self) -> bool:
        return self.mode in ("serial", "replay")

    @property
    def learner_gpus(self) -> int:
        """GPUs to reserve on each machine of the learner."""
        return self.learner.num_ranks // self.cluster.learner.machines if self.learner.device == "cuda" else 0

    @property
    def generator_gpus(self) -> int:
        """GPUs to reserve for each generator."""
        return getattr(self.generators.engine, "num_workers", 1) if self.learner.device == "cuda" else 0

    @property
    def metrics_host(self) -> str:
        """Address of the exporter: any, if other machines can reach the run."""
        return "0.0.0.0" if self.cluster.is_open else "127.0.0.1"

    @property
    def profile_lead_steps(self) -> int:
        """Steps before a recorded one in which its trajectories may be leased."""
        return (self.staleness.max_lag + 1) * self.weights.publish_every_steps

    @property
    def trains_reward_model(self) -> bool:
        return self.mode == "sft" and self.sft.objective == "pairs"

    @property
    def mixed_groups_per_step(self) -> int:
        """Groups of a step taken from the archive of another run."""
        mix = self.replay_mix
        return round(mix.fraction * self.learner.prompts_per_step) if mix.archive else 0

    @property
    def claimed_groups_per_step(self) -> int:
        """Groups of a step taken from the store."""
        return self.learner.prompts_per_step - self.mixed_groups_per_step

    @property
    def has_baseline(self) -> bool:
        """Whether the last member of each group is greedy."""
        return isinstance(self.algorithm.advantage, RemaxConfig)

    @property
    def members_per_group(self) -> int:
        """Sampled members of a group, plus the greedy one if present."""
        return self.generators.group_size + self.has_baseline

    @property
    def groups_per_version(self) -> int:
        """Groups claimed between two publishes."""
        return self.claimed_groups_per_step * self.weights.publish_every_steps


_NO_ROOM = "a full prompt with a full response would not fit"


def read_config(folder: Path) -> RunConfig:
    """Read a run folder's configuration. Raises ConfigError."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a run folder, but has no config.yaml: pass one such as runs/digits_cpu.")
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=RunConfig)
    except ValueError as error:
        problem = " ".join(str(error).split())
        must = f"{path} must be a run configuration of this version of Slipstream"
        raise ConfigError(f"{must}, got {problem}: restore it, or use the version that started the run.") from None


def _check_bounds(run: RunConfig) -> None:
    longest, own = run.model.max_length, run.data.max_prompt_tokens + run.generators.sampling.max_tokens
    must = f"be >= data.max_prompt_tokens + generators.sampling.max_tokens ({own})"
    require(longest >= own, "model.max_length", must, got=longest, why=_NO_ROOM)
    most, own = run.generators.max_concurrency, run.members_per_group
    why = (
        "no generator could ever request a prompt for a group (group_size, and one more with algorithm/advantage=remax)"
    )
    require(most >= own, "generators.max_concurrency", f"be >= the members of a group ({own})", got=most, why=why)
    groups, updates = run.learner.prompts_per_step, run.algorithm.updates_per_step
    must = f"be a multiple of algorithm.updates_per_step ({updates})"
    why = "the optimizer updates of a step would see unequal batches"
    require(groups % updates == 0, "learner.prompts_per_step", must, got=groups, why=why)
    buffer, tokens = run.algorithm.reward.overlong_buffer, run.generators.sampling.max_tokens
    must, why = f"be < generators.sampling.max_tokens ({tokens})", "every response would be penalized"
    require(buffer is None or buffer < tokens, "algorithm.reward.overlong_buffer", must, got=buffer, why=why)
    every, publish = run.learner.checkpoint.every_steps, run.weights.publish_every_steps
    # A run resumed within a version would count its steps twice.
    must, why = f"be a multiple of weights.publish_every_steps ({publish})", "a checkpoint covers whole policy versions"
    require(every % publish == 0, "learner.checkpoint.every_steps", must, got=every, why=why)


def _check_heldout(run: RunConfig) -> None:
    names, best = [each.name for each in run.data.eval_sets], run.learner.checkpoint.best
    asked = {"evaluation.stop": run.evaluation.stop or [], "evaluation.goals": run.evaluation.goals}
    ends = tuple(f"_{name}" for name in names)
    named = {key: [each.metric for each in bounds] for key, bounds in asked.items()}
    for key, metrics in (named | {"learner.checkpoint.best": [best] if best else []}).items():
        unknown = next((each for each in metrics if not (each.startswith("eval/") and each.endswith(ends))), "")
        must = f"name metrics of {', '.join(names)}, the sets of data.eval, such as eval/accuracy_{names[0]}"
        require(not unknown, key, must, got=unknown, why="no evaluation would have it")
    every, publish = run.evaluation.every_steps, run.weights.publish_every_steps
    must = f"be a multiple of weights.publish_every_steps ({publish}) with learner.checkpoint.best"
    is_fit, why = best is None or (every > 0 and every % publish == 0), "a checkpoint must hold the weights evaluated"
    require(is_fit, "evaluation.every_steps", must, got=every, why=why)
    most = run.model.max_length - run.data.max_prompt_tokens
    must = f"be <= model.max_length - data.max_prompt_tokens ({most})"
    for each in run.data.eval_sets:
        key, is_fit = f"max_tokens of {each.name} in data.eval", each.max_tokens is None or each.max_tokens <= most
        require(is_fit, key, must, got=each.max_tokens, why=_NO_ROOM)


def _check_mode(run: RunConfig) -> None:
    for mode, key, path in (("replay", "replay.path", run.replay.path), ("sft", "sft.train_path", run.sft.train_path)):
        must, got = f"be set with mode={mode} and only then", f"{path!r} with mode={run.mode}"
        require((run.mode == mode) == bool(path), key, must, got=got, why="it is the input of that mode")
    if run.learner.epochs is None:
        check_profile(run)
    fits = run.profile.steps is None or run.mode != "sft"
    require(fits, "profile.steps", "be null with mode=sft", got=run.profile.steps, why="the learner is the only role")
    fits, key = run.has_roles or not run.metrics.is_wanted, "metrics.prometheus_port and metrics.otlp_endpoint"
    must, why = "be null without mode=async", "roles in one process count turns instead of seconds"
    require(fits, key, must, got=f"mode={run.mode}", why=why)
    best, key = run.learner.checkpoint.best, "learner.checkpoint.best"
    if best is not None and run.mode == "sft":
        measured = ("eval/loss", "eval/pair_accuracy")[: 1 + run.trains_reward_model]
        must, why = f"name {' or '.join(measured)} with mode=sft", "held-out rows have no other metric"
        require(best in measured, key, must, got=best, why=why)
        why = "checkpoints are compared on held-out rows"
        require(bool(run.sft.eval_path), "sft.eval_path", f"be set with {key}", got=run.sft.eval_path, why=why)


def check_profile(run: RunConfig) -> None:
    """Check `profile.steps` once `learner.max_steps` is known. Raises ConfigError."""
    steps, most = run.profile.steps, run.learner.max_steps
    fits = steps is None or (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= most)
    must = f"be the first and the last step to record, within 1 and learner.max_steps ({most})"
    require(fits, "profile.steps", must, got=steps, why="no other steps are trained")


def _check_learner(run: RunConfig) -> None:
    learner, engine = run.learner, run.learner.engine
    tokens, longest = learner.tokens_per_microbatch, run.model.max_length
    must, why = f"be >= model.max_length ({longest})", "the longest trajectory would not fit into any microbatch"
    require(tokens >= longest, "learner.tokens_per_microbatch", must, got=tokens, why=why)
    is_fit, ranks = isinstance(engine, DeepSpeedEngineConfig) or learner.num_ranks == 1, learner.num_ranks
    why = "that engine is one process; choose learner/engine=deepspeed"
    require(is_fit, "learner.num_ranks", "be 1 with learner/engine=torch", got=ranks, why=why)
    seconds = {f"algorithm.{each.key}": each for each in (run.algorithm.critic, run.algorithm.process_reward)}
    for setting, config in {"learner": learner, **seconds}.items():
        is_fit, must = not engine.zero_stage, f"be 0 with {setting}.optimizer.name={config.optimizer.name}"
        is_fit, why = is_fit or config.optimizer.name == "adamw", "it needs whole parameters, which ZeRO divides"
        require(is_fit, "learner.engine.zero_stage", must, got=engine.zero_stage, why=why)
    every, key = run.algorithm.kl.refresh_every_steps, "algorithm.kl.refresh_every_steps"
    why = "the reference is the model without its adapter, which never changes"
    require(run.model.lora is None or not every, key, "be null with model.lora", got=every, why=why)


def _check_router_replay(run: RunConfig) -> None:
    key, engine = "model.moe.router_replay", run.generators.engine
    if not run.model.moe.router_replay:
        return
    require(run.mode != "sft", key, "be false with mode=sft", got=True, why="demonstrations have no recorded experts")
    if isinstance(engine, VllmEngineConfig):
        unfit = "pipeline_parallel_size > 1" if engine.pipeline_parallel_size > 1 else ""
        unfit = "enable_prefix_caching=false" if engine.enable_prefix_caching is False else unfit
        must = "be false with this generators.engine"
        require(not unfit, key, must, got=f"true with {unfit}", why="vLLM cannot record experts with it")


def _check_one_process(run: RunConfig) -> None:
    one, why = run.is_one_process, "only roles in one process share its memory"
    is_fit, ranks = run.mode != "serial" or run.learner.num_ranks == 1, run.learner.num_ranks
    require(is_fit, "learner.num_ranks", "be 1 with mode=serial", got=ranks, why=why)
    transport, must = run.weights.transport, f"{'be' if one else 'not be'} memory with mode={run.mode}"
    require((transport == "memory") == one, "weights.transport", must, got=transport, why=why)
    is_fit, why = not (one and isinstance(run.buffer.store, RedisConfig)), "its state ends with its process"
    require(is_fit, "buffer/store", f"be embedded with mode={run.mode}", got="redis", why=why)
    is_possible = run.learner.device != "cpu" and isinstance(run.generators.engine, VllmEngineConfig)
    must, why = "be auto or gloo with learner.device=cpu, or without vllm's engine", "NCCL sends from GPU to GPU"
    require(run.weights.backend != "nccl" or is_possible, "weights.backend", must, got="nccl", why=why)


def _check_machines(run: RunConfig) -> None:
    cluster, machines, ranks = run.cluster, run.cluster.learner.machines, run.learner.num_ranks
    must, why = f"divide learner.num_ranks ({ranks})", "each machine has the same number of ranks"
    require(ranks % machines == 0, "cluster.learner.machines", must, got=machines, why=why)
    must = f"be true with cluster.learner.machines={machines}"
    why = "gradients and trajectories cross the network between ranks unencrypted"
    require(cluster.trusted_network or machines == 1, "cluster.trusted_network", must, got=False, why=why)
    is_local, why = cluster.kind == "local", "generators on other machines could not reach this one"
    must = f"be local with mode={run.mode}"
    require(is_local or run.has_roles, "cluster.kind", must, got=cluster.kind, why="there is no generator to place")
    is_fit, must = is_local or bool(cluster.interface), "be set with cluster.kind=ray"
    require(is_fit, "cluster.interface", must, got='""', why=why)
    brokers, address = run.broker.shards, run.broker.address
    must, why = f"be 1 with mode={run.mode}", "only mode=async runs brokers as processes"
    require(run.has_roles or brokers == 1, "broker.shards", must, got=brokers, why=why)
    port = int(found[1]) if address and (found := re.fullmatch(r"tcp://.*:(\d{1,5})", address, re.ASCII)) else 0
    must, why = f"be <= {PORTS[-1] + 1 - brokers} with broker.shards={brokers}", "each broker takes the next port"
    require(port + brokers - 1 <= PORTS[-1], "the port of broker.address", must, got=port, why=why)
    if cluster.interface and address is None and brokers > 1:
        must = f"hold at least {brokers + 1} ports with broker.shards={brokers}"
        why = "each broker needs one, and the learner needs one for weights"
        require(len(cluster.port_range) > brokers, "cluster.ports", must, got=cluster.ports, why=why)


def _check_guests(run: RunConfig) -> None:
    names, own = run.cluster.untrusted_generators.names, run.generators.sampling
    agents = (run.generators.agent, *run.generators.agents.values())
    unfit = {
        f"mode={run.mode}": not run.has_roles,
        f"generators.sampling.temperature={own.temperature:g}": own.temperature != 1,
        f"generators.sampling.top_p={own.top_p:g}": own.top_p != 1,
        f"generators.sampling.top_k={own.top_k}": own.top_k > 0,
        f"generators.sampling.min_p={own.min_p:g}": own.min_p > 0,
        "generators.sampling.stop, stop_token_ids, or ignore_eos": any((own.stop, own.stop_token_ids, own.ignore_eos)),
        "algorithm/advantage=remax": run.has_baseline,
        "an agent that is not single_turn": not all(isinstance(agent, SingleTurnConfig) for agent in agents),
        "model.moe.router_replay=true": run.model.moe.router_replay,
    }
    found = next((setting for setting, is_unfit in unfit.items() if is_unfit), "")
    key, why = "cluster.untrusted_generators.names", "the run's own engines could not score the answers"
    require(not (names and found), key, f"be empty with {found}", got=names, why=why)


def _check_generators(run: RunConfig) -> None:
    count, scale = run.generators.count, run.generators.autoscale
    if scale:
        must = f"lie between generators.autoscale.min and max ({scale.min} to {scale.max})"
        why = "the run starts with this number"
        require(scale.min <= count <= scale.max, "generators.count", must, got=count, why=why)
    advantage, size = run.algorithm.advantage, run.generators.group_size
    must = f"be >= 2 for algorithm/advantage={advantage.kind}"
    why = "a group of one has no baseline and every advantage would be zero; moving_baseline supports it"
    require(size > 1 or advantage.has_own_baseline, "generators.group_size", must, got=size, why=why)
    least, lease_s = 3 * run.broker.heartbeat_s, run.broker.lease_s
    why = "pings renew leases, and a healthy generator's leases would lapse in between"
    require(lease_s >= least, "broker.lease_s", f"be >= three pings ({least:g})", got=lease_s, why=why)


def _check_buffer(run: RunConfig) -> None:
    # Some group must pass the filter, or the learner would wait forever.
    chosen, size = run.buffer.filter, run.generators.group_size
    if isinstance(chosen, ZeroAdvantageConfig):
        is_fit, must = run.members_per_group > 1, "be >= 2 for buffer/filter=zero_advantage"
        why = "a single reward has nothing to differ from, and every group would be rejected"
        require(is_fit, "generators.group_size", must, got=size, why=why)
        signal = run.algorithm.signal_beside_rewards
        why = "it rejects groups of equal rewards, which carry a signal here"
        require(not signal, "buffer/filter", f"be none or accuracy with {signal}", got="zero_advantage", why=why)
    if isinstance(chosen, AccuracyConfig):
        is_fit = any(chosen.min_accuracy < right / size < chosen.max_accuracy for right in range(size + 1))
        must = f"accept at least one share of right answers in generators.group_size={size}"
        got = f"min_accuracy={chosen.min_accuracy:g} and max_accuracy={chosen.max_accuracy:g}"
        require(is_fit, "buffer.filter", must, got=got, why="every group would be rejected")
    mix, per_step, mixed = run.replay_mix, run.learner.prompts_per_step, run.mixed_groups_per_step
    must = f"leave at least one of {per_step} groups per step for each source"
    why = f"{mixed} would come from the archive"
    require(not mix.archive or 0 < mixed < per_step, "replay_mix.fraction", must, got=mix.fraction, why=why)
    reuse, per_step = run.buffer.reuse, run.claimed_groups_per_step
    fresh = ceil(reuse.fresh_fraction * per_step)
    if reuse.samples_per_insert is not None:
        # Pacing admits a prompt per fresh group, so a run converges to this ratio.
        key, ratio, least = "buffer.reuse.samples_per_insert", reuse.samples_per_insert, per_step / fresh
        must = f"be >= groups of a step / fresh groups of a step ({per_step} / {fresh} = {least:.3g})"
        why = "uses would outrun arrivals; raise it, or raise buffer.reuse.fresh_fraction"
        require(ratio >= least, key, must, got=ratio, why=why)


_LEARNER_CHECKS = (_check_mode, _check_machines, _check_guests, _check_learner, _check_router_replay)
"""Checks that apply in every mode."""
_ROLE_CHECKS = (_check_bounds, _check_heldout, _check_one_process, _check_generators, _check_buffer)
"""Checks of the modes in which a learner has generators."""
