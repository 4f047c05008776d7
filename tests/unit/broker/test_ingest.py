"""Ingest acknowledges exactly what the store holds, to its sender."""

import pytest

from slipstream.broker.ingest import Ingest
from slipstream.broker.messages import Ack, Nack, Put
from slipstream.buffer.records import Insertion
from slipstream.buffer.store import StoreOutage
from tests.builders import make_packed
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

NUM_GROUPS = 100


class FullStore(MemoryStore):
    """Refuses all trajectories, like Redis without memory."""

    def insert(self, trajectories, *, guest=""):
        return [Insertion(outcome="refused", reason="store_full") for _ in trajectories]


def make_ingest(store_class: type[MemoryStore] = MemoryStore) -> tuple[Ingest, MemoryStore]:
    store = store_class()
    store.open_run("run", config_json="{}", num_rows=8, seed=0)
    store.set_phase("training")
    store.lease(owner="g", max_groups=NUM_GROUPS, group_size=2, lease_s=60.0, admission_limit=NUM_GROUPS)
    return Ingest(store, StoreOutage(report=lambda *_, **__: None, clock=FakeClock(0.0))), store


def put(ingest: Ingest, sender: bytes, *, groups: range, index: int = 0) -> set[str]:
    """Receive one Put of one answer to each group; returns their ids."""
    packed = [make_packed(str(group), index, group_size=2) for group in groups]
    assert ingest.add(sender, Put([header for header, _ in packed]), [payload for _, payload in packed]) == []
    return {header.id for header, _ in packed}


def stored(store: MemoryStore) -> set[str]:
    return {member.id for group in store._groups.values() for member in group.members.values()}


@pytest.mark.parametrize("num_groups", [1, 49, 50, 51, NUM_GROUPS])
def test_what_is_acknowledged_is_stored_id_by_id_however_large_the_batch(num_groups: int):
    ingest, store = make_ingest()
    sent = put(ingest, b"g", groups=range(num_groups))
    acknowledged = [each for _, answer in ingest.flush() if isinstance(answer, Ack) for each in answer.ids]
    assert sorted(acknowledged) == sorted(sent)
    assert stored(store) == sent
    assert store.counts().accepted == num_groups


def test_every_sender_is_acknowledged_its_own():
    ingest, _ = make_ingest()
    sent = {sender: put(ingest, sender, groups=range(3), index=index) for index, sender in enumerate((b"a", b"b"))}
    answers = {identity: set(answer.ids) for identity, answer in ingest.flush() if isinstance(answer, Ack)}
    assert answers == sent


def test_what_a_full_store_refuses_is_to_be_sent_again():
    ingest, _ = make_ingest(FullStore)
    (trajectory_id,) = put(ingest, b"g", groups=range(1))
    ((identity, nack),) = ingest.flush()
    assert isinstance(nack, Nack)
    assert (identity, nack.id, nack.is_fatal, nack.reason) == (b"g", trajectory_id, False, "store_full")
    assert nack.retry_after_s > 0
    assert nack.lease_id == "0-0"
