"""Second models, each trained along with the policy in its own engine: critic and process reward model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from slipstream.broker.weights.checkpoint_names import CheckpointNames, NamedTensors
from slipstream.configs.algorithm import CriticConfig, ProcessRewardConfig
from slipstream.configs.data import ModelConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.algorithms import segments
from slipstream.learner.algorithms.inputs import known
from slipstream.learner.algorithms.token_advantages import (
    clipped_value_loss,
    explained_variance,
    implicit_rewards,
    outcome_cross_entropy,
)
from slipstream.learner.batching.batch import Batch, Tokens
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.engines.engine import TrainEngine, check_loss, take_step
from slipstream.learner.engines.optimizer import Trainable, learning_rate, named_weights, read_tensors
from slipstream.learner.errors import ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.attention import SINGLE_RANK
from slipstream.learner.training.model import (
    COMPUTE_DTYPES,
    Policy,
    WideLinear,
    forward_pass,
    load_module,
    load_policy,
    scaled,
)

_HEAD_FILE = "value_head.safetensors"
_PATH = "algorithm.critic.path (by default model.path)"

M = TypeVar("M", bound=Trainable)
C = TypeVar("C", CriticConfig, ProcessRewardConfig)

Updates = Sequence[Sequence[Microbatch]]
"""Microbatches of each optimizer update of a step."""


class SecondModel(ABC, Generic[M, C]):
    """The model and its optimizer. Life: (fill -> learn)*, once per step. Every method is collective."""

    def __init__(self, run: RunConfig, config: C, *, engine: TrainEngine[M], ranks: Ranks) -> None:
        self._run = run
        self._config: C = config
        self._ranks = ranks
        self.engine = engine
        self.name = config.key
        """Folder in checkpoints, and start of its metrics."""
        self.noun = config.key.replace("_", " ")
        self.optimizer_setting = f"algorithm.{config.key}.optimizer"
        self.warmup_steps: int = getattr(config, "warmup_steps", 0)
        """Initial steps that don't train the policy."""
        self.num_updates = 0
        """Optimizer updates so far, restored from a checkpoint."""

    @staticmethod
    @abstractmethod
    def load(config: ModelConfig, **options: Any) -> M:
        """Load a policy, or a saved model of this kind. `options`: see `load_module`. Raises ModelError."""

    @abstractmethod
    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        """Fill columns for the advantage. Returns metrics of any training. Raises DivergenceError."""

    def learn(self, batch: Batch, updates: Updates, *, step: int) -> dict[str, float]:
        """Train after `Objective.prepare`, in `updates` with a loss of the policy. Raises DivergenceError."""
        return {}

    def update(
        self, microbatches: Sequence[Microbatch], measure: Callable[[Microbatch], tuple[Tensor, ...]], *, step: int
    ) -> tuple[Tensor, float]:
        """Make one optimizer update. Returns sums over this rank's microbatches, float64[K], and the gradient norm.

        `measure`: a microbatch's part of the loss, and numbers to sum.
        """
        sums = []
        for microbatch in microbatches:
            found = measure(microbatch)
            self.engine.backward(found[0])
            sums.append(torch.stack([number.detach().double() for number in found]))
        total, setting = torch.stack(sums).sum(0), self.optimizer_setting
        check_loss(total[0], what=f"the {self.noun}'s loss", step=step, setting=setting, ranks=self._ranks)
        config, num_steps = self._config.optimizer, self._run.learner.max_steps
        per_step = self._run.algorithm.updates_per_step
        rate = learning_rate(self.num_updates, config=config, num_steps=num_steps, updates_per_step=per_step)
        norm = take_step(self.engine, learning_rate=rate, step=step)
        self.num_updates += 1
        return total.cpu(), norm


