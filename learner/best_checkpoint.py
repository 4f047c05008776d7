"""BestCheckpoint: keeps the checkpoint whose evaluation is best by one metric, and exports its model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.trajectory import Record
from slipstream.configs.learner import BestConfig
from slipstream.learner.metrics.log import Row
from slipstream.runtime.run_folder import RunFolder

log = structlog.get_logger(__name__)


class BestEntry(Record):
    """The best evaluation so far, in `best.json`.

    Example: BestEntry(metric="eval/accuracy_greedy", value=0.97, checkpoint=CheckpointPointer(step=40, ...))
    """

    metric: str
    value: float
    checkpoint: CheckpointPointer
    """Checkpoint of the weights that were evaluated."""


BEST_FILE = "best.json"
"""Name in the run folder of the BestEntry."""


class BestCheckpoint:
    """Life: resume -> (add -> judge)* -> export. Without a config nothing is best, and nothing is pinned."""

    def __init__(self, config: BestConfig | None, folder: RunFolder, *, flush: Callable[[], object]) -> None:
        """`flush` waits until the newest checkpoint is durable."""
        self._config = config
        self._folder = folder
        self._file = folder.path / BEST_FILE
        self._flush = flush
        self._evaluated: dict[int, CheckpointPointer] = {}
        self.entry: BestEntry | None = None

    def resume(self) -> None:
        """Go on with the best one of the run, which a restore has fetched if it lay elsewhere."""
        if self._config and self._file.is_file():
            entry = msgspec.json.decode(self._file.read_bytes(), type=BestEntry)
            is_there = (self._folder.checkpoints / entry.checkpoint.name).is_dir()
            if entry.metric == self._config.metric and is_there:
                self.entry = entry

    @property
    def pinned(self) -> set[str]:
        """Checkpoints that must not be deleted: the best one, and those whose evaluation has no result yet."""
        best = [self.entry.checkpoint] if self.entry else []
        return {pointer.name for pointer in (*best, *self._evaluated.values())}

    def add(self, pointer: CheckpointPointer) -> None:
        """Pin a checkpoint whose version is being evaluated."""
        self._evaluated[pointer.version] = pointer

    def judge(self, row: Row) -> None:
        """Take the result of an evaluation, of which a row of metrics may have none."""
        pointer = self._evaluated.pop(row.get("eval/version", -1), None)
        value = row.get(self._config.metric) if self._config else None
        if self._config is None or pointer is None or value is None:
            return
        sign = 1 if self._config.mode == "max" else -1
        # The earlier one of equals: it took fewer steps.
        if self.entry is None or sign * value > sign * self.entry.value:
            # First, because the best one must be one that a crash would leave.
            self._flush()
            self.entry = BestEntry(self._config.metric, value, pointer)
            write_durably(self._file, msgspec.json.encode(self.entry))
            log.info("best_checkpoint", metric=self.entry.metric, value=round(value, 4), checkpoint=pointer.name)

    def export(self) -> Path | None:
        """Copy the model of the best checkpoint; returns its folder, None if no evaluation had the metric."""
        if self.entry is None:
            return None
        draft = self._folder.path / "best_model.tmp"
        for old in (draft, self._folder.best_model):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self._folder.checkpoints / self.entry.checkpoint.name / "model", draft)
        draft.rename(self._folder.best_model)
        return self._folder.best_model
