"""Builds the learner's parts."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from slipstream.broker.transport.session import Inbox, Sender
from slipstream.broker.weights.transport import WeightSender
from slipstream.buffer.archive.replay import Rollouts
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.store import Store
from slipstream.configs.data import ModelConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.engines.deepspeed_engine import DeepSpeedEngine, ShardedModel, sharded_loading
from slipstream.learner.engines.engine import ModelEngine, TrainEngine
from slipstream.learner.engines.optimizer import Trainable
from slipstream.learner.errors import ModelError, TrainEngineError
from slipstream.learner.learner import Learner
from slipstream.learner.metrics_log import MetricsLog
from slipstream.learner.profiler import StepProfiler
from slipstream.learner.publishing.fetches import SnapshotServer
from slipstream.learner.publishing.publisher import BackgroundPublisher, Publisher
from slipstream.learner.publishing.staging import Stager, prompt_tokens
from slipstream.learner.rank_group import RankGroup
from slipstream.learner.ranks import SILENCE_S, Ranks, join_ranks
from slipstream.learner.training.attention import SequenceGroup, compile_layers
from slipstream.learner.training.layout import LayoutChooser
from slipstream.learner.training.model import COMPUTE_DTYPES, Policy, is_sharded, load_policy
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.second_model import Critic, ProcessReward, SecondModel
from slipstream.learner.training.trainer import AdapterOff, FrozenModels, Trainer
from slipstream.runtime.clock import Clock
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.model_files import ModelFingerprint, check_same_model, fingerprint
from slipstream.runtime.run_folder import RunFolder

T = TypeVar("T", bound=Trainable)


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` -> the device of this rank. Raises TrainEngineError."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not num_gpus):
        return torch.device("cpu")
    if local_rank >= num_gpus:
        raise TrainEngineError(
            f"learner.device={name} needs a GPU for each rank on this machine, got {num_gpus} that torch can see for "
            f"{local_rank + 1} or more: lower learner.num_ranks, or use learner.device=cpu."
        )
    return torch.device("cuda", local_rank)


def build_trainer(run: RunConfig, *, ranks: Ranks) -> Trainer:
    """Collective. Raises ConfigError, ModelError, TrainEngineError."""
    # First, to report a missing user function.
    objective = Objective(run.algorithm, max_tokens=run.generators.sampling.max_tokens)
    models = _Models(run, ranks)
    engine = models.build_policy()
    policy = engine.model
    # Read by rank 0, because other machines may lack the file. SFT has no prompts.
    text = ranks.broadcast_ints(prompt_tokens(run) if ranks.is_first and run.mode != "sft" else None)
    chooser = LayoutChooser(run, policy, ranks=ranks, text=text)
    frozen_models = models.load_frozen_models(engine, chooser)
    second_model = models.build_second(policy, chooser)
    layout = chooser.choose()
    if run.learner.compile:
        # Last: choosing a layout runs the model in float32 and on other shapes.
        only_norms = policy.routers is not None or policy.group.size > 1 or is_sharded(policy)
        compile_layers(policy.backbone, only_norms=only_norms)
    return Trainer(
        run,
        engine=engine,
        ranks=ranks,
        objective=objective,
        frozen_models=frozen_models,
        second_model=second_model,
        layout=layout,
        text=text,
    )


class _Models:
    """A trainer's models and engines. Every method is collective."""

    def __init__(self, run: RunConfig, ranks: Ranks) -> None:
        self._run = run
        self._ranks = ranks
        size = run.learner.sequence_parallel
        self._group = SequenceGroup(size, ranks.rank % size, ranks.share_sequences(size))

    def build_policy(self) -> TrainEngine[Policy]:
        run = self._run
        options = self._options(gradient_checkpointing=run.learner.engine.gradient_checkpointing)
        policy = load_policy(run.model, is_reward_model=run.trains_reward_model, **options)
        # Build the engine first: a sharded model works only inside one.
        engine = self._build_engine(policy, optimizer=run.learner.optimizer, setting="learner.optimizer")
        if is_sharded(policy):
            policy.check_head()
        return engine

    def build_second(self, policy: Policy, chooser: LayoutChooser) -> SecondModel | None:
        run, config = self._run, self._run.algorithm.second_model
        if config is None:
            return None
        kind: Any = Critic if run.algorithm.advantage.needs_critic else ProcessReward
        setting = f"algorithm.{config.key}"
        chosen = msgspec.structs.replace(run.model, path=config.path or run.model.path)
        model = kind.load(chosen, **self._options(gradient_checkpointing=run.learner.engine.gradient_checkpointing))
        _check_vocabulary(model.vocab_size, policy, setting=f"{setting}.path", path=chosen.path)
        engine = self._build_engine(model, optimizer=config.optimizer, setting=f"{setting}.optimizer")
        if is_sharded(model) and isinstance(model, Policy):
            model.check_head()
        chooser.check(model, setting=f"{setting}.path (by default model.path)", path=chosen.path)
        return kind(run, config, engine=engine, ranks=self._ranks)

    def load_frozen_models(self, engine: TrainEngine[Policy], chooser: LayoutChooser) -> FrozenModels:
        run, policy, teacher = self._run, engine.model, None
        reference: ModelEngine[Policy] | AdapterOff | None = None
        if run.algorithm.needs_reference and run.model.lora:
            reference = AdapterOff(engine)
        elif run.algorithm.needs_reference:
            reference = self._load_frozen(run.model, setting="model.path")
            # The chooser may have changed the policy's attention implementation.
            reference.model.backbone.set_attn_implementation(policy.backbone.config._attn_implementation)
        if distillation := run.algorithm.distillation:
            path, setting = distillation.teacher_path, "algorithm.distillation.teacher_path"
            config = ModelConfig(path, dtype=run.model.dtype, trust_remote_code=run.model.trust_remote_code)
            teacher = self._load_frozen(config, setting=setting)
            _check_vocabulary(teacher.model.vocab_size, policy, setting=setting, path=path)
            chooser.check(teacher.model, setting=setting, path=path)
        return FrozenModels(run.algorithm, reference=reference, teacher=teacher)

    def _load_frozen(self, model: ModelConfig, *, setting: str) -> ModelEngine[Policy]:
        policy = load_policy(model, setting=setting, **self._options())
        policy.requires_grad_(False)
        if not is_sharded(policy):
            return ModelEngine(policy)
        config = self._run.learner.engine
        assert isinstance(config, DeepSpeedEngineConfig), "only DeepSpeed shards"
        engine = ShardedModel(policy, config=config, ranks=self._ranks)
        policy.check_head()
        return engine

    def _options(self, **options: Any) -> dict[str, Any]:
        dtype = COMPUTE_DTYPES[self._run.model.dtype]
        loading = sharded_loading(self._run.learner.engine, ranks=self._ranks, dtype=dtype)
        return {"device": self._ranks.device, "loading": loading, "group": self._group, **options}

    def _build_engine(self, model: T, *, optimizer: OptimizerConfig, setting: str) -> TrainEngine[T]:
        config, ranks = self._run.learner.engine, self._ranks
        if isinstance(config, DeepSpeedEngineConfig):
            return DeepSpeedEngine(model, config=config, optimizer=optimizer, ranks=ranks, setting=setting)
        return TrainEngine(model, optimizer=optimizer, device=ranks.device, setting=setting)