class ProcessReward(SecondModel[Policy, ProcessRewardConfig]):
    """The implicit process reward model of PRIME, arXiv:2502.01456, trained before the policy's updates.

        loss = mean over answers of cross_entropy(sigmoid(sum over tokens of reward), correct)
        reward = beta * (log pi_model - log pi_reference), per trained token

    The advantage takes the updated model's rewards. The paper's Algorithm 1 computes them before the update, its code
    in verl (recipe/prime, `update: before`) after it.

    Only answers with a valid reward and a trained token count, with tokens that the correction rejects. The model is
    initially the policy without an adapter.
    """

    @staticmethod
    def load(config: ModelConfig, **options: Any) -> Policy:
        setting = "algorithm.process_reward.path (by default model.path)"
        return load_policy(msgspec.structs.replace(config, lora=None), setting=setting, **options)

    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        # Recorded experts belong to the policy.
        updates = [[replace(microbatch, experts=None) for microbatch in microbatches] for microbatches in updates]
        found = [self._train(batch, each, update=index, step=step) for index, each in enumerate(updates)]
        loss, norm, num_right, num_answers = torch.tensor(found, dtype=torch.float64).sum(0).tolist()
        moved = max(1, sum(count > 0 for *_, count in found))
        return batch.with_tokens(process_rewards=self._rewards(batch, [*chain(*updates)])), {
            "learner/process_reward_loss": loss / moved,
            "learner/process_reward_grad_norm": norm / moved,
            "learner/process_reward_accuracy": num_right / max(1.0, num_answers),
        }

    def _train(
        self, batch: Batch, microbatches: Sequence[Microbatch], *, update: int, step: int
    ) -> tuple[float, float, int, int]:
        """Returns loss, gradient norm, answers judged correctly before the update, and their number."""
        answers = batch.trajectories
        is_counted = answers.is_member & (answers.num_trained > 0) & (answers.updates == update)
        if not (num_answers := int(is_counted.sum())):
            return 0.0, 0.0, 0, 0
        # An answer's tokens may be in several microbatches, so scores come first.
        rewards = self._rewards(batch, microbatches).double()
        scores = segments.sums(rewards, batch.tokens.sequences, num_segments=batch.num_trajectories)
        weights = answers.draw_weights * is_counted / num_answers
        loss, slopes = outcome_cross_entropy(scores, answers.is_correct, weights=weights)
        pull, reference = batch.per_token(slopes).float(), known(batch.tokens.reference_logprobs)

        def measure(microbatch: Microbatch) -> tuple[Tensor]:
            logprobs, own = self.engine.forward(microbatch)["logprobs"], microbatch.indices
            return ((pull[own] * implicit_rewards(logprobs, reference[own], beta=self._config.beta)).sum(),)

        _, norm = self.update(microbatches, measure, step=step)
        is_right = ((scores > 0) == answers.is_correct) & is_counted
        return float(loss), norm, int(is_right.sum()), num_answers

    def _rewards(self, batch: Batch, microbatches: Sequence[Microbatch]) -> Tensor:
        """float32[N], valid for tokens of these microbatches."""
        columns = recompute(batch, microbatches, self.engine.forward, names=["logprobs"], ranks=self._ranks)
        return implicit_rewards(columns["logprobs"], known(batch.tokens.reference_logprobs), beta=self._config.beta)


def describe_values(tokens: Tokens) -> dict[str, float]:
    """Metrics of values at the start of a step, over tokens in the loss."""
    values, returns = known(tokens.values), known(tokens.returns)
    if tokens.is_kept is not None:
        values, returns = values[tokens.is_kept], returns[tokens.is_kept]
    return {
        "learner/critic_explained_variance": float(explained_variance(values, returns)),
        "learner/critic_value_mean": float(values.mean()) if len(values) else 0.0,
    }


