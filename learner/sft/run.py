"""SftRun: supervised fine-tuning from the first step to the final model.

Invariant: a step's demonstrations depend only on seed and step number, so a resumed run continues bit for bit and all
ranks agree.

SftTrainer: one optimizer step on demonstrations.

    loss = - sum of log pi(token) / number of tokens,  over all trained tokens of the step

Tokens with log-probability -inf add nothing. Experts add their auxiliary loss, here and below.

PairTrainer: one optimizer step of a reward model on pairs.

    loss = - mean over pairs of log sigmoid(score(chosen) - score(rejected))

Invariant: denominators cover the whole step, so microbatches and ranks do not change gradients.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, isfinite
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.buffer.object_folder import check_storage
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.sampling import row_of
from slipstream.buffer.store_rules import check_same_run
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import RunConfig
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.build import build_trainer
from slipstream.learner.checkpoint import BestCheckpoint, Checkpoints
from slipstream.learner.engines.optimizer import learning_rate
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import SILENCE_S, Ranks, join_ranks
from slipstream.learner.sft.dataset import Demonstration, Pair, SftFile, read_heldout, read_train
from slipstream.learner.training.saved_model import save_model
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.run_folder import RunFolder

log = structlog.get_logger(__name__)


class SftTrainer:
    """One per rank. Life: (step | measure)*. Every method is collective."""

    def __init__(self, run: RunConfig, *, trainer: Trainer, ranks: Ranks, num_steps: int) -> None:
        """`num_steps`: of the whole run."""
        self._optimizer = run.learner.optimizer
        self._batch_size = run.sft.batch_size
        self._trainer = trainer
        self._ranks = ranks
        self._num_steps = num_steps

    def step(self, demonstrations: Sequence[Demonstration], *, step: int) -> dict[str, float]:
        """Make one update. Returns metrics, equal on all ranks. Raises DivergenceError."""
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
        """Metrics common to all objectives."""
        rate = learning_rate(self._trainer.num_updates, config=self._optimizer, num_steps=self._num_steps)
        return {
            "learner/grad_norm": self._trainer.finish_update(losses, learning_rate=rate, step=step),
            **self._trainer.gradients.report(self._ranks),
            "learner/learning_rate": rate,
            "learner/computed_tokens": self._sum([torch.tensor(float(m.num_tokens)) for m in microbatches]),
        }

    @torch.no_grad()
    def measure(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """`eval/loss`: mean loss over possible trained tokens, nats."""
        parts = [demonstrations[i : i + self._batch_size] for i in range(0, len(demonstrations), self._batch_size)]
        microbatches = (microbatch for part in parts for microbatch in self._trainer.collate(to_samples(part)))
        found = [(logprobs.double().sum(), count) for logprobs, count, _ in map(self._logprobs, microbatches)]
        num_tokens, num_impossible = count_tokens(demonstrations), int(self._sum([count for _, count in found]))
        if num_impossible:
            log.warning("impossible_tokens_left_out", tokens=num_impossible, of=num_tokens)
        return {"eval/loss": -self._sum([total for total, _ in found]) / max(1, num_tokens - num_impossible)}

    def _logprobs(self, microbatch: Microbatch, **prices: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probabilities of trained tokens, 0 for impossible ones (-inf); their number; and all outputs."""
        outputs = self._trainer.engine.forward(microbatch, **prices)
        logprobs = outputs["logprobs"]
        # One -inf would make the loss infinite. NaN stays and ends the run: the model is broken.
        is_impossible = logprobs.detach() == -torch.inf
        return logprobs.masked_fill(is_impossible, 0.0), is_impossible.sum(), outputs

    def _sum(self, values: Sequence[Tensor]) -> float:
        return float(self._ranks.sum(torch.stack(list(values)).double().sum().cpu().reshape(1)))


