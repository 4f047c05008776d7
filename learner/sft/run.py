"""SftRun: supervised fine-tuning from the first step to the final model.

Consumes: demonstrations, which every rank reads by itself.
Produces: checkpoints, metrics, the final model, the best one.
Waits for: the other ranks, in collective operations.
Invariant: the demonstrations of a step are a function of the seed and its number, so a resumed run continues bit for
bit, and all ranks agree without communication.
"""

import time
from collections.abc import Sequence
from math import ceil, isfinite
from typing import Any

import msgspec
import structlog
import torch

from slipstream.buffer.object_folder import check_storage
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.sampling import row_of
from slipstream.buffer.transitions import check_same_run
from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import RunConfig
from slipstream.learner.best_checkpoint import BestCheckpoint
from slipstream.learner.build import build_trainer
from slipstream.learner.checkpoint import Checkpoints, write_model
from slipstream.learner.engines.engine import gather_to_first
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import Ranks, join_ranks
from slipstream.learner.sft.dataset import SftFile, read_heldout, read_train
from slipstream.learner.sft.trainer import PairTrainer, SftTrainer
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.clock import Clock
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.run_folder import RunFolder

_SHOWN = ("step", "epoch", "learner/loss", "eval/loss", "eval/pair_accuracy")

log = structlog.get_logger(__name__)


