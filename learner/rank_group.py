"""RankGroup: the data-parallel ranks of one learner; rank 0 broadcasts commands, every rank executes them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.buffer.archive.step_tokens import StepTokens
from slipstream.buffer.codec import decode, encode, unpack
from slipstream.buffer.records import CheckpointPointer, image_names
from slipstream.buffer.trajectory import Record, Trajectory, lag_histogram
from slipstream.configs.run import RunConfig
from slipstream.learner.background_save import BackgroundSaver
from slipstream.learner.checkpoint import Checkpoints, save_model
from slipstream.learner.errors import DivergenceError
from slipstream.learner.publishing.staging import Canary
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.time_account import TimeAccount

FetchImages = Callable[[list[str]], Mapping[str, bytes]]


# --- commands of rank 0 ----------------------------------------------------------------------------------------------
class Command(Record, tag_field="command", tag=True):
    """One collective operation of all ranks."""


class TrainStep(Command):
    """Train on groups whose payloads follow. Example: TrainStep(step=12, version=11, group_sizes=[8, 8])."""

    step: int
    version: int
    """Policy version of the weights before the step."""
    group_sizes: list[int]
    """Number of trajectories of each group."""
    weights: list[float] = []
    """Factor of each group's loss; empty: all 1."""
    max_lags: list[int | None] = []
    """Lag beyond which the tokens of each group are masked, None = no bound; empty: `buffer.staleness.max_lag`."""
    num_mixed: int = 0
    """Groups of another run, at the end of the list: their versions do not compare with this run's."""
    images: list[str] = []
    """Names of the images that no rank has yet, whose bytes follow the payloads."""


class GatherWeights(Command):
    """Gather sharded parameters on rank 0."""


class ComputeCanary(Command):
    """Compute the log-probabilities of the canary sequences."""


class SaveCheckpoint(Command):
    """Begin a checkpoint that covers `step`, once the one before it is durable."""

    step: int
    version: int
    """Policy version of the weights."""


class FlushCheckpoint(Command):
    """Wait until the checkpoint in flight is durable."""


class RestoreCheckpoint(Command):
    """Load a checkpoint on every rank."""

    name: str
    """Folder within the checkpoints of the run."""


class SaveModel(Command):
    """Write the model in transformers format."""

    folder: str


class KeepAlive(Command):
    """Restart the timeout of the collective in which the other ranks wait for the next command."""


class Shutdown(Command):
    """End the worker loops of the other ranks."""


AnyCommand = (
    TrainStep
    | GatherWeights
    | ComputeCanary
    | SaveCheckpoint
    | FlushCheckpoint
    | RestoreCheckpoint
    | SaveModel
    | KeepAlive
    | Shutdown
)


