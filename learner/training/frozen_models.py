"""FrozenModels: reference and teacher, the policies that give log-probabilities and are not trained."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested
from slipstream.learner.batching.batch import Batch
from slipstream.learner.batching.microbatch import Microbatch, recompute
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.engines.optimizer import named_weights
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.model import Policy
from slipstream.runtime.lora import adapter_off


class AuxInputs(NamedTuple):
    """Outputs of the frozen models that a forward pass of the learner takes, or that go beside its outputs."""

    arguments: dict[str, Tensor | DeferredLogits]
    """Keyword arguments of that forward pass."""
    outputs: dict[str, Tensor]
    """Numbers per token beside its own."""


class AdapterOff:
    """The policy without its adapter, as the reference of a run that trains one: no second model is in memory."""

    def __init__(self, engine: TrainEngine[Policy]) -> None:
        self._engine = engine

    def __call__(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Collective."""
        with adapter_off(self._engine.model.causal_lm):
            return self._engine.forward(microbatch)

    def logits(self, microbatch: Microbatch) -> Tensor:
        """Collective."""
        with adapter_off(self._engine.model.causal_lm):
            return self._engine.model.logits(microbatch)


class FrozenModels:
    """Whole on every rank, and loaded only where the settings need them."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        reference: Policy | AdapterOff | None = None,
        teacher: Policy | None = None,
    ) -> None:
        self._config = config
        self.reference = reference
        """Policy that the KL term keeps the learner close to."""
        self._teacher = teacher

    def recompute_logprobs(self, batch: Batch, microbatches: Sequence[Microbatch], *, ranks: Ranks) -> Batch:
        """Fill `reference_logprobs` and `teacher_logprobs` where they are used. Collective."""
        if self.reference and self._config.kl.estimator != "full":
            columns = recompute(batch, microbatches, self.reference, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(reference_logprobs=columns["logprobs"])
        if self._teacher and self._config.distillation and not self._config.distillation.takes_candidates:
            columns = recompute(batch, microbatches, self._teacher, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(teacher_logprobs=columns["logprobs"])
        return batch

    @torch.no_grad()
    def aux_inputs(self, microbatch: Microbatch) -> AuxInputs:
        """Outputs over the vocabulary, too large for a column of the batch, so computed per microbatch."""
        aux = AuxInputs({}, {})
        if self.reference and self._config.kl.estimator == "full":
            aux.arguments["reference_logits"] = self.reference.logits(microbatch)
        if self._teacher and self._config.distillation and self._config.distillation.takes_candidates:
            likely = self._teacher(microbatch, requested=Requested(top_k=self._config.distillation.top_k))
            aux.arguments["candidates"] = likely["top_tokens"]
            aux.outputs["teacher_candidate_logprobs"] = likely["top_logprobs"]
        return aux

    @torch.no_grad()
    def refresh_reference(self, engine: TrainEngine, *, step: int) -> None:
        """Replace the reference by the learner of this step, if one is due. Collective."""
        every = self._config.kl.refresh_every_steps
        if isinstance(self.reference, Policy) and every and step % every == 0:
            targets = dict(named_weights(self.reference.causal_lm))
            for name, parameter in engine.gather_parameters():
                targets[name].copy_(parameter)
