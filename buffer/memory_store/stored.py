"""MemoryStore, stored rollouts: groups of an earlier run, ready to be trained on again."""

from collections import Counter

from buffer.codec import checksum, pack, unpack
from buffer.drawing import Draw
from buffer.memory_store.state import Group, Member, MemoryState
from buffer.records import FinishedGroup
from buffer.trajectory import make_lease_id


class MemoryStored(MemoryState):
    """What only a replay does."""

    def load(self, groups: list[FinishedGroup], *, draws: dict[int, Draw] | None = None) -> None:
        """Take groups in as ready, in the order given. Raises Refused for a payload that is damaged.

        They count as accepted and admitted. Ordinals between them are marked as over, so that no prompt is leased.
        `draws`: what these steps claim, whatever the sampler says.
        """
        with self._changed:
            run = self._opened()
            for stored in groups:
                run.ready_sequence += 1
                self._groups[stored.id] = _ready_group(stored, sequence=run.ready_sequence)
                self._put_all([stored.id])
            ordinals = {int(stored.id) for stored in groups}
            run.next_ordinal = max(ordinals, default=-1) + 1
            run.admitted = len(groups)
            self._done = set(range(run.next_ordinal)) - ordinals
            self._counters["accepted"] = sum(len(stored.payloads) for stored in groups)
            self._planned = draws or {}
            uses = Counter(group_id for draw in self._planned.values() for group_id in draw.group_ids)
            run.max_uses = max([run.max_uses, *uses.values()])


def _ready_group(stored: FinishedGroup, *, sequence: int) -> Group:
    group = Group(stored.id, "train", len(stored.payloads), sequence)
    for payload in stored.payloads:
        trajectory = unpack(payload)
        lease_id = make_lease_id(stored.id, trajectory.attempt)
        header, _ = pack(trajectory, lease_id=lease_id, purpose="train", group_size=group.size)
        group.members[trajectory.index] = Member(trajectory.id, checksum(payload), payload, header)
    return group
