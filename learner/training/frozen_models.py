"""FrozenModels: the policies that are asked about what was written and are not trained: reference and teacher."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.algorithm_terms import DistillationConfig
from slipstream.learner.algorithms import distillation
from slipstream.learner.batching.batch import Batch, Tokens, known
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.batching.recompute import recompute_logprobs
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.engines.optimizer import named_parameters
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.model import Policy


# @@ Teacher: another model's aux_inputs of what the learner's policy wrote, and what it adds to advantages and loss.
class Candidates(NamedTuple):
    """What the teacher finds most likely at each token."""

    token_ids: Tensor
    """int64[N, K]."""
    logprobs: Tensor
    """float32[N, K], its own, at the generator's temperature."""


@torch.no_grad()
def candidates(teacher: Policy, microbatch: Microbatch, *, top_k: int) -> Candidates:
    """Most likely first."""
    logits = teacher.logits(microbatch).float() / microbatch.temperatures[:, None]
    best = logits.log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    return Candidates(best.indices, best.values)


def teach_advantages(batch: Batch, *, config: DistillationConfig) -> Batch:
    """A prepared batch with the teacher's advantages, instead of the rewards' or beside them."""
    advantages = known(batch.tokens.advantages)
    if not config.with_rewards:
        advantages = torch.zeros_like(advantages)
    if config.divergence == "k1":
        own, teachers = known(batch.tokens.start_logprobs), known(batch.tokens.teacher_logprobs)
        advantages = advantages + config.coefficient * distillation.teacher_advantages(
            own, teachers, bound=config.bound
        )
    return batch.with_tokens(advantages=advantages)


def teaching_losses(tokens: Tokens, measured: dict[str, Tensor], *, config: DistillationConfig) -> Tensor:
    """Float[N], already weighted; 0 where the teacher speaks through advantages.

    `measured` has the learner's `candidate_logprobs` and the teacher's `teacher_candidate_logprobs` where candidates
    are compared.
    """
    if config.divergence == "k1":
        return torch.zeros_like(measured["logprobs"])
    if config.divergence == "k3":
        losses = distillation.sampled_k3(measured["logprobs"], known(tokens.teacher_logprobs), max_loss=config.bound)
    elif config.divergence == "forward_kl_topk":
        losses = distillation.forward_kl_topk(
            measured["candidate_logprobs"], measured["teacher_candidate_logprobs"], renormalise=config.renormalise
        )
    else:
        losses = distillation.generalised_jsd(
            measured["candidate_logprobs"],
            measured["teacher_candidate_logprobs"],
            beta=config.beta,
            renormalise=config.renormalise,
        )
    return config.coefficient * losses


class AuxInputs(NamedTuple):
    """What frozen_models say of a microbatch that a forward pass of the learner must know."""

    asked: dict[str, Tensor]
    """Arguments of that pass."""
    known: dict[str, Tensor]
    """What goes beside its results."""


class FrozenModels:
    """Whole on every rank, and in memory only where the settings need them."""

    def __init__(
        self, config: AlgorithmConfig, *, reference: Policy | None = None, teacher: Policy | None = None
    ) -> None:
        self._config = config
        self.reference = reference
        """What the learner is held near to."""
        self._teacher = teacher

    def recompute_logprobs(self, batch: Batch, microbatches: Sequence[Microbatch], *, ranks: Ranks) -> Batch:
        """Fill the columns of log-probabilities that are theirs. Collective."""
        if self.reference and self._config.kl.estimator != "full":
            columns = recompute_logprobs(batch, microbatches, self.reference, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(reference_logprobs=columns["logprobs"])
        if self._teacher and self._config.distillation and not self._config.distillation.takes_candidates:
            columns = recompute_logprobs(batch, microbatches, self._teacher, names=["logprobs"], ranks=ranks)
            batch = batch.with_tokens(teacher_logprobs=columns["logprobs"])
        return batch

    @torch.no_grad()
    def aux_inputs(self, microbatch: Microbatch) -> AuxInputs:
        """What no column can hold, since it takes the vocabulary."""
        aux_inputs = AuxInputs({}, {})
        if self.reference and self._config.kl.estimator == "full":
            aux_inputs.asked["reference_logits"] = self.reference.logits(microbatch)
        if self._teacher and self._config.distillation and self._config.distillation.takes_candidates:
            best = candidates(self._teacher, microbatch, top_k=self._config.distillation.top_k)
            aux_inputs.asked["candidates"] = best.token_ids
            aux_inputs.known["teacher_candidate_logprobs"] = best.logprobs
        return aux_inputs

    @torch.no_grad()
    def refresh_reference(self, engine: TrainEngine, *, step: int) -> None:
        """The reference becomes the learner of a step that is due. Collective."""
        every = self._config.kl.refresh_every_steps
        if self.reference and every and step % every == 0:
            targets = dict(named_parameters(self.reference.causal_lm))
            for name, parameter in engine.gather_parameters():
                targets[name].copy_(parameter)
