"""SftTrainer: from demonstrations to an optimizer step.

    loss = - sum of log pi(token) / number of tokens,  over all trained tokens of the step

Invariant: the denominator counts the whole step, so its split into microbatches and ranks changes no gradient.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.configs.run import RunConfig
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.engines.optimizer import learning_rate
from slipstream.learner.ranks import Ranks
from slipstream.learner.sft.demonstration import Demonstration
from slipstream.learner.training.trainer import Trainer


class SftTrainer:
    """One per rank. Life: (step | loss)*. Every method is collective."""

    def __init__(self, run: RunConfig, *, trainer: Trainer, ranks: Ranks, num_steps: int) -> None:
        """`trainer` collates and updates the weights, as for trajectories. `num_steps` of the whole run."""
        self._optimizer = run.learner.optimizer
        self._batch_size = run.sft.trajectories_per_step
        self._trainer = trainer
        self._ranks = ranks
        self._num_steps = num_steps

    def step(self, demonstrations: Sequence[Demonstration], *, step: int) -> dict[str, float]:
        """Make one optimizer update; returns its metrics, the same on all ranks.

        Raises DivergenceError, with the weights of the step before.
        """
        num_tokens = count_tokens(demonstrations)
        microbatches = self._trainer.collate(to_samples(demonstrations))
        losses = [self._backward(microbatch, num_tokens=num_tokens) for microbatch in microbatches]
        rate = learning_rate(self._trainer.num_updates, config=self._optimizer, total_updates=self._num_steps)
        norm = self._trainer.finish_update(losses, learning_rate=rate, step=step)
        return {
            "learner/loss": self._sum(losses),
            "learner/grad_norm": norm,
            **self._trainer.gradients.report(self._ranks),
            "learner/learning_rate": rate,
            "learner/tokens": float(num_tokens),
            "learner/computed_tokens": self._sum([torch.tensor(float(m.num_tokens)) for m in microbatches]),
            "learner/trajectories": float(len(demonstrations)),
        }

    @torch.no_grad()
    def loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Mean over all trained tokens, nats; holds a batch of `trajectories_per_step` in memory at a time."""
        parts = [demonstrations[i : i + self._batch_size] for i in range(0, len(demonstrations), self._batch_size)]
        microbatches = (microbatch for part in parts for microbatch in self._trainer.collate(to_samples(part)))
        losses = [-self._logprobs(microbatch).double().sum() for microbatch in microbatches]
        return self._sum(losses) / count_tokens(demonstrations)

    def _backward(self, microbatch: Microbatch, *, num_tokens: int) -> Tensor:
        loss = -self._logprobs(microbatch).sum() / num_tokens
        self._trainer.engine.backward(loss)
        return loss.detach()

    def _logprobs(self, microbatch: Microbatch) -> Tensor:
        return self._trainer.engine.forward(microbatch)["logprobs"]

    def _sum(self, values: Sequence[Tensor]) -> float:
        """Sum over microbatches and ranks."""
        return float(self._ranks.sum(torch.stack(list(values)).double().sum().cpu().reshape(1)))


def count_tokens(demonstrations: Sequence[Demonstration]) -> int:
    """Trained tokens of all demonstrations together."""
    return sum(len(demonstration.trained) for demonstration in demonstrations)


def to_samples(demonstrations: Sequence[Demonstration]) -> list[Sample]:
    """Samples for the collator, each a group of its own: demonstrations share no prompt."""
    trained = [demonstration.trained for demonstration in demonstrations]
    starts = [0, *accumulate(map(len, trained))]
    return [
        Sample(demonstration.token_ids, indices, start, group_id=str(index))
        for index, (demonstration, indices, start) in enumerate(zip(demonstrations, trained, starts, strict=False))
    ]
