"""Lineage: what weights were trained on, kept beside them in every checkpoint. The scripted learner's only knowledge.

It follows the weights through crashes and resumes by itself, so it tells, independently of the store's ledger, what the
surviving weights have seen.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from slipstream.buffer.sampling import row_of
from slipstream.buffer.trajectory import Record, Trajectory

FILE = "lineage.json"
"""In a checkpoint's folder."""

Sample = tuple[str, str, int]
"""Group, prompt uid, index: what was trained on, whoever generated it and at whichever attempt."""


class Trained(Record):
    """One step. Example: Trained(step=12, samples=[("380", "train/04711", 0), ...])."""

    step: int
    """Counted from 1."""
    samples: list[Sample]
    """In the order drawn."""


def samples_of(groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
    """What training on these groups adds."""
    return [(member.group_id, member.prompt_uid, member.index) for group in groups for member in group]


def write(folder: Path, lineage: list[Trained]) -> None:
    """Into a checkpoint that is being written; the checkpoint makes it durable."""
    (folder / FILE).write_bytes(msgspec.json.encode(lineage))


def read(folder: Path) -> list[Trained]:
    """Out of a checkpoint."""
    return msgspec.json.decode((folder / FILE).read_bytes(), type=list[Trained])


def count(lineage: Iterable[Trained]) -> Counter[Sample]:
    """How often each sample was trained on."""
    return Counter(sample for trained in lineage for sample in trained.samples)


def uninterrupted(*, num_groups: int, group_size: int, num_rows: int, seed: int) -> Counter[Sample]:
    """What a run of `num_groups` groups trains on when nothing ever dies: each prompt of the sequence, each index."""
    uids = {group: f"train/{row_of(group, num_rows=num_rows, seed=seed):05d}" for group in range(num_groups)}
    return Counter((str(group), uid, index) for group, uid in uids.items() for index in range(group_size))
