"""The replay: training again on what an earlier run has stored, in the order in which that run trained on it.

The learner of the serial run over a store filled from an archive. No training prompt is leased; the in-process
generator answers held-out prompts alone, so that a replay has accuracies. With the settings, the seed and the initial
weights of the run that was stored, its batches come again bit for bit, and so do the losses of a serial one; another
algorithm shows what it would have made of the same data.
"""

from itertools import groupby
from pathlib import Path

from broker.run_folder import RunFolder
from buffer.archive.archive import Archive
from buffer.archive.trajectory_filter import TrajectoryFilter
from buffer.codec import encode
from buffer.memory_store import MemoryStore
from buffer.records import FinishedGroup
from configs.base import ConfigError
from configs.run import RunConfig
from scripts.serial import run_serial


def run_replay(run: RunConfig, folder: RunFolder) -> None:
    """Train from beginning to end in this process. Raises ConfigError, ArchiveFault."""
    groups = stored_groups(Path(run.replay.path))
    _check_suffices(run, groups)

    def fill(store: MemoryStore) -> None:
        store.load(groups)

    run_serial(run, folder, prepare_store=fill)


def stored_groups(archive: Path) -> list[FinishedGroup]:
    """The groups that were trained on, by step, and in the order drawn within a step. Raises ArchiveFault."""
    rows = Archive(archive).read(TrajectoryFilter(outcome="retired"))
    groups = []
    for group_id, members in groupby(rows, key=lambda stored: stored.trajectory.group_id):
        group = list(members)
        payloads = [encode(stored.trajectory) for stored in sorted(group, key=lambda stored: stored.trajectory.index)]
        groups.append(FinishedGroup(group_id, "retired", "", group[0].steps, payloads))
    return sorted(groups, key=lambda group: group.steps[0])


def _check_suffices(run: RunConfig, groups: list[FinishedGroup]) -> None:
    num_steps = len(groups) // run.learner.groups_per_step
    if run.learner.max_steps > num_steps:
        raise ConfigError(
            f"learner.max_steps must be <= {num_steps} to replay {run.replay.path}, got {run.learner.max_steps}: "
            f"it holds {len(groups)} groups, {run.learner.groups_per_step} a step."
        )
