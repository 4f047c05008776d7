"""RankGroup: the ranks of one learner. What rank 0 orders, all carry out together."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.buffer.codec import decode, encode, unpack
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.trajectory import Record, Trajectory, lag_histogram
from slipstream.configs.run import RunConfig
from slipstream.learner.checkpoint import Checkpoints, save_model
from slipstream.learner.publishing.staging import Canary
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.trainer import Trainer


# @@ Orders: what rank 0 of the learner tells the other ranks to do together with it.
class Command(Record, tag_field="order", tag=True):
    """Base of all orders."""


class TrainStep(Command):
    """One step on groups whose payloads follow. Example: TrainStep(step=12, version=11, group_sizes=[8, 8])."""

    step: int
    """Which step."""
    version: int
    """Version of the learner's weights."""
    group_sizes: list[int]
    """Trajectories of each group."""
    weights: list[float] = []
    """What each group's loss is multiplied by; empty: all 1."""
    max_lags: list[int | None] = []
    """Lag beyond which tokens of each group leave the loss, None = none; empty: `buffer.staleness.max_lag`."""
    num_mixed: int = 0
    """How many of the last groups are another run's: their versions are not this one's."""


class GatherWeights(Command):
    """Bring sharded parameters together (rank 0 keeps them)."""


class ComputeCanary(Command):
    """Log-probabilities of the canary sequences."""


class SaveCheckpoint(Command):
    """Write a checkpoint of everything that resuming needs."""

    step: int
    """Steps it covers."""
    version: int
    """Version of the weights."""


class RestoreCheckpoint(Command):
    """Take back a checkpoint."""

    name: str
    """Its folder in the run's checkpoints."""


class SaveModel(Command):
    """Write the model in transformers format."""

    folder: str
    """Where."""


class KeepAlive(Command):
    """Nothing yet: rank 0 waits, and the others must not take it for dead."""


class Shutdown(Command):
    """The run is over."""


AnyOrder = (
    TrainStep | GatherWeights | ComputeCanary | SaveCheckpoint | RestoreCheckpoint | SaveModel | KeepAlive | Shutdown
)
"""What a following rank decodes."""


class RankGroup:
    """Rank 0 calls the verbs; every other rank calls `follow` once.

    Invariant: every collective operation of the trainer happens within an order, so all ranks meet in all of them.
    """

    def __init__(self, *, run: RunConfig, trainer: Trainer, ranks: Ranks, checkpoints: Checkpoints) -> None:
        self._run = run
        self._trainer = trainer
        self._ranks = ranks
        self._checkpoints = checkpoints

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
    ) -> dict[str, Any]:
        """One step on the groups; returns the step's metrics. `weights`, `max_lags`, `num_mixed`: see TrainStep."""
        sizes = [len(group) for group in payloads]
        order = TrainStep(step, version, sizes, list(weights), list(max_lags), num_mixed)
        self._ranks.broadcast_bytes([encode(order), *(payload for group in payloads for payload in group)])
        return self._train(order, payloads)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """All parameters, whole; consume before the next order."""
        self._tell(GatherWeights())
        return self._trainer.engine.gather_parameters()

    def canary(self) -> Canary:
        """The probe's sequences and their log-probabilities now."""
        self._tell(ComputeCanary())
        return self._trainer.canary()

    def save_checkpoint(self, *, step: int, version: int) -> CheckpointPointer:
        """Durable when this returns; it does not count until the store points at it."""
        self._tell(SaveCheckpoint(step, version))
        return CheckpointPointer(step, version, self._checkpoints.save(step=step, version=version))

    def prune_checkpoints(self, *, keeping: CheckpointPointer) -> None:
        """Remove old ones, now that the store points at `keeping`."""
        self._checkpoints.prune(keeping=keeping.name)

    def checkpoint_names(self) -> list[str]:
        """Of the checkpoints in the run folder, oldest first."""
        return self._checkpoints.names()

    def restore(self, pointer: CheckpointPointer) -> None:
        """Put a checkpoint into the trainer. Raises CheckpointError."""
        self._tell(RestoreCheckpoint(pointer.name))
        self._checkpoints.restore(pointer.name)

    def save_model(self, folder: Path) -> None:
        """The weights, and the tokenizer, in transformers format."""
        self._tell(SaveModel(str(folder)))
        save_model(self._trainer, folder, run=self._run, ranks=self._ranks)

    def keep_alive(self) -> None:
        """Tell the other ranks that the next order is yet to come, so that their patience starts anew."""
        self._tell(KeepAlive())

    def shutdown(self) -> None:
        """Let the other ranks go."""
        self._tell(Shutdown())

    def _tell(self, order: Command) -> None:
        self._ranks.broadcast_bytes([encode(order)])

    # --- the others ----------------------------------------------------------------------------------------------
    def worker_loop(self) -> None:
        """Carry out orders until dismissed. Raises RankGroupError when rank 0 is gone."""
        while True:
            head, *payloads = self._ranks.broadcast_bytes(None)
            order: Command = decode(head, AnyOrder)  # type: ignore[arg-type]
            if isinstance(order, Shutdown):
                return
            self._carry_out(order, payloads)

    def _carry_out(self, order: Command, payloads: list[bytes]) -> None:
        match order:
            case TrainStep(group_sizes=sizes):
                members = iter(payloads)
                self._train(order, [[next(members) for _ in range(size)] for size in sizes])
            case GatherWeights():
                _exhaust(self._trainer.engine.gather_parameters)
            case ComputeCanary():
                self._trainer.canary()
            case SaveCheckpoint(step=step, version=version):
                self._checkpoints.save(step=step, version=version)
            case RestoreCheckpoint(name=name):
                self._checkpoints.restore(name)
            case SaveModel(folder=folder):
                save_model(self._trainer, Path(folder), run=self._run, ranks=self._ranks)
            case KeepAlive():
                return

    # --- all -----------------------------------------------------------------------------------------------------
    def _train(self, order: TrainStep, payloads: list[list[bytes]]) -> dict[str, Any]:
        groups: list[list[Trajectory]] = [[unpack(payload) for payload in group] for group in payloads]
        metrics = self._trainer.step(
            groups,
            learner_version=order.version,
            step=order.step,
            weights=order.weights,
            max_lags=order.max_lags,
            num_mixed=order.num_mixed,
        )
        own = groups[: len(groups) - order.num_mixed]
        return metrics | _lag_metrics(own, learner_version=order.version)


def _lag_metrics(groups: list[list[Trajectory]], *, learner_version: int) -> dict[str, Any]:
    histogram = lag_histogram((member for group in groups for member in group), learner_version=learner_version)
    num_tokens = sum(histogram.values())
    mean = sum(lag * count for lag, count in histogram.items()) / num_tokens
    percentiles = {f"lag/p{percent}": _percentile(histogram, percent=percent) for percent in (50, 95)}
    return {"lag/mean": mean, "lag/max": max(histogram), "lag/histogram": histogram, **percentiles}


def _percentile(histogram: dict[int, int], *, percent: int) -> int:
    """The smallest lag that so many of the tokens do not exceed; `histogram` is in rising order of lag."""
    counts = accumulate(histogram.values())
    wanted = sum(histogram.values()) * percent
    return next(lag for lag, count in zip(histogram, counts, strict=True) if 100 * count >= wanted)


def _exhaust(gather: Callable[[], Iterable[object]]) -> None:
    for _ in gather():
        pass
