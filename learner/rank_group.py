"""RankGroup: the data-parallel ranks of one learner. All execute the commands that rank 0 broadcasts."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from slipstream.buffer.codec import decode, encode, unpack
from slipstream.buffer.records import CheckpointPointer, image_names
from slipstream.buffer.trajectory import Trajectory, lag_histogram
from slipstream.configs.base import Record
from slipstream.configs.run import RunConfig
from slipstream.learner.checkpoint import Checkpoints, CheckpointState, Finish
from slipstream.learner.errors import DivergenceError
from slipstream.learner.publishing.staging import Canary
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.saved_model import save_model
from slipstream.learner.training.trainer import Trainer

FetchImages = Callable[[list[str]], Mapping[str, bytes]]


class Command(Record, tag_field="command", tag=True):
    """One collective operation of all ranks."""


class TrainStep(Command):
    """Train on groups, with their payloads. Example: TrainStep(step=12, version=11, group_sizes=[8, 8])."""

    step: int
    version: int
    """Policy version of the weights before the step."""
    group_sizes: list[int]
    """Trajectories per group."""
    weights: list[float] = []
    """Loss factor per group. Empty means 1."""
    max_lags: list[int | None] = []
    """Lag beyond which a group's tokens are masked, None for no bound. Empty means `staleness.max_lag`."""
    num_mixed: int = 0
    """Final groups from another run, with its versions."""
    images: list[str] = []
    """Images that the ranks lack. Their bytes follow the payloads."""


class Operation(Command):
    """Any operation except training. Example: Operation("save_checkpoint", step=50, version=50)."""

    name: Literal[
        "gather_weights", "compute_canary", "save_checkpoint", "flush_checkpoint", "restore_checkpoint", "save_model",
        "keep_alive", "shutdown",
    ]  # fmt: skip
    step: int = 0
    """Last step in the weights."""
    version: int = 0
    path: str = ""
    names: list[str] = []