class RankGroup:
    """Rank 0 calls the operations; every other rank calls `worker_loop` once.

    Invariant: every collective operation of the trainer runs within a command, so all ranks make the same collectives
    in the same order; one rank alone in a collective would block until its timeout.
    """

    def __init__(self, *, run: RunConfig, trainer: Trainer, ranks: Ranks, checkpoints: Checkpoints) -> None:
        self._run = run
        self._trainer = trainer
        self._ranks = ranks
        self._checkpoints = checkpoints

    @property
    def account(self) -> TimeAccount:
        """Time of the learner by phase, on rank 0."""
        return self._trainer.account

    @property
    def step_tokens(self) -> StepTokens | None:
        """Numbers of the tokens of the last step, on rank 0; None where they are not recorded."""
        return self._trainer.step_tokens

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._trainer.engine.device

    # --- rank 0 --------------------------------------------------------------------------------------------------
    def train(
        self,
        *,
        step: int,
        version: int,
        payloads: list[list[bytes]],
        weights: Sequence[float] = (),
        max_lags: Sequence[int | None] = (),
        num_mixed: int = 0,
        fetch_images: FetchImages = lambda _names: {},
    ) -> dict[str, Any]:
        """Train one step on encoded groups; returns its metrics. See TrainStep for the other arguments.

        `fetch_images`: names of images -> the bytes of those that are stored.
        """
        # The other ranks get the payloads from here, as bytes: one rank's connection to the store is enough, and all
        # ranks decode the same.
        sizes = [len(group) for group in payloads]
        images = self._fetch(payloads, fetch_images)
        command = TrainStep(step, version, sizes, list(weights), list(max_lags), num_mixed, list(images))
        flat = (payload for group in payloads for payload in group)
        self._ranks.broadcast_bytes([encode(command), *flat, *images.values()])
        return self._train(command, payloads, list(images.values()))

    def _fetch(self, payloads: list[list[bytes]], fetch_images: FetchImages) -> Mapping[str, bytes]:
        held = self._trainer.images
        missing = held.missing(image_names(chain(*payloads))) if held else []
        return fetch_images(missing) if missing else {}

    @property
    def weight_names(self) -> CheckpointNames:
        """Names and shapes of `weights`."""
        return self._trainer.engine.model.checkpoint_names

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Unsharded weights by `weight_names`; consume them before the next command, which other ranks await."""
        self._broadcast(GatherWeights())
        return self.weight_names.convert(self._trainer.engine.gather_parameters())

    def canary(self) -> Canary:
        """Canary sequences and their log-probabilities under the current weights."""
        self._broadcast(ComputeCanary())
        return self._trainer.canary()

    @property
    def saver(self) -> BackgroundSaver:
        """Writes checkpoints in the background; what is not collective in it may be called at any time."""
        return self._checkpoints.saver

    def save_checkpoint(
        self, *, step: int, version: int, finish: Callable[[CheckpointPointer], object]
    ) -> CheckpointPointer:
        """Begin a checkpoint: see Checkpoints. Only the store's pointer makes it the one that a resume loads."""
        self._broadcast(SaveCheckpoint(step, version))
        return self._checkpoints.save(step=step, version=version, finish=finish)

    def flush_checkpoint(self) -> None:
        """Wait until the checkpoint in flight is durable, and `finish` has returned; raises what either raised."""
        self._broadcast(FlushCheckpoint())
        self.saver.flush()

    def prune_checkpoints(self, *, pinned: set[str]) -> None:
        """Delete old checkpoints; call it only after the store points at one of the `pinned` ones."""
        self._checkpoints.prune(pinned=pinned)

    def checkpoint_names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return self._checkpoints.names()

    def restore(self, pointer: CheckpointPointer) -> None:
        """Load a checkpoint into the trainer. Raises CheckpointError."""
        self._broadcast(RestoreCheckpoint(pointer.name))
        self._checkpoints.restore(pointer.name)

    def save_model(self, folder: Path) -> None:
        """Write weights and tokenizer in transformers format. Raises OSError when the disk is full; repeatable."""
        self._broadcast(SaveModel(str(folder)))
        save_model(self._trainer, folder, run=self._run, ranks=self._ranks)

    def upload(self, folders: Iterable[Path]) -> None:
        """Send folders of the run to the object store, if there is one. Raises StorageError."""
        self._checkpoints.upload(folders)
        self.flush_checkpoint()

    def keep_alive(self) -> None:
        """Restart the timeout of the other ranks; call it every few seconds of a wait."""
        self._broadcast(KeepAlive())

    def shutdown(self) -> None:
        self._broadcast(Shutdown())

    def _broadcast(self, command: Command) -> None:
        self._ranks.broadcast_bytes([encode(command)])

    # --- other ranks ---------------------------------------------------------------------------------------------
    def worker_loop(self) -> None:
        """Execute commands until Shutdown. Raises RankGroupError when rank 0 is gone."""
        while True:
            head, *payloads = self._ranks.broadcast_bytes(None)
            # Here rather than at the next checkpoint, for which rank 0 would wait.
            self.saver.raise_error()
            command: Command = decode(head, AnyCommand)  # type: ignore[arg-type]
            if isinstance(command, Shutdown):
                return
            try:
                self._execute(command, payloads)
            except DivergenceError:
                self.saver.join()
                raise

    def _execute(self, command: Command, payloads: list[bytes]) -> None:
        match command:
            case TrainStep(group_sizes=sizes):
                members = iter(payloads)
                self._train(command, [[next(members) for _ in range(size)] for size in sizes], list(members))
            case GatherWeights():
                # Gathering needs every rank, though only rank 0 keeps the result.
                deque(self._trainer.engine.gather_parameters(), maxlen=0)
            case ComputeCanary():
                self._trainer.canary()
            case SaveCheckpoint(step=step, version=version):
                self._checkpoints.save(step=step, version=version)
            case FlushCheckpoint():
                self.saver.flush()
            case RestoreCheckpoint(name=name):
                self._checkpoints.restore(name)
            case SaveModel(folder=folder):
                save_model(self._trainer, Path(folder), run=self._run, ranks=self._ranks)
            case KeepAlive():
                return

    # --- all ranks -----------------------------------------------------------------------------------------------
    def _train(self, command: TrainStep, payloads: list[list[bytes]], images: list[bytes]) -> dict[str, Any]:
        with self.account.phase("batch"):
            groups: list[list[Trajectory]] = [[unpack(payload) for payload in group] for group in payloads]
            if held := self._trainer.images:
                names = {media.checksum for trajectory in chain(*groups) for media in trajectory.media}
                held.keep(names, dict(zip(command.images, images, strict=True)))
        with self.account.phase("compute"):
            metrics = self._trainer.step(
                groups,
                learner_version=command.version,
                step=command.step,
                weights=command.weights,
                max_lags=command.max_lags,
                num_mixed=command.num_mixed,
            )
        # Versions of mixed groups count another run's updates: they have no lag here.
        own = groups[: len(groups) - command.num_mixed]
        return metrics | _lag_metrics(own, learner_version=command.version)


def _lag_metrics(groups: list[list[Trajectory]], *, learner_version: int) -> dict[str, Any]:
    histogram = lag_histogram((member for group in groups for member in group), learner_version=learner_version)
    mean = sum(lag * count for lag, count in histogram.items()) / sum(histogram.values())
    percentiles = {f"lag/p{percent}": _percentile(histogram, percent=percent) for percent in (50, 95)}
    return {"lag/mean": mean, "lag/max": max(histogram), "lag/histogram": histogram, **percentiles}


def _percentile(histogram: dict[int, int], *, percent: int) -> int:
    """Smallest lag that `percent` of the tokens do not exceed; `histogram` is in ascending order of lag."""
    cumulative = accumulate(histogram.values())
    total = sum(histogram.values())
    return next(lag for lag, count in zip(histogram, cumulative, strict=True) if 100 * count >= percent * total)