class PairTrainer(SftTrainer):
    """Trains a reward model on pairs.

    Source: Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, eq. 1.
    """

    def step(self, pairs: Sequence[Pair], *, step: int) -> dict[str, float]:  # type: ignore[override]
        samples = _pair_samples(pairs)
        self._trainer.check_rows(samples, step=step)
        microbatches = self._trainer.collate(samples)
        loss, accuracy, slopes = self._compare(microbatches, num_pairs=len(pairs))
        prices = self._trainer.expert_prices(microbatches)
        for microbatch in microbatches:
            # A pair's answers may be on different ranks, so each is scaled by the slope of the step's loss, from a pass
            # without gradients.
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

    def measure(self, pairs: Sequence[Pair]) -> dict[str, float]:
        parts = [pairs[i : i + self._batch_size] for i in range(0, len(pairs), self._batch_size)]
        found = [self._compare(self._trainer.collate(_pair_samples(part)), num_pairs=len(part)) for part in parts]
        weights = [len(part) / len(pairs) for part in parts]
        return {
            "eval/loss": sum(weight * float(loss) for weight, (loss, _, _) in zip(weights, found, strict=True)),
            "eval/pair_accuracy": sum(weight * right for weight, (_, right, _) in zip(weights, found, strict=True)),
        }

    @torch.no_grad()
    def _compare(self, microbatches: Sequence[Microbatch], *, num_pairs: int) -> tuple[Tensor, float, Tensor]:
        """Loss, accuracy, and d loss / d score, float32[2 * num_pairs]."""
        scores = torch.zeros(2 * num_pairs, device=self._trainer.engine.device)
        for microbatch in microbatches:
            scores[microbatch.indices] = self._trainer.engine.forward(microbatch)["scores"].float()
        margins = self._ranks.sum(scores).reshape(-1, 2) @ torch.tensor([1.0, -1.0], device=scores.device)
        slopes = -torch.sigmoid(-margins) / num_pairs
        accuracy = float((margins > 0).float().mean())
        return -logsigmoid(margins).mean(), accuracy, torch.stack([slopes, -slopes], 1).flatten()


def _pair_samples(pairs: Sequence[Pair]) -> list[Sample]:
    """Chosen and rejected answers in alternation, each with a token that is never read."""
    return [
        Sample(np.append(answer, 0), np.array([len(answer)]), 2 * index + place, group_id=str(index))
        for index, pair in enumerate(pairs)
        for place, answer in enumerate((pair.chosen, pair.rejected))
    ]


def count_tokens(demonstrations: Sequence[Demonstration]) -> int:
    """Count the tokens to learn."""
    return sum(len(demonstration.trained) for demonstration in demonstrations)


def to_samples(demonstrations: Sequence[Demonstration]) -> list[Sample]:
    """Samples in separate groups: they share no prompt."""
    trained = [demonstration.trained for demonstration in demonstrations]
    starts = [0, *accumulate(map(len, trained))]
    return [
        Sample(demonstration.token_ids, indices, start, group_id=str(index))
        for index, (demonstration, indices, start) in enumerate(zip(demonstrations, trained, starts, strict=False))
    ]


_SHOWN = ("step", "epoch", "learner/loss", "eval/loss", "eval/pair_accuracy")


