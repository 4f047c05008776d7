"""The plan of a replay: the groups of an archive, and the groups that each step claims."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.errors import ArchiveError
from slipstream.buffer.records import FinishedGroup, StepEntry
from slipstream.buffer.sampling import Sample
from slipstream.buffer.trajectory import Record
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig


class ReplayPlan(Record):
    """The training data of a replay.

    Example: ReplayPlan(groups=[FinishedGroup(id="17", ...), ...], samples={1: Sample(["17", "12"], ...), ...})
    """

    groups: list[FinishedGroup]
    """In the order in which steps trained on them first; groups of no known step come last, in the order archived."""
    samples: dict[int, Sample]
    """Step -> its claim according to the ledger; empty when groups are claimed in the order of `groups`."""


def plan_replay(run: RunConfig) -> ReplayPlan:
    """Read the archive that the run replays.

    Steps repeat the batches of the ledger when these are as large as a step of the replay; otherwise they claim the
    same groups in the same order. Raises ArchiveError; ConfigError when the archive holds too few steps.
    """
    archive, per_step = Path(run.replay.path), run.claimed_groups_per_step
    groups, steps = stored_groups(archive), Archive(archive).steps()
    if any(len(entry.group_ids) != per_step for entry in steps):
        # Batches of another size cannot be repeated: fall back to the order of the groups.
        steps = []
    num_steps = len(steps) or len(groups) // per_step
    if run.learner.max_steps > num_steps:
        raise ConfigError(
            f"learner.max_steps must be <= {num_steps} to replay {archive}, got {run.learner.max_steps}: it holds "
            f"{len(groups)} groups and {num_steps} steps."
        )
    replayed = steps[: run.learner.max_steps]
    _check_complete(archive, replayed, groups)
    return ReplayPlan(groups, samples={entry.step: _sample(entry) for entry in replayed})


def stored_groups(archive: Path) -> list[FinishedGroup]:
    """Return the retired groups: trained on by the stored run, or imported. Raises ArchiveError."""
    rows = Archive(archive).read(TrajectoryFilter(outcome="retired"))
    groups = []
    for group_id, members in groupby(rows, key=lambda stored: stored.trajectory.group_id):
        group = sorted(members, key=lambda stored: stored.trajectory.index)
        payloads = [encode(stored.trajectory) for stored in group]
        groups.append(FinishedGroup(group_id, "retired", "", group[0].steps, payloads))
    # Stable: groups of one step keep the order of the archive, which is that of their retirement.
    return sorted(groups, key=lambda group: (not group.steps, group.steps[:1]))


def _sample(entry: StepEntry) -> Sample:
    ones, none = [1.0] * len(entry.group_ids), [False] * len(entry.group_ids)
    return Sample(entry.group_ids, weights=entry.weights or ones, reused=entry.reused or none)


def _check_complete(archive: Path, steps: Iterable[StepEntry], groups: list[FinishedGroup]) -> None:
    """Raise ArchiveError when a trajectory of a batch is missing: the step would train on another batch."""
    stored = {group.id: [unpack(payload).id for payload in group.payloads] for group in groups}
    for entry in steps:
        for group_id, names in zip(entry.group_ids, entry.trajectory_ids, strict=True):
            if stored.get(group_id) != names:
                raise ArchiveError(
                    f"{archive} must hold what step {entry.step} of its ledger trained on, {', '.join(names)}, got "
                    f"{', '.join(stored.get(group_id, [])) or 'none of them'}: `slipstream data verify {archive}` "
                    "lists what else is missing."
                )