class SftLog:
    """Writes `metrics.jsonl` and `summary.json`, on rank 0: see docs/sft.md. Life: start -> add* -> finish."""

    def __init__(
        self, run: RunConfig, *, folder: RunFolder, train: SftFile, heldout: SftFile, clock: Clock = time.monotonic
    ) -> None:
        self._folder = folder
        self._disk = DiskWait()
        self._run = run
        self._train = train
        self._heldout = heldout
        self._clock = clock
        self._started_at = clock()

    def start(self, *, step: int) -> None:
        """Start the clock of the run; a resumed run continues from the rows that its checkpoint covers."""
        kept = self._keep(up_to_step=step if step else -1)
        self._started_at = self._clock() - (kept[-1]["time_s"] if kept else 0.0)

    def add(self, *, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Write a row; that of step 0 holds only the held-out loss before training."""
        row = {"step": step, "epoch": epoch, "time_s": round(self._clock() - self._started_at, 3), **metrics}
        self._disk.retry(lambda: self._folder.append_metrics(row), what="the metrics", path=self._folder.metrics)
        log.info("step", **{key: round(row[key], 4) for key in _SHOWN if key in row})

    def finish(self, *, step: int, epoch: float) -> None:
        """Write the summary of all rows; null is what it lacks when somebody has deleted them."""
        rows = self._keep(up_to_step=step)
        trained = [row for row in rows if row["step"] > 0]
        losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
        seconds = rows[-1]["time_s"] if rows else 0.0
        summary = {
            "heldout_loss": losses.get(step),
            "heldout_loss_before": losses.get(0),
            "heldout_pair_accuracy": rows[-1].get("eval/pair_accuracy") if rows else None,
            "train_loss": trained[-1]["learner/loss"] if trained else None,
            "steps": step,
            "epochs": epoch,
            "train_seconds": seconds,
            "learner_tokens_per_s": sum(row["learner/tokens"] for row in trained) / max(1e-9, seconds),
            **_counts("train", self._train),
            **_counts("heldout", self._heldout),
            "seed": self._run.seed,
            "mode": self._run.mode,
        }
        self._disk.retry(lambda: self._folder.write_summary(summary), what="the summary", path=self._folder.summary)

    def _keep(self, *, up_to_step: int) -> list[dict[str, Any]]:
        return self._disk.retry(
            lambda: self._folder.keep_metrics(up_to_step=up_to_step), what="the metrics", path=self._folder.metrics
        )


def _counts(name: str, file: SftFile) -> dict[str, Any]:
    return {
        f"{name}_rows": len(file.demonstrations),
        f"{name}_rows_empty": file.num_empty,
        f"{name}_rows_too_long": file.num_too_long,
    }


class SftRun:
    """One per rank. Life: run, once."""

    def __init__(
        self,
        run: RunConfig,
        *,
        train: Sequence[Any],
        heldout: Sequence[Any],
        trainer: Trainer,
        checkpoints: Checkpoints,
        ranks: Ranks,
        folder: RunFolder,
        sft_log: SftLog | None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`train` and `heldout`: demonstrations, or pairs; `heldout` may be empty. `sft_log`: None but on rank 0."""
        self._run = run
        self._train = train
        self._heldout = heldout
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._folder = folder
        self._log = sft_log
        self._clock = clock
        self._num_steps = count_steps(run, num_rows=len(train))
        kind = PairTrainer if run.trains_reward_model else SftTrainer
        self._sft = kind(run, trainer=trainer, ranks=ranks, num_steps=self._num_steps)
        self._step = 0
        best = run.learner.checkpoint.best
        # Every rank flushes before the first one judges.
        self._best = BestCheckpoint(best, folder, flush=lambda: None) if ranks.is_first else None
        self._disk = DiskWait()

    def run(self) -> None:
        """Train from the newest checkpoint (or the beginning) to the end. Raises LearnerError, ConfigError."""
        if self._ranks.is_first:
            # Others see by it that the run is in progress.
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
        # Rank 0 alone lists the checkpoints: another rank might see one that was finished meanwhile.
        newest_first = msgspec.json.encode(self._checkpoints.names()[::-1]) if self._ranks.is_first else None
        (found,) = self._ranks.broadcast_bytes([newest_first] if newest_first else None)
        if names := msgspec.json.decode(found):
            self._step = self._checkpoints.restore_finite(names).step
        self._checkpoints.begin_life()
        if self._best:
            self._best.resume()
        if self._ranks.is_first:
            self._folder.record_training()
        log.info("starting", step=self._step, num_steps=self._num_steps, rows=len(self._train))
        if self._log:
            self._log.start(step=self._step)
        if self._step == 0 and self._heldout:
            self._add_row(self._measure(self._heldout))

    def _train_one_step(self) -> None:
        started_at = self._clock()
        step = self._step + 1
        metrics = self._sft.step(choose_rows(self._run, self._train, step=step), step=step)
        self._trainer.check_weights(step=step)
        self._step = step
        seconds = self._clock() - started_at
        times = {"learner/train_s": seconds, "learner/tokens_per_s": metrics["learner/tokens"] / max(1e-9, seconds)}
        every, is_last = self._run.sft.heldout_every_steps, step == self._num_steps
        is_due = bool(self._heldout) and (is_last or (every > 0 and step % every == 0))
        measured = self._measure(self._heldout) if is_due else {}
        self._add_row(metrics | times | measured)
        if measured and self._run.learner.checkpoint.best:
            self._judge(self._checkpoint(), measured)
        elif step % self._run.learner.checkpoint.every_steps == 0:
            self._checkpoint()

    def _measure(self, rows: Sequence[Any]) -> dict[str, float]:
        """Measure rows with the current weights. Raises DivergenceError unless their loss is finite."""
        self._trainer.check_weights(step=self._step)
        measured = self._sft.measure(rows)
        # Equal on all ranks, which therefore raise together.
        if not isfinite(loss := measured["eval/loss"]):
            raise DivergenceError(
                f"the evaluation loss must be finite after step {self._step}, got {loss}: the weights are finite, so "
                "look for overflow in model.dtype."
            )
        return measured

    def _add_row(self, metrics: dict[str, float]) -> None:
        if self._log:
            self._log.add(step=self._step, epoch=self._epoch, metrics=metrics)

    @property
    def _epoch(self) -> float:
        return count_seen(self._run, num_rows=len(self._train), step=self._step) / len(self._train)

    def _checkpoint(self) -> CheckpointPointer:
        # Weights that are finite may still compute NaN.
        self._measure((self._heldout or self._train)[:1])
        pinned = self._best.pinned if self._best else set()
        return self._checkpoints.save(
            step=self._step,
            version=self._step,
            finish=lambda pointer: self._checkpoints.prune(pinned={pointer.name, *pinned}),
        )

    def _judge(self, newest: CheckpointPointer, measured: dict[str, float]) -> None:
        """Compare the newest checkpoint with the best one so far. Collective."""
        self._checkpoints.saver.flush()
        if self._best:
            self._best.add(newest)
            self._best.judge({**measured, "eval/version": newest.version})

    def _finish(self) -> None:
        self._checkpoint()
        self._checkpoints.saver.flush()
        weights = gather_to_first(self._trainer.engine, ranks=self._ranks, is_whole=True)
        if self._ranks.is_first:
            self._disk.retry(
                lambda: write_model(self._trainer, self._folder.final_model, weights=weights, run=self._run),
                what="the final model",
                path=self._folder.final_model,
            )
        if self._best:
            best = self._disk.retry(self._best.export, what="the best model", path=self._folder.best_model)
            self._checkpoints.upload([self._folder.final_model, *([best] if best else [])])
        self._checkpoints.saver.flush()
        if self._log:
            self._log.finish(step=self._step, epoch=self._epoch)
        self._ranks.barrier()
        log.info("finished", step=self._step)


def count_steps(run: RunConfig, *, num_rows: int) -> int:
    """Steps of the whole run; the last one is smaller where the passes over the file end within it."""
    epochs = run.sft.epochs
    return ceil(epochs * num_rows / run.sft.trajectories_per_step) if epochs else run.learner.max_steps


def count_seen(run: RunConfig, *, num_rows: int, step: int) -> int:
    """Demonstrations trained on in the first `step` steps; one counts again in every pass."""
    seen = step * run.sft.trajectories_per_step
    return min(seen, run.sft.epochs * num_rows) if run.sft.epochs else seen


def choose_rows(run: RunConfig, train: Sequence[Any], *, step: int) -> list[Any]:
    """Demonstrations of step `step`, from 1 on: every row once per pass, in an order drawn from the seed."""
    first, end = (count_seen(run, num_rows=len(train), step=at) for at in (step - 1, step))
    return [train[row_of(ordinal, num_rows=len(train), seed=run.seed)] for ordinal in range(first, end)]


# --- building --------------------------------------------------------------------------------------------------------
def check_sft(run: RunConfig) -> None:
    """Check name, settings and files once, before any rank is started. Raises ConfigError, RunConflictError."""
    folder = RunFolder(run)
    folder.check_name()
    check_storage(run, has_folder=folder.has_run)
    before = folder.path / "config.yaml"
    if before.exists() and not folder.is_untrained:
        _check_same_run(run, before.read_bytes())
    if run.learner.num_ranks > 1:
        read_train(run)
        read_heldout(run)


def build_sft(run: RunConfig, *, device: torch.device, rank: int = 0) -> SftRun:
    """Build this rank's part. Blocks until all ranks have joined. Raises ConfigError, LearnerError."""
    train, heldout = read_train(run), read_heldout(run)
    folder = RunFolder(run)
    size, silence_s = run.learner.num_ranks, run.learner.rank_timeout_s
    ranks = join_ranks(rank=rank, size=size, device=device, silence_s=silence_s)
    if ranks.is_first:
        folder.begin()
    torch.manual_seed(run.seed)
    # The default algorithm, of which nothing is used: no critic, teacher or reference may be loaded for it.
    plain = msgspec.structs.replace(run, algorithm=AlgorithmConfig())
    trainer = build_trainer(plain, ranks=ranks, device=device)
    return SftRun(
        run,
        train=train.demonstrations,
        heldout=heldout.demonstrations,
        trainer=trainer,
        checkpoints=Checkpoints(folder.checkpoints, run=run, trainer=trainer, ranks=ranks),
        ranks=ranks,
        folder=folder,
        sft_log=SftLog(run, folder=folder, train=train, heldout=heldout) if ranks.is_first else None,
    )


def _check_same_run(run: RunConfig, config_yaml: bytes) -> None:
    """A resumed run keeps its settings but for those that `check_same_run` lets change."""
    try:
        stored = msgspec.json.encode(msgspec.yaml.decode(config_yaml)).decode()
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{RunFolder(run).path}/config.yaml must be readable to continue the run: {error}") from None
    opened = msgspec.json.encode(to_plain(run)).decode()
    check_same_run(run.name, stored=(stored, 0, run.seed), opened=(opened, 0, run.seed))