class SftRun:
    """One per rank. Rank 0 writes the files of docs/sft.md."""

    def __init__(self, run: RunConfig, *, device: torch.device, rank: int = 0) -> None:
        """Blocks until all ranks have joined. Raises ConfigError, LearnerError."""
        self._run = run
        self._files = {"train": read_train(run), "heldout": read_heldout(run)}
        self._train, self._heldout = (file.demonstrations for file in self._files.values())
        self._folder = folder = RunFolder(run)
        ranks = join_ranks(rank=rank, size=run.learner.num_ranks, device=device, silence_s=SILENCE_S)
        self._ranks = ranks
        if ranks.is_first:
            folder.begin()
        torch.manual_seed(run.seed)
        # Without critic, teacher, or reference.
        self._trainer = build_trainer(msgspec.structs.replace(run, algorithm=AlgorithmConfig()), ranks=ranks)
        self._checkpoints = Checkpoints(folder.checkpoints, run=run, trainer=self._trainer, ranks=ranks)
        self._num_steps = count_steps(run, num_rows=len(self._train))
        kind = PairTrainer if run.trains_reward_model else SftTrainer
        self._sft = kind(run, trainer=self._trainer, ranks=ranks, num_steps=self._num_steps)
        self._step = 0
        # Every rank flushes before rank 0 judges.
        self._best = BestCheckpoint(run.learner.checkpoint.best, folder, flush=lambda: None) if ranks.is_first else None
        self._disk = DiskWait()
        self._started_at = time.monotonic()

    def run(self) -> None:
        """Train from the newest checkpoint or the beginning. Raises LearnerError, ConfigError."""
        if self._ranks.is_first:
            # Shows other processes that the run is in progress.
            self._folder.lock()
        try:
            self._start()
            while self._step < self._num_steps:
                self._train_one_step()
            self._finish()
        except DivergenceError as error:
            raise self._checkpoints.with_remedy(error) from None
        finally:
            self._folder.unlock()

    def _start(self) -> None:
        # Ranks might see different checkpoints.
        newest_first = msgspec.json.encode(self._checkpoints.names()[::-1]) if self._ranks.is_first else None
        (found,) = self._ranks.broadcast_bytes([newest_first] if newest_first else None)
        if names := msgspec.json.decode(found):
            self._step = self._checkpoints.restore_finite(names).step
        self._checkpoints.begin_life()
        if self._best:
            self._best.resume()
        log.info("starting", step=self._step, num_steps=self._num_steps, rows=len(self._train))
        if self._ranks.is_first:
            self._folder.record_training()
            # The clock continues from the rows that the checkpoint covers.
            kept = self._keep_rows(up_to_step=self._step or -1)
            self._started_at = time.monotonic() - (kept[-1]["time_s"] if kept else 0.0)
        if self._step == 0 and self._heldout:
            self._add_row(self._measure(self._heldout))

    def _train_one_step(self) -> None:
        started_at = time.monotonic()
        step = self._step + 1
        metrics = self._sft.step(choose_rows(self._run, self._train, step=step), step=step)
        self._trainer.check_weights(step=step)
        self._step = step
        seconds = time.monotonic() - started_at
        times = {"learner/train_s": seconds, "learner/tokens_per_s": metrics["learner/tokens"] / max(1e-9, seconds)}
        every, is_last = self._run.sft.eval_every_steps, step == self._num_steps
        is_due = bool(self._heldout) and (is_last or (every > 0 and step % every == 0))
        measured = self._measure(self._heldout) if is_due else {}
        self._add_row(metrics | times | measured)
        if measured and self._run.learner.checkpoint.best:
            newest = self._checkpoint()
            self._checkpoints.saver.flush()
            if self._best:
                self._best.add(newest)
                self._best.judge({**measured, "eval/version": newest.version})
        elif step % self._run.learner.checkpoint.every_steps == 0:
            self._checkpoint()

    def _measure(self, rows: Sequence[Any]) -> dict[str, float]:
        """Raises DivergenceError unless weights and loss are finite."""
        self._trainer.check_weights(step=self._step)
        measured = self._sft.measure(rows)
        # Equal on all ranks, so they raise together.
        if not isfinite(loss := measured["eval/loss"]):
            raise DivergenceError(
                f"the evaluation loss must be finite after step {self._step}, got {loss}: the weights are finite, so "
                "look for overflow in model.dtype."
            )
        return measured

    def _add_row(self, metrics: dict[str, float]) -> None:
        """Step 0 has only held-out metrics, measured before training."""
        if not self._ranks.is_first:
            return
        row = {"step": self._step, "epoch": self._epoch, "time_s": round(time.monotonic() - self._started_at, 3)}
        row |= metrics
        self._disk.retry(lambda: self._folder.append_metrics(row), what="the metrics", path=self._folder.metrics)
        log.info("step", **{key: round(row[key], 4) for key in _SHOWN if key in row})

    def _keep_rows(self, *, up_to_step: int) -> list[dict[str, Any]]:
        return self._disk.retry(
            lambda: [*self._folder.keep_metrics(up_to_step=up_to_step)], what="the metrics", path=self._folder.metrics
        )

    @property
    def _epoch(self) -> float:
        return count_seen(self._run, num_rows=len(self._train), step=self._step) / len(self._train)

    def _checkpoint(self) -> CheckpointPointer:
        # Finite weights can still produce NaN outputs.
        self._measure((self._heldout or self._train)[:1])
        pinned = self._best.pinned if self._best else set()
        return self._checkpoints.save(
            step=self._step,
            version=self._step,
            finish=lambda pointer: self._checkpoints.prune(pinned={pointer.name, *pinned}),
        )

    def _finish(self) -> None:
        self._checkpoint()
        self._checkpoints.saver.flush()
        final, engine, config = self._folder.final_model, self._trainer.engine, self._run.model
        save_model(engine, final, config=config, ranks=self._ranks, disk=self._disk)
        if self._best:
            best = self._disk.retry(self._best.export, what="the best model", path=self._folder.best_model)
            self._checkpoints.upload([self._folder.final_model, *([best] if best else [])])
        self._checkpoints.saver.flush()
        if self._ranks.is_first:
            rows = self._keep_rows(up_to_step=self._step)
            trained = [row for row in rows if row["step"] > 0]
            losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
            seconds = rows[-1]["time_s"] if rows else 0.0
            # Values without rows are null.
            summary = {
                "eval_loss": losses.get(self._step),
                "eval_loss_before": losses.get(0),
                "eval_pair_accuracy": rows[-1].get("eval/pair_accuracy") if rows else None,
                "train_loss": trained[-1]["learner/loss"] if trained else None,
                "steps": self._step,
                "epochs": self._epoch,
                "train_seconds": seconds,
                "learner_tokens_per_s": sum(row["learner/tokens"] for row in trained) / max(1e-9, seconds),
                **_counts("train", self._files["train"]),
                **_counts("eval", self._files["heldout"]),
                "seed": self._run.seed,
                "mode": self._run.mode,
            }
            self._disk.retry(lambda: self._folder.write_summary(summary), what="the summary", path=self._folder.summary)
        self._ranks.barrier()
        log.info("finished", step=self._step)