class RankGroup:
    """Rank 0 calls the operations, the others `worker_loop`.

    Invariant: collectives run only inside commands, so all ranks call them in the same order.
    """

    def __init__(self, *, run: RunConfig, trainer: Trainer, ranks: Ranks, checkpoints: Checkpoints) -> None:
        self._run = run
        self._ranks = ranks
        self.trainer = trainer
        self.checkpoints = checkpoints
        """Methods that are not collective may be called directly."""

    # --- rank 0 --------------------------------------------------------------------------------------------------
    def train(
        self, *, payloads: list[list[bytes]], fetch_images: FetchImages = lambda _names: {}, **fields: Any
    ) -> dict[str, Any]:
        """Train one step on encoded groups and return its metrics. `fields`: other fields of TrainStep.

        `fetch_images` maps names of stored images to bytes.
        """
        # Only rank 0 has a connection to the store.
        held = self.trainer.images
        missing = held.missing(image_names(chain(*payloads))) if held else []
        images = fetch_images(missing) if missing else {}
        command = TrainStep(group_sizes=[*map(len, payloads)], images=list(images), **fields)
        flat = (payload for group in payloads for payload in group)
        self._ranks.broadcast_bytes([encode(command), *flat, *images.values()])
        return self._train(command, payloads, list(images.values()))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Unsharded weights by `checkpoint_names`. Consume them before the next command."""
        self._ranks.broadcast_bytes([encode(Operation("gather_weights"))])
        return self.trainer.engine.model.checkpoint_names.convert(self.trainer.engine.gather_parameters())

    def canary(self, *, step: int) -> Canary:
        return self._on_all(Operation("compute_canary", step=step))

    def save_checkpoint(self, *, step: int, version: int, finish: Finish) -> CheckpointPointer:
        """See Checkpoints.save. Raises DivergenceError, and writes nothing, unless the entire state is finite."""
        return self._on_all(Operation("save_checkpoint", step=step, version=version), finish=finish)

    def flush_checkpoint(self) -> None:
        """Wait until the checkpoint is durable and finished. Raises errors of both."""
        self._on_all(Operation("flush_checkpoint"))

    def restore(self, pointer: CheckpointPointer) -> CheckpointState:
        """Load a checkpoint or the newest finite one before it. Raises CheckpointError."""
        names = self.checkpoints.names()
        older = names[: names.index(pointer.name)] if pointer.name in names else []
        return self._on_all(Operation("restore_checkpoint", names=[pointer.name, *reversed(older)]))

    def save_model(self, folder: Path) -> None:
        """See `saved_model.save_model`. Raises OSError if the disk is full; safe to retry."""
        self._on_all(Operation("save_model", path=str(folder)))

    def upload(self, folders: Iterable[Path]) -> None:
        """Upload folders and wait. Raises StorageError."""
        self.checkpoints.upload(folders)
        self.flush_checkpoint()

    def keep_alive(self) -> None:
        """Call every few seconds of a wait: other ranks wait in a collective that times out."""
        self._on_all(Operation("keep_alive"))

    def shutdown(self) -> None:
        self._on_all(Operation("shutdown"))

    def _on_all(self, operation: Operation, **local: Any) -> Any:
        """`local`: arguments of this rank."""
        self._ranks.broadcast_bytes([encode(operation)])
        return self._execute(operation, **local)

    # --- other ranks ---------------------------------------------------------------------------------------------
    def worker_loop(self) -> None:
        """Raises RankGroupError if rank 0 is lost."""
        while True:
            head, *payloads = self._ranks.broadcast_bytes(None)
            # At the next checkpoint, rank 0 would wait for this rank.
            self.checkpoints.saver.raise_error()
            command: TrainStep | Operation = decode(head, TrainStep | Operation)  # type: ignore[arg-type]
            if isinstance(command, Operation) and command.name == "shutdown":
                return
            try:
                if isinstance(command, TrainStep):
                    members = iter(payloads)
                    groups = [[next(members) for _ in range(size)] for size in command.group_sizes]
                    self._train(command, groups, list(members))
                else:
                    self._execute(command)
            except DivergenceError as error:
                raise self.checkpoints.with_remedy(error) from None

    # --- all ranks -----------------------------------------------------------------------------------------------
    def _execute(self, operation: Operation, **local: Any) -> Any:
        match operation:
            case Operation("gather_weights"):
                deque(self.trainer.engine.gather_parameters(), maxlen=0)
            case Operation("compute_canary", step=step):
                return self.trainer.canary(step=step)
            case Operation("save_checkpoint", step=step, version=version):
                self.trainer.canary(step=step)
                return self.checkpoints.save(step=step, version=version, **local)
            case Operation("flush_checkpoint"):
                self.checkpoints.saver.flush()
            case Operation("restore_checkpoint", names=names):
                return self.checkpoints.restore_finite(names)
            case Operation("save_model", path=folder):
                save_model(self.trainer.engine, Path(folder), config=self._run.model, ranks=self._ranks)
        return None

    def _train(self, command: TrainStep, payloads: list[list[bytes]], images: list[bytes]) -> dict[str, Any]:
        with self.trainer.account.phase("batch"):
            groups: list[list[Trajectory]] = [[unpack(payload) for payload in group] for group in payloads]
            if held := self.trainer.images:
                names = {media.checksum for trajectory in chain(*groups) for media in trajectory.media}
                held.keep(names, dict(zip(command.images, images, strict=True)))
        with self.trainer.account.phase("compute"):
            options = {name: getattr(command, name) for name in ("step", "weights", "max_lags", "num_mixed")}
            metrics = self.trainer.step(groups, learner_version=command.version, **options)
            # Before the commit, so that groups of an update to NaN are trained on again.
            self.trainer.check_weights(step=command.step)
        # Mixed groups have no lag.
        histogram = lag_histogram(chain(*groups[: len(groups) - command.num_mixed]), learner_version=command.version)
        mean = sum(lag * count for lag, count in histogram.items()) / sum(histogram.values())
        # Smallest lag that this percentage of the tokens does not exceed; the histogram is sorted.
        cumulative, total = list(zip(histogram, accumulate(histogram.values()), strict=True)), sum(histogram.values())
        percentiles = {
            f"lag/p{percent}": next(lag for lag, count in cumulative if 100 * count >= percent * total)
            for percent in (50, 95)
        }
        return metrics | {"lag/mean": mean, "lag/max": max(histogram), "lag/histogram": histogram, **percentiles}