def _check_vocabulary(vocab_size: int, policy: Policy, *, setting: str, path: str) -> None:
    if vocab_size != policy.vocab_size:
        must = f"{setting} must name a model with the policy's vocabulary ({policy.vocab_size} tokens)"
        raise ModelError(f"{must}, got {vocab_size} in {path}.")


def build_rank_group(run: RunConfig, *, folder: RunFolder, device: torch.device, rank: int = 0) -> RankGroup:
    """Blocks until all ranks have joined. Raises ConfigError, LearnerError."""
    ranks = join_ranks(rank=rank, size=run.learner.num_ranks, device=device, silence_s=SILENCE_S)
    # Rank 0 has already compared its model with the broker's.
    model = [encode(fingerprint(run.model.path))] if ranks.is_first else None
    check_same_model(run.model.path, decode(ranks.broadcast_bytes(model)[0], ModelFingerprint | None))  # type: ignore[arg-type]
    torch.manual_seed(run.seed)
    trainer = build_trainer(run, ranks=ranks)
    checkpoints = Checkpoints(folder.checkpoints, run=run, trainer=trainer, ranks=ranks)
    return RankGroup(run=run, trainer=trainer, ranks=ranks, checkpoints=checkpoints)


def build_learner(
    run: RunConfig,
    *,
    rank_group: RankGroup,
    store: Store,
    folder: RunFolder,
    client: Sender,
    inbox: Inbox,
    sender: WeightSender | None,
    snapshots: SnapshotServer | None = None,
    wait: Callable[[int, float], object],
    num_heldout: Mapping[str, int],
    clock: Clock = time.monotonic,
) -> Learner:
    """`wait`, `num_heldout`: see Learner. `snapshots`: see Publisher."""
    publisher = Publisher(
        client=client,
        inbox=inbox,
        sender=sender,
        config=run.weights,
        snapshots=snapshots,
        is_one_process=run.is_one_process,
        on_evict=store.record_event,
        trusts_network=run.cluster.trusted_network,
        clock=clock,
    )
    trainer = rank_group.trainer
    metadata = trainer.engine.model.checkpoint_names.metadata(getattr(torch, run.model.dtype))
    stager = Stager(run.weights, metadata=metadata, device=trainer.engine.device)
    mix = run.replay_mix
    disk = DiskWait(while_waiting=rank_group.keep_alive)
    profiler = StepProfiler(run, store=store, folder=folder.profile, send=client.send)
    return Learner(
        run=run,
        store=store,
        rank_group=rank_group,
        publisher=BackgroundPublisher(
            publisher, stager, store, in_background=not run.is_one_process, trace=profiler.trace
        ),
        metrics_log=MetricsLog(run, folder=folder, store=store, disk=disk, account=trainer.account),
        wait=wait,
        num_heldout=num_heldout,
        rollouts=Rollouts(Path(mix.archive), seed=run.seed) if mix.archive else None,
        profiler=profiler,
        clock=clock,
    )
