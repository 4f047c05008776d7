"""Critic: the value model, trained alongside the policy with its own engine.

    loss = sum over tokens of weight * clipped_value_loss(V(state before the token), return)

Token weights, updates, and microbatches are the policy's. Tokens rejected for the whole step have no loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from slipstream.broker.weights.checkpoint_names import CheckpointNames, NamedTensors
from slipstream.configs.algorithm import CriticConfig
from slipstream.configs.data import ModelConfig
from slipstream.learner.algorithms.inputs import known
from slipstream.learner.algorithms.token_advantages import clipped_value_loss, explained_variance
from slipstream.learner.batching.batch import Batch, Tokens
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.engines.optimizer import named_weights, read_tensors
from slipstream.learner.errors import ModelError
from slipstream.learner.training.attention import SINGLE_RANK
from slipstream.learner.training.model import COMPUTE_DTYPES, WideLinear, forward_pass, load_module, scaled
from slipstream.learner.training.second_model import SecondModel, Updates


def describe_values(tokens: Tokens) -> dict[str, float]:
    """Metrics of values at the start of a step, over tokens in the loss."""
    values, returns = known(tokens.values), known(tokens.returns)
    if tokens.is_kept is not None:
        values, returns = values[tokens.is_kept], returns[tokens.is_kept]
    return {
        "learner/critic_explained_variance": float(explained_variance(values, returns)),
        "learner/critic_value_mean": float(values.mean()) if len(values) else 0.0,
    }


_HEAD_FILE = "value_head.safetensors"
_PATH = "algorithm.critic.path (by default model.path)"


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
        """`values`, float32[N]."""
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
    """The value model and its optimizer."""

    @staticmethod
    def load(config: ModelConfig, **options: Any) -> ValueModel:
        return load_value_model(config, **options)

    def fill(self, batch: Batch, updates: Updates, *, step: int) -> tuple[Batch, dict[str, float]]:
        columns = recompute(batch, [*chain(*updates)], self.engine.forward, names=["values"], ranks=self._ranks)
        return batch.with_tokens(**columns), {}

    def learn(self, batch: Batch, updates: Updates, *, step: int) -> dict[str, float]:
        sums, norms = torch.zeros(3, dtype=torch.float64), []
        for microbatches in updates:
            found, norm = self.update(microbatches, partial(self._measure, batch.tokens), step=step)
            sums += found
            norms.append(norm)
        loss, clipped, kept = self._ranks.sum(sums).tolist()
        return describe_values(batch.tokens) | {
            "learner/critic_loss": loss / max(1, len(norms)),
            "learner/critic_grad_norm": sum(norms) / max(1, len(norms)),
            "learner/critic_clip_fraction": clipped / max(1.0, kept),
        }

    def _measure(self, tokens: Tokens, microbatch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, clipped tokens, tokens in the loss."""
        tokens, values = tokens.take(microbatch.indices), self.engine.forward(microbatch)["values"]
        returns, before = known(tokens.returns), known(tokens.values)
        losses, is_clipped = clipped_value_loss(values, returns, before, clip=self._config.value_clip)
        is_kept = torch.ones_like(is_clipped) if tokens.is_kept is None else tokens.is_kept
        return (known(tokens.token_weights) * is_kept * losses).sum(), (is_clipped & is_kept).sum(), is_kept.sum()
