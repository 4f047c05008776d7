"""Per-token statistics of training steps: TokenRecorder and StepTokensWriter."""

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
"""Maximum steps that wait for the thread."""
_SWEEPS = 64
"""Deletions of old files per `max_gib` of new ones."""
_CLOSE_S = 60.0

log = structlog.get_logger(__name__)


class TokenRecorder:
    """Records log-probability and entropy per token. Life: add* -> collect, on every rank."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._values = tokens.generator_logprobs.new_zeros(2, len(tokens.sequences))

    @torch.no_grad()
    def add(self, microbatch: Microbatch, outputs: Mapping[str, Tensor]) -> None:
        """Does not synchronize with the device."""
        self._values[:, microbatch.indices] = torch.stack([outputs[name].float() for name in ("logprobs", "entropies")])

    def collect(self, members: Iterable[tuple[Trajectory, np.ndarray]], *, ranks: Ranks) -> StepTokens | None:
        """Return statistics on rank 0, None on other ranks. Collective.

        `members`: first trajectories of the batch with positions of trained tokens. Log-ratios are from the start of
        the step if known, otherwise from the loss's forward pass, like entropies.
        """
        # Each token is in one share, so a sum assembles the columns.
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
    """Writes one file per step and deletes the oldest.

    If too many steps wait or the disk fails, logs a warning and skips the step.
    """

    def __init__(self, folder: Path, *, max_gib: float, in_background: bool) -> None:
        self._folder = folder
        self._max_bytes = max_gib * 2**30
        self._unswept_bytes = self._max_bytes
        self._in_background = in_background
        self._waiting: Queue[tuple[int, StepTokens] | None] = Queue(_MAX_WAITING)
        self._thread: Thread | None = None

    def roll_back(self, *, to_step: int) -> None:
        drop_steps(self._folder, after=to_step)

    def add(self, step: int, tokens: StepTokens) -> None:
        if not self._in_background:
            self._write(step, tokens)
            return
        if self._thread is None:
            # A daemon: unwritten steps are lost when the learner stops.
            self._thread = Thread(target=self._run, name="token-stats", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((step, tokens))
        except Full:
            log.warning("token_stats_not_written", step=step, reason=f"{_MAX_WAITING} steps wait for the disk")

    def close(self) -> None:
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
            # Listing 100,000 files takes longer than a step.
            if self._unswept_bytes > self._max_bytes / _SWEEPS:
                keep_newest(self._folder, max_bytes=self._max_bytes)
                self._unswept_bytes = 0.0
        except (OSError, pa.ArrowException) as error:
            log.warning("token_stats_not_written", step=step, reason=str(error))
