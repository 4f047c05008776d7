"""Building: a Trainer from the run's settings."""

from typing import TypeVar

import msgspec
import torch

from configs.advantages import CustomAdvantageConfig
from configs.algorithm import AlgorithmConfig
from configs.learner import DeepSpeedEngineConfig, OptimizerConfig
from configs.policy_losses import CustomPolicyLossConfig
from configs.run import RunConfig
from learner import estimators, surrogates
from learner.critic import SETTING, Critic
from learner.deepspeed_engine import DeepSpeedEngine
from learner.engine import Trainable, TrainEngine
from learner.errors import ModelFault, TrainEngineFault
from learner.model import Policy, load_policy
from learner.onlookers import Onlookers
from learner.ranks import Ranks
from learner.torch_engine import TorchEngine
from learner.trainer import Trainer
from learner.value_model import load_value_model

T = TypeVar("T", bound=Trainable)


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` -> the device of this rank. Raises TrainEngineFault."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise TrainEngineFault("learner.device=cuda needs a GPU that torch can see, got none: use learner.device=auto.")
    return torch.device("cuda", local_rank) if has_cuda and name != "cpu" else torch.device("cpu")


def build_trainer(run: RunConfig, *, ranks: Ranks, device: torch.device) -> Trainer:
    """Load the model and build engine and trainer. Collective. Raises ConfigError, ModelFault, TrainEngineFault."""
    _check_own_functions(run.algorithm)
    policy = load_policy(run.model, device=device, gradient_checkpointing=_recomputes_activations(run))
    engine = _build_engine(
        run, policy, optimizer=run.learner.optimizer, setting="learner.optimizer", ranks=ranks, device=device
    )
    onlookers = _load_onlookers(run, policy, device=device)
    critic = _build_critic(run, policy, ranks=ranks, device=device) if run.algorithm.has_critic else None
    return Trainer(run, engine=engine, ranks=ranks, onlookers=onlookers, critic=critic)


def _check_own_functions(config: AlgorithmConfig) -> None:
    """Before anything is waited for. Raises ConfigError."""
    if isinstance(config.advantage, CustomAdvantageConfig):
        estimators.own_function(config.advantage)
    if isinstance(config.policy_loss, CustomPolicyLossConfig):
        surrogates.own_function(config.policy_loss)


def _build_critic(run: RunConfig, policy: Policy, *, ranks: Ranks, device: torch.device) -> Critic:
    """Raises ModelFault."""
    config = run.algorithm.critic
    chosen = msgspec.structs.replace(run.model, path=config.path or run.model.path)
    model = load_value_model(chosen, device=device, gradient_checkpointing=_recomputes_activations(run))
    if model.vocab_size != policy.vocab_size:
        raise ModelFault(
            f"algorithm.critic.path must name a model with the policy's vocabulary ({policy.vocab_size} tokens), got "
            f"{model.vocab_size} in {chosen.path}."
        )
    engine = _build_engine(run, model, optimizer=config.optimizer, setting=SETTING, ranks=ranks, device=device)
    total = run.learner.max_steps * run.algorithm.updates_per_step
    return Critic(config, engine=engine, ranks=ranks, total_updates=total)


def _load_onlookers(run: RunConfig, policy: Policy, *, device: torch.device) -> Onlookers:
    """Only those that the settings need. Raises ModelFault."""
    reference = teacher = None
    if run.algorithm.kl.coefficient:
        reference = load_policy(run.model, device=device).requires_grad_(False)
    if distillation := run.algorithm.distillation:
        config = msgspec.structs.replace(run.model, path=distillation.teacher_path)
        teacher = load_policy(config, device=device).requires_grad_(False)
        if teacher.vocab_size != policy.vocab_size:
            raise ModelFault(
                f"algorithm.distillation.teacher_path must name a model with the learner's vocabulary "
                f"({policy.vocab_size} tokens), got {teacher.vocab_size} in {distillation.teacher_path}."
            )
    return Onlookers(run.algorithm, reference=reference, teacher=teacher)


def _recomputes_activations(run: RunConfig) -> bool:
    engine = run.learner.engine
    return isinstance(engine, DeepSpeedEngineConfig) and engine.gradient_checkpointing


def _build_engine(
    run: RunConfig, model: T, *, optimizer: OptimizerConfig, setting: str, ranks: Ranks, device: torch.device
) -> TrainEngine[T]:
    config = run.learner.engine
    if isinstance(config, DeepSpeedEngineConfig):
        return DeepSpeedEngine(model, config=config, optimizer=optimizer, device=device, ranks=ranks, setting=setting)
    return TorchEngine(model, optimizer=optimizer, device=device, setting=setting)
