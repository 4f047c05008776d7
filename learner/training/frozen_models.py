"""FrozenModels: the reference and teacher policies, which are not trained.

They route tokens to experts themselves, because recorded experts belong to the trained policy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.engines.engine import ModelEngine, TrainEngine
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.model import Policy
from slipstream.runtime.lora import adapter_off


class AdapterOff:
    """The policy with its adapter disabled, a reference without a second model in memory."""

    def __init__(self, engine: TrainEngine[Policy]) -> None:
        self._engine = engine

    def forward(self, microbatch: Microbatch, **options: Any) -> dict[str, Any]:
        """Collective."""
        with adapter_off(self._engine.model.causal_lm):
            return self._engine.forward(microbatch, **options)


class FrozenModels:
    """Reference and teacher, if the settings need them."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        reference: ModelEngine[Policy] | AdapterOff | None = None,
        teacher: ModelEngine[Policy] | None = None,
    ) -> None:
        self._config = config
        self._reference = reference
        self._teacher = teacher

    @property
    def refreshed(self) -> ModelEngine[Policy] | None:
        """The reference if it changes during training, else None."""
        if isinstance(self._reference, AdapterOff):
            return None
        return self._reference if self._config.kl.refresh_every_steps else None

    def recompute_logprobs(self, batch: Batch, microbatches: Sequence[Microbatch], *, ranks: Ranks) -> Batch:
        """Fill `reference_logprobs` and `teacher_logprobs` if needed. Collective."""
        microbatches = [replace(microbatch, experts=None) for microbatch in microbatches]
        if self._reference and self._config.kl.estimator != "full":
            columns = recompute(batch, microbatches, self._reference.forward, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(reference_logprobs=columns["logprobs"])
        if self._teacher and self._config.distillation and not self._config.distillation.takes_candidates:
            columns = recompute(batch, microbatches, self._teacher.forward, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(teacher_logprobs=columns["logprobs"])
        return batch

    @torch.no_grad()
    def aux_inputs(self, microbatch: Microbatch) -> tuple[dict[str, Tensor | DeferredLogits], dict[str, Tensor]]:
        """Arguments for the learner's forward pass, and outputs, too large for the whole batch."""
        arguments, outputs = dict[str, Tensor | DeferredLogits](), dict[str, Tensor]()
        microbatch = replace(microbatch, experts=None)
        if self._reference and self._config.kl.estimator == "full":
            arguments["reference_logits"] = self._reference.forward(microbatch, requested=None)["logits"]
        if self._teacher and self._config.distillation and self._config.distillation.takes_candidates:
            likely = self._teacher.forward(microbatch, requested=Requested(top_k=self._config.distillation.top_k))
            arguments["candidates"] = likely["top_tokens"]
            outputs["teacher_candidate_logprobs"] = likely["top_logprobs"]
        return arguments, outputs

    @torch.no_grad()
    def refresh_reference(self, engine: TrainEngine, *, step: int) -> None:
        """Copy the learner into the reference if due at this step. Collective."""
        every = self._config.kl.refresh_every_steps
        if self.refreshed and every and step % every == 0:
            self.refreshed.load_parameters(engine.gather_parameters())
