"""Tokens of a step for files: a recorder of what the learner computes of each, and the thread that writes them."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread

import numpy as np
import pyarrow as pa
import structlog
import torch
from torch import Tensor

from slipstream.buffer.archive.step_tokens import StepTokens, drop_steps, keep_newest, write_step
from slipstream.buffer.trajectory import Trajectory
from slipstream.learner.batching.batch import Tokens
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.ranks import Ranks

_MAX_WAITING = 4
"""Steps that wait for the thread: they stay in memory."""
_SWEEPS = 64
"""Times that old files are looked for while as much is written as may be kept."""
_CLOSE_S = 60.0

log = structlog.get_logger(__name__)


class TokenRecorder:
    """Log-probability and entropy of each token of a step. Life: `add` on every rank, then `collect` on every rank."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._values = tokens.generator_logprobs.new_zeros(2, len(tokens.sequences))

    @torch.no_grad()
    def add(self, microbatch: Microbatch, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of a forward pass that the loss is made of; nothing waits for the device."""
        self._values[:, microbatch.indices] = torch.stack([outputs[name].float() for name in ("logprobs", "entropies")])

    def collect(self, members: Iterable[tuple[Trajectory, np.ndarray]], *, ranks: Ranks) -> StepTokens | None:
        """Return the numbers of these trajectories, the first of the batch, on rank 0. Collective.

        `members`: each with the indices of its tokens that are trained on. Log-ratios are those of the start of the
        step where they are known, else of the pass with the loss, as are entropies.
        """
        # The sum over ranks puts the columns together, because one share holds each token.
        logprobs, entropies = ranks.sum(self._values)
        if not ranks.is_first:
            return None
        start, generator = self._tokens.start_logprobs, self._tokens.generator_logprobs
        log_ratios = (logprobs if start is None else start) - generator
        trained = [(trajectory, positions) for trajectory, positions in members if len(positions)]
        num_tokens = sum(len(positions) for _, positions in trained)
        columns = {"log_ratio": log_ratios, "entropy": entropies}
        return StepTokens(
            ids=[trajectory.id for trajectory, _ in trained],
            lengths=[trajectory.num_tokens for trajectory, _ in trained],
            positions=[positions for _, positions in trained],
            columns={name: column[:num_tokens].cpu().numpy() for name, column in columns.items()},
        )


class StepTokensWriter:
    """Writes a file per step, in a thread unless everything runs in one process, and deletes the oldest.

    Never delays a step: one that ends while several wait for the thread, or finds no room on the disk, has no file, and
    the log says so.
    """

    def __init__(self, folder: Path, *, max_gib: float, in_background: bool) -> None:
        self._folder = folder
        self._max_bytes = max_gib * 2**30
        self._unswept_bytes = self._max_bytes
        self._in_background = in_background
        self._waiting: Queue[tuple[int, StepTokens] | None] = Queue(_MAX_WAITING)
        self._thread: Thread | None = None

    def roll_back(self, *, to_step: int) -> None:
        """Delete the files of later steps."""
        drop_steps(self._folder, after=to_step)

    def add(self, step: int, tokens: StepTokens) -> None:
        """Write the file of a committed step, or leave it to the thread."""
        if not self._in_background:
            self._write(step, tokens)
            return
        if self._thread is None:
            # A daemon thread: what a learner that is told to stop leaves unwritten is lost.
            self._thread = Thread(target=self._run, name="token-stats", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((step, tokens))
        except Full:
            log.warning("token_stats_not_written", step=step, reason=f"{_MAX_WAITING} steps wait for the disk")

    def close(self) -> None:
        """Wait until the steps so far are written, at most two minutes."""
        if self._thread:
            with suppress(Full):
                self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            self._write(*waiting)

    def _write(self, step: int, tokens: StepTokens) -> None:
        try:
            self._unswept_bytes += write_step(self._folder, step, tokens)
            # Not after each step: listing a hundred thousand small files takes longer than one.
            if self._unswept_bytes > self._max_bytes / _SWEEPS:
                keep_newest(self._folder, max_bytes=self._max_bytes)
                self._unswept_bytes = 0.0
        except (OSError, pa.ArrowException) as error:
            log.warning("token_stats_not_written", step=step, reason=str(error))