class ValueModel(nn.Module):
    """A language model's trunk with a scalar head: the value of the state before each trained token."""

    group = SINGLE_RANK
    has_trunk = True

    def __init__(self, trunk: PreTrainedModel, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = WideLinear(trunk.config.get_text_config().hidden_size, 1, dtype=compute_dtype)
        # With zeros, advantages first equal returns.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.compute_dtype = compute_dtype
        """Dtype of weights and activations."""

    @property
    def vocab_size(self) -> int:
        return self.trunk.config.get_text_config().vocab_size

    def forward(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return `values`, float32[N], at the trained tokens."""
        values = self.head(self._hidden(self.group.take(microbatch))).squeeze(-1)
        return self.group.gather({"values": values}, microbatch)

    @property
    def backbone(self) -> PreTrainedModel:
        return self.trunk

    def probe(self, microbatch: Microbatch) -> Tensor:
        return self.group.gather({"hidden": scaled(self._hidden(self.group.take(microbatch)))}, microbatch)["hidden"]

    def _hidden(self, microbatch: Microbatch) -> Tensor:
        output = forward_pass(self.trunk, microbatch, group=self.group)
        return output.last_hidden_state.flatten(0, 1)[microbatch.sources].float()

    def weights(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self)

    @cached_property
    def saved_names(self) -> CheckpointNames:
        return CheckpointNames(self.trunk)

    @property
    def saved_dtype(self) -> torch.dtype:
        return self.compute_dtype

    def to_saved(self, tensors: NamedTensors, rest: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        def of_trunk() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                part, _, inner = name.partition(".")
                if part == "trunk":
                    yield inner, tensor
                else:
                    rest[inner] = tensor.to("cpu", copy=True)

        return self.saved_names.convert(of_trunk())

    def save_rest(self, folder: Path, rest: dict[str, Tensor]) -> None:
        save_file(rest, folder / _HEAD_FILE)


def load_value_model(config: ModelConfig, **options: Any) -> ValueModel:
    """Load a value model, or a policy's trunk with a zero head. `options`: see `load_module`. Raises ModelError."""
    with _without_report():
        trunk, missing = load_module(AutoModel, config, setting=_PATH, **options)
    if missing:
        raise ModelError(
            f"{_PATH} must hold a causal language model made of a trunk and an lm_head, got {config.path!r}, "
            f"which lacks {len(missing)} weights of the trunk ({missing[0]}, ...): choose another model, or an "
            "algorithm.advantage without a critic."
        )
    model = ValueModel(trunk, compute_dtype=COMPUTE_DTYPES[config.dtype]).to(options["device"])
    model.group = options.get("group", SINGLE_RANK)
    # Cache the names before sharding changes the shapes.
    model.saved_names  # noqa: B018
    if (head := Path(config.path) / _HEAD_FILE).exists():
        model.head.load_state_dict(read_tensors(head))
    elif trunk.config.architectures == [type(trunk).__name__]:
        # A policy would name its causal language model here.
        raise ModelError(
            f"{_PATH} must hold a policy, or a value model with its {_HEAD_FILE}, got a trunk without a head in "
            f"{config.path!r}: copy the whole folder critic/model of a checkpoint."
        )
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' report of the unused lm_head."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class Critic(SecondModel[ValueModel, CriticConfig]):
    """The value model, trained alongside the policy.

        loss = sum over tokens of weight * clipped_value_loss(V(state before the token), return)

    Token weights, updates, and microbatches are the policy's. Tokens rejected for the whole step have no loss.
    """

    @staticmethod
    def load(config: ModelConfig, **options: Any) -> ValueModel:
        return load_value_model(config, **options)

    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        columns = recompute(batch, [*chain(*updates)], self.engine.forward, names=["values"], ranks=self._ranks)
        return batch.with_tokens(**columns), {}

    def learn(self, batch: Batch, updates: Updates, *, step: int) -> dict[str, float]:
        def measure(microbatch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
            """Loss, clipped tokens, tokens in the loss."""
            tokens, values = batch.tokens.take(microbatch.indices), self.engine.forward(microbatch)["values"]
            returns, before = known(tokens.returns), known(tokens.values)
            losses, is_clipped = clipped_value_loss(values, returns, before, clip=self._config.value_clip)
            is_kept = torch.ones_like(is_clipped) if tokens.is_kept is None else tokens.is_kept
            return (known(tokens.token_weights) * is_kept * losses).sum(), (is_clipped & is_kept).sum(), is_kept.sum()

        sums, norms = torch.zeros(3, dtype=torch.float64), []
        for microbatches in updates:
            found, norm = self.update(microbatches, measure, step=step)
            sums += found
            norms.append(norm)
        loss, clipped, kept = self._ranks.sum(sums).tolist()
        return describe_values(batch.tokens) | {
            "learner/critic_loss": loss / max(1, len(norms)),
            "learner/critic_grad_norm": sum(norms) / max(1, len(norms)),
            "learner/critic_clip_fraction": clipped / max(1.0, kept),
        }
