"""SftLog: one row of metrics per step of a supervised run, and the summary at its end."""

import time
from typing import Any

import structlog

from slipstream.configs.run import RunConfig
from slipstream.learner.sft.dataset import SftFile
from slipstream.runtime.clock import Clock
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.run_folder import RunFolder

SFT_ROW_KEYS = (
    "step", "epoch", "time_s", "learner/loss", "learner/grad_norm", "learner/grad_cosine", "learner/learning_rate",
    "learner/tokens", "learner/computed_tokens", "learner/trajectories", "learner/nonfinite_fraction",
    "learner/train_s", "learner/tokens_per_s", "eval/loss", "learner/pair_accuracy", "eval/pair_accuracy",
)  # fmt: skip
"""Keys of a row; documented in docs/sft.md."""

SFT_SUMMARY_KEYS = (
    "heldout_loss", "heldout_loss_before", "heldout_pair_accuracy", "train_loss", "steps", "epochs", "train_seconds",
    "learner_tokens_per_s", "train_rows", "train_rows_empty", "train_rows_too_long", "heldout_rows",
    "heldout_rows_empty", "heldout_rows_too_long", "seed", "mode",
)  # fmt: skip
"""Keys of `summary.json`; documented in docs/sft.md."""

_SHOWN = ("step", "epoch", "learner/loss", "eval/loss", "eval/pair_accuracy")

log = structlog.get_logger(__name__)


class SftLog:
    """Writes `metrics.jsonl` and `summary.json`, on rank 0. Life: start -> add* -> finish."""

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
