"""SftTrainer: from demonstrations to an optimizer step.

    loss = - sum of log pi(token) / number of tokens,  over all trained tokens of the step

A token that the model finds impossible (-inf) has no loss.

and of a reward model from pairs

    loss = - mean over pairs of log sigmoid(score(chosen) - score(rejected))

Invariant: the denominator counts the whole step, so its split into microbatches and ranks changes no gradient.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.configs.run import RunConfig
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.engines.optimizer import learning_rate
from slipstream.learner.ranks import Ranks
from slipstream.learner.sft.dataset import Demonstration, Pair
from slipstream.learner.training.trainer import Trainer

log = structlog.get_logger(__name__)


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
        samples = to_samples(demonstrations)
        self._trainer.check_rows(samples, step=step)
        microbatches = self._trainer.collate(samples)
        losses, num_impossible = [], []
        prices = self._trainer.expert_prices(microbatches)
        for microbatch in microbatches:
            logprobs, impossible, outputs = self._logprobs(microbatch, **prices)
            loss = -logprobs.sum() / num_tokens + outputs.get("aux_loss", 0.0)
            self._trainer.engine.backward(loss)
            losses.append(loss.detach())
            num_impossible.append(impossible)
        return {
            "learner/loss": self._sum(losses),
            **self._finish(losses, microbatches, step=step),
            "learner/tokens": float(num_tokens),
            "learner/trajectories": float(len(demonstrations)),
            "learner/nonfinite_fraction": self._sum(num_impossible) / num_tokens,
        }

    def _finish(self, losses: Sequence[Tensor], microbatches: Sequence[Microbatch], *, step: int) -> dict[str, float]:
        """Move the parameters; return the metrics of every objective."""
        rate = learning_rate(self._trainer.num_updates, config=self._optimizer, total_updates=self._num_steps)
        return {
            "learner/grad_norm": self._trainer.finish_update(losses, learning_rate=rate, step=step),
            **self._trainer.gradients.report(self._ranks),
            "learner/learning_rate": rate,
            "learner/computed_tokens": self._sum([torch.tensor(float(m.num_tokens)) for m in microbatches]),
        }

    def measure(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        return {"eval/loss": self.loss(demonstrations)}

    @torch.no_grad()
    def loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Mean over all trained tokens but impossible ones, nats; `trajectories_per_step` are in memory at a time."""
        parts = [demonstrations[i : i + self._batch_size] for i in range(0, len(demonstrations), self._batch_size)]
        microbatches = (microbatch for part in parts for microbatch in self._trainer.collate(to_samples(part)))
        found = [(logprobs.double().sum(), count) for logprobs, count, _ in map(self._logprobs, microbatches)]
        num_tokens, num_impossible = count_tokens(demonstrations), int(self._sum([count for _, count in found]))
        if num_impossible:
            log.warning("impossible_tokens_left_out", tokens=num_impossible, of=num_tokens)
        return -self._sum([total for total, _ in found]) / max(1, num_tokens - num_impossible)

    def _logprobs(self, microbatch: Microbatch, **prices: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probabilities of the trained tokens, 0 for those that the model finds impossible; their number; all
        outputs of the forward pass."""
        outputs = self._trainer.engine.forward(microbatch, **prices)
        logprobs = outputs["logprobs"]
        # One -inf would make the loss infinite. NaN stays, and ends the run, because it is the model that is broken.
        is_impossible = logprobs.detach() == -torch.inf
        return logprobs.masked_fill(is_impossible, 0.0), is_impossible.sum(), outputs

    def _sum(self, values: Sequence[Tensor]) -> float:
        """Sum over microbatches and ranks."""
        return float(self._ranks.sum(torch.stack(list(values)).double().sum().cpu().reshape(1)))


class PairTrainer(SftTrainer):
    """Trains a reward model on pairs. Life and methods as of SftTrainer.

    Source: Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, eq. 1.
    """

    def step(self, pairs: Sequence[Pair], *, step: int) -> dict[str, float]:  # type: ignore[override]
        samples = _pair_samples(pairs)
        self._trainer.check_rows(samples, step=step)
        microbatches = self._trainer.collate(samples)
        loss, accuracy, slopes = self._compare(microbatches, num_pairs=len(pairs))
        prices = self._trainer.expert_prices(microbatches)
        for microbatch in microbatches:
            # The two of a pair may be in different microbatches, on different ranks: each is moved by the slope of the
            # whole step's loss, which is known from a pass without gradient.
            outputs = self._trainer.engine.forward(microbatch, **prices)
            loss_part = (outputs["scores"] * slopes[microbatch.indices]).sum()
            self._trainer.engine.backward(loss_part + outputs.get("aux_loss", 0.0))
        return {
            "learner/loss": float(loss),
            "learner/pair_accuracy": accuracy,
            **self._finish([loss], microbatches, step=step),
            "learner/tokens": float(sum(len(pair.token_ids) for pair in pairs)),
            "learner/trajectories": float(len(pairs)),
        }

    def measure(self, pairs: Sequence[Pair]) -> dict[str, float]:  # type: ignore[override]
        parts = [pairs[i : i + self._batch_size] for i in range(0, len(pairs), self._batch_size)]
        found = [self._compare(self._trainer.collate(_pair_samples(part)), num_pairs=len(part)) for part in parts]
        weights = [len(part) / len(pairs) for part in parts]
        return {
            "eval/loss": sum(weight * float(loss) for weight, (loss, _, _) in zip(weights, found, strict=True)),
            "eval/pair_accuracy": sum(weight * right for weight, (_, right, _) in zip(weights, found, strict=True)),
        }

    @torch.no_grad()
    def _compare(self, microbatches: Sequence[Microbatch], *, num_pairs: int) -> tuple[Tensor, float, Tensor]:
        """Loss of the pairs, share whose chosen one has the higher score, and d loss / d score, float32[2 pairs]."""
        scores = torch.zeros(2 * num_pairs, device=self._trainer.engine.device)
        for microbatch in microbatches:
            scores[microbatch.indices] = self._trainer.engine.forward(microbatch)["scores"].float()
        margins = self._ranks.sum(scores).reshape(-1, 2) @ torch.tensor([1.0, -1.0], device=scores.device)
        slopes = -torch.sigmoid(-margins) / num_pairs
        return (
            -logsigmoid(margins).mean(),
            float((margins > 0).float().mean()),
            torch.stack([slopes, -slopes], 1).flatten(),
        )


def _pair_samples(pairs: Sequence[Pair]) -> list[Sample]:
    """Chosen and rejected in turn; a pair's prompt is computed once. The token after the last is never read."""
    return [
        Sample(np.append(answer, 0), np.array([len(answer)]), 2 * index + place, group_id=str(index))
        for index, pair in enumerate(pairs)
        for place, answer in enumerate((pair.chosen, pair.rejected))
    ]


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