def _counts(name: str, file: SftFile) -> dict[str, Any]:
    rows = f"{name}_rows"
    return {rows: len(file.demonstrations), f"{rows}_empty": file.num_empty, f"{rows}_too_long": file.num_too_long}


def count_steps(run: RunConfig, *, num_rows: int) -> int:
    """Steps of the run. The last may be smaller."""
    epochs = run.learner.epochs
    return ceil(epochs * num_rows / run.sft.batch_size) if epochs else run.learner.max_steps


def count_seen(run: RunConfig, *, num_rows: int, step: int) -> int:
    """Demonstrations in the first `step` steps, with repetitions."""
    seen = step * run.sft.batch_size
    return min(seen, run.learner.epochs * num_rows) if run.learner.epochs else seen


def choose_rows(run: RunConfig, train: Sequence[Any], *, step: int) -> list[Any]:
    """Demonstrations of `step` (>= 1): each row once per epoch, in an order from the seed."""
    first, end = (count_seen(run, num_rows=len(train), step=at) for at in (step - 1, step))
    return [train[row_of(ordinal, num_rows=len(train), seed=run.seed)] for ordinal in range(first, end)]


def check_sft(run: RunConfig) -> None:
    """Check name, settings, and several ranks' files. Raises ConfigError, RunConflictError."""
    folder = RunFolder(run)
    folder.check_name()
    check_storage(run, has_folder=folder.has_run)
    before = folder.path / "config.yaml"
    if before.exists() and not folder.is_untrained:
        try:
            stored = msgspec.json.encode(msgspec.yaml.decode(before.read_bytes())).decode()
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{before} must be readable to continue the run: {error}") from None
        opened = msgspec.json.encode(to_plain(run)).decode()
        check_same_run(run.name, stored=(stored, 0, run.seed), opened=(opened, 0, run.seed))
    if run.learner.num_ranks > 1:
        read_train(run)
        read_heldout(run)
