"""Builders of groups that are over, and of archives."""

from pathlib import Path
from typing import Any

from slipstream.buffer.archive.shard_writer import ShardWriter
from slipstream.buffer.codec import encode
from slipstream.buffer.records import FinishedGroup
from tests.builders import make_trajectory


def make_finished(group_id: str = "0", *, members: int = 2, **fields: Any) -> FinishedGroup:
    """A group retired by step 1; `fields` of the trajectory or of the group."""
    fate = {name: fields.pop(name) for name in ("outcome", "reason", "steps") if name in fields}
    payloads = [encode(make_trajectory(group_id, index, **fields)) for index in range(members)]
    return FinishedGroup(
        **({"id": group_id, "outcome": "retired", "reason": "", "steps": [1]} | fate), payloads=payloads
    )


def write_archive(folder: Path, *shards: list[FinishedGroup]) -> Path:
    """An archive of these shards, closed; its folder."""
    writer = ShardWriter(folder, clock=lambda: 1000.0)
    for groups in shards:
        writer.write(groups)
    writer.close()
    return folder
