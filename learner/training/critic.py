"""Critic: the value model, trained alongside the policy with its own engine.

    loss = sum over tokens of weight * clipped_value_loss(V(state before the token), return)

Token weights, updates, and microbatches are the policy's. Tokens that the correction rejected for the whole step have
no loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from slipstream.configs.algorithm import CriticConfig
from slipstream.configs.data import ModelConfig
from slipstream.learner.algorithms.inputs import known
from slipstream.learner.algorithms.token_advantages import clipped_value_loss, explained_variance
from slipstream.learner.batching.batch import Batch, Tokens
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.engines.engine import TrainEngine, check_loss, take_step
from slipstream.learner.engines.optimizer import learning_rate, named_weights, read_tensors
from slipstream.learner.errors import ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.model import COMPUTE_DTYPES, forward_pass, load_module, scaled
from slipstream.learner.training.sequence_parallel import SINGLE_RANK, SequenceGroup


def describe_values(tokens: Tokens) -> dict[str, float]:
    """Metrics of the values at the start of a step, over tokens in the loss."""
    values, returns = known(tokens.values), known(tokens.returns)
    if tokens.is_kept is not None:
        values, returns = values[tokens.is_kept], returns[tokens.is_kept]
    return {
        "learner/critic_explained_variance": float(explained_variance(values, returns)),
        "learner/critic_value_mean": float(values.mean()) if len(values) else 0.0,
    }


# --- the value model -------------------------------------------------------------------------------------------------
_HEAD_FILE = "value_head.safetensors"
PATH_SETTING = "algorithm.critic.path (by default model.path)"


class ValueModel(nn.Module):
    """Value of the state before each trained token: a language model's trunk with a scalar head, float32."""

    group = SINGLE_RANK
    has_trunk = True

    def __init__(self, trunk: PreTrainedModel, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1)
        # With zeros, advantages equal returns until the critic has learned.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.compute_dtype = compute_dtype
        """Dtype of the trunk's matrix products."""

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
        hidden = scaled(self._hidden(self.group.take(microbatch)))
        return self.group.gather({"hidden": hidden}, microbatch)["hidden"]

    def _hidden(self, microbatch: Microbatch) -> Tensor:
        output = forward_pass(self.trunk, microbatch, compute_dtype=self.compute_dtype, group=self.group)
        return output.last_hidden_state.flatten(0, 1)[microbatch.sources].float()

    def weights(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self)


def load_value_model(
    config: ModelConfig,
    *,
    device: torch.device,
    gradient_checkpointing: bool = False,
    loading: AbstractContextManager[None] | None = None,
    group: SequenceGroup = SINGLE_RANK,
) -> ValueModel:
    """Load a value model, or a policy's trunk with a zero head. `loading`: see `load_policy`. Raises ModelError."""
    with torch.random.fork_rng(), _without_report(), loading or nullcontext():
        trunk, missing = load_module(
            AutoModel,
            config,
            device=device,
            setting=PATH_SETTING,
            group=group,
            gradient_checkpointing=gradient_checkpointing,
        )
    if missing:
        raise ModelError(
            f"{PATH_SETTING} must hold a causal language model made of a trunk and an lm_head, got {config.path!r}, "
            f"which lacks {len(missing)} weights of the trunk ({missing[0]}, ...): choose another model, or an "
            "algorithm.advantage without a critic."
        )
    model = ValueModel(trunk, compute_dtype=COMPUTE_DTYPES[config.dtype]).to(device)
    model.group = group
    if (head := Path(config.path) / _HEAD_FILE).exists():
        model.head.load_state_dict(read_tensors(head))
    elif trunk.config.architectures == [type(trunk).__name__]:
        # A policy would name its causal language model here.
        raise ModelError(
            f"{PATH_SETTING} must hold a policy, or a value model with its {_HEAD_FILE}, got a trunk without a head in "
            f"{config.path!r}: copy the whole folder critic/model of a checkpoint."
        )
    return model


def save_value_model(model: ValueModel, folder: Path, *, weights: dict[str, Tensor]) -> None:
    """Write the trunk in transformers format, and the head."""
    parts: dict[str, dict[str, Tensor]] = {"trunk": {}, "head": {}}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor.contiguous()
    model.trunk.save_pretrained(folder, state_dict=parts["trunk"])
    save_file(parts["head"], folder / _HEAD_FILE)


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' report of the unused lm_head."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


# --- the critic ------------------------------------------------------------------------------------------------------
OPTIMIZER_SETTING = "algorithm.critic.optimizer"


class Critic:
    """The value model and its optimizer. Life: (fill_values -> learn)*, once per step. Every method is collective."""

    def __init__(
        self,
        config: CriticConfig,
        *,
        engine: TrainEngine[ValueModel],
        ranks: Ranks,
        num_steps: int,
        updates_per_step: int,
    ) -> None:
        """`num_steps`: of the whole run."""
        self._config = config
        self._ranks = ranks
        self._learning_rate = partial(
            learning_rate, config=config.optimizer, num_steps=num_steps, updates_per_step=updates_per_step
        )
        self.engine = engine
        self.num_updates = 0
        """Optimizer updates so far, restored from a checkpoint."""

    def fill_values(self, batch: Batch, microbatches: Sequence[Microbatch]) -> Batch:
        columns = recompute(batch, microbatches, self.engine.forward, names=["values"], ranks=self._ranks)
        return batch.with_tokens(**columns)

    def learn(self, batch: Batch, updates: Sequence[Sequence[Microbatch]], *, step: int) -> dict[str, float]:
        """Make one optimizer update per entry of `updates`, and return metrics.

        `batch`: from `Objective.prepare`. Raises DivergenceError.
        """
        sums, norms = torch.zeros(3, dtype=torch.float64), []
        for microbatches in updates:
            found = torch.stack([self._backward(batch.tokens.take(m.indices), m) for m in microbatches]).sum(0)
            sums += found.cpu()
            check_loss(found[0], what="the critic's loss", step=step, setting=OPTIMIZER_SETTING, ranks=self._ranks)
            rate = self._learning_rate(self.num_updates)
            norms.append(take_step(self.engine, learning_rate=rate, step=step))
            self.num_updates += 1
        loss, clipped, kept = self._ranks.sum(sums).tolist()
        return describe_values(batch.tokens) | {
            "learner/critic_loss": loss / max(1, len(norms)),
            "learner/critic_grad_norm": sum(norms) / max(1, len(norms)),
            "learner/critic_clip_fraction": clipped / max(1.0, kept),
        }

    def _backward(self, tokens: Tokens, microbatch: Microbatch) -> Tensor:
        """float64[3]: loss, clipped tokens, tokens in the loss."""
        values = self.engine.forward(microbatch)["values"]
        losses, is_clipped = clipped_value_loss(
            values, known(tokens.returns), known(tokens.values), clip=self._config.value_clip
        )
        is_kept = torch.ones_like(is_clipped) if tokens.is_kept is None else tokens.is_kept
        loss = (known(tokens.token_weights) * is_kept * losses).sum()
        self.engine.backward(loss)
        return torch.stack([number.detach().double() for number in (loss, (is_clipped & is_kept).sum(), is_kept.sum())])
