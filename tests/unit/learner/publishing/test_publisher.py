import weakref
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import LenderError, OpenEpoch, SnapshotSource, Update
from slipstream.learner.publishing.publisher import Publisher
from tests.cases import cases
from tests.fakes import FakeClock
from tests.unit.learner.fake_generators import (
    CANARY,
    WEIGHTS,
    FakeGenerators,
    FakeSnapshots,
    make_background,
    make_publisher,
    make_stager,
    publish,
    stage,
)


def test_live_generators_get_the_version_over_one_group_and_an_epoch_is_opened_only_when_members_change():
    publisher, generators, _ = make_publisher(g0="well", g1="well")
    published = publish(publisher, 1)
    assert (published.version, published.num_members) == (1, 2)
    assert (published.probe_diff_max, published.pause_s) == (2e-7, 0.02)
    assert publish(publisher, 2).num_members == 2
    assert generators.opened_with == [2]
    assert not publisher.is_due
    publisher, generators, _ = make_publisher()
    assert publish(publisher, 1).num_members == 0
    assert not publisher.is_due
    generators.set_members(g0="well")
    assert publisher.is_due
    assert publisher.synchronize().num_members == 1
    assert [m.version for m in generators.sent if isinstance(m, Update)] == [1]
    for version, names in enumerate([["g0", "g1"], ["g1"], ["g1"]], start=2):
        generators.set_members(**dict.fromkeys(names, "well"))
        publish(publisher, version)
    assert generators.opened_with == [1, 2, 1]


def test_silent_and_wrong_members_are_evicted_and_retried_with_a_backoff_that_doubles():
    publisher, generators, clock = make_publisher(g0="well", g1="silent")
    publisher.set_version(stage(1))
    generators.members["g1"] = "silent"

    def only_the_well_open(epoch: int, *, num_members: int, timeout_s: float, backend: str) -> None:
        generators.opened_with.append(num_members)
        if num_members == 2:
            raise WeightTransferError("rank 2 did not arrive in time")

    generators.open_epoch = only_the_well_open
    assert publisher.synchronize().num_members == 1
    assert generators.opened_with == [2, 1]
    assert not publisher.is_due
    clock.now += 10
    assert publisher.is_due
    publisher, generators, clock = make_publisher(g0="well", g1="wrong")
    assert publish(publisher, 1).num_members == 1
    assert generators.evicted == [("g1", "evicted: version 1 was not applied: the probe differs")]
    for backoff_s in (2, 4, 8):
        clock.now += backoff_s - 0.1
        assert not publisher.is_due
        clock.now += 0.2
        assert publisher.is_due
        publisher.synchronize()
    generators.members["g1"] = "well"
    clock.now += 20
    assert publisher.synchronize().num_members == 2


def test_a_version_is_announced_before_and_committed_after_it_is_applied_also_to_a_joiner():
    publisher, generators, _ = make_publisher(g0="well")
    background, store = make_background(publisher)
    background.publish(version=1, step=1, weights=WEIGHTS, canary=CANARY)
    assert store.run_state().announced_version == 1
    background.flush()
    assert store.run_state().version == 1
    assert background.take_published().num_members == 1
    assert background.take_published() is None
    assert "1 of them hold version 1" in background.describe_members()
    generators.set_members(g0="well", g1="well")
    background.sync_members(timeout_s=0)
    background.flush()
    assert "2 generators alive, 2 of them hold version 1" in background.describe_members()
    assert background.take_published().num_members == 2


def test_a_waiting_version_is_replaced_by_the_next_and_an_error_in_the_background_is_raised_in_the_learner():
    publisher, generators, _ = make_publisher(g0="well")
    background, store = make_background(publisher, make_stager(WEIGHTS[:1]))
    sent, has_started, may_finish = [], Event(), Event()

    def slow(buckets, *, timeout_s: float) -> None:
        has_started.set()
        assert may_finish.wait(20)
        sent.append([bucket.clone() for bucket in buckets])

    generators.broadcast = slow
    for version in range(1, 5):
        weights = [("a", torch.full((2, 3), float(version)))]
        background.publish(version=version, step=version, weights=weights, canary=CANARY)
        assert has_started.wait(20)
    may_finish.set()
    background.flush()
    assert [float(buckets[0].view(torch.float32)[0]) for buckets in sent] == [1.0, 4.0]
    assert [m.version for m in generators.sent if isinstance(m, Update)] == [1, 4]
    assert (store.run_state().version, store.run_state().announced_version) == (4, 4)
    assert background.take_published().version == 4
    publisher, generators, _ = make_publisher(g0="well")
    background, _ = make_background(publisher)

    def broken(buckets, *, timeout_s: float) -> None:
        raise RuntimeError("a bug")

    generators.broadcast = broken
    background.publish(version=1, step=1, weights=WEIGHTS, canary=CANARY)
    with pytest.raises(RuntimeError, match="a bug"):
        background.flush()


def test_a_broadcast_is_repeated_without_a_dead_member_and_a_late_answer_of_an_evicted_one_counts():
    publisher, generators, _ = make_publisher(g0="well", g1="well", is_one_process=False)
    is_aborted = Event()

    def blocked(buckets, *, timeout_s: float) -> None:
        generators.broadcasts += 1
        if generators.broadcasts == 1:
            generators.set_members(g0="well")
            assert is_aborted.wait(20)
            raise WeightTransferError("connection closed by peer")

    generators.broadcast = blocked
    generators.abort = is_aborted.set
    assert publish(publisher, 1).num_members == 1
    assert generators.opened_with == [2, 1]
    # A broker that restarts during a publish briefly knows no generators.
    publisher, generators, _ = make_publisher(g0="well", g1="well")
    publish(publisher, 1)
    answer, late = generators.send, []

    def answer_late(message) -> None:
        answer(message)
        if isinstance(message, Update):
            late.extend(generators.inbox)
            generators.inbox.clear()
            generators.set_members()

    generators.send = answer_late
    assert publish(publisher, 2).num_members == 0
    generators.set_members(g0="well", g1="well")
    generators.inbox.extend(late)
    publisher.poll(timeout_s=0)
    assert publisher.num_holding == 2
    assert not publisher.is_due


def test_tensors_are_staged_one_at_a_time():
    """Gathered from shards, all tensors together may not fit on this rank."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most_alive
        for index in range(8):
            tensor = torch.full((4,), float(index))
            alive.append(weakref.ref(tensor))
            most_alive = max(most_alive, sum(ref() is not None for ref in alive))
            yield f"layer.{index}", tensor
            del tensor

    stager = make_stager([(f"layer.{index}", torch.empty(4)) for index in range(8)])
    for version in (1, 2):
        most_alive = 0
        staged = stager.stage(version=version, weights=gathered(), canary=CANARY)
        assert staged.buckets[0].view(torch.float32).unique().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert most_alive <= 2


@cases(
    "own, others, setting, expected",
    ("cuda:GPU-0", ["cuda:GPU-1", "cuda:GPU-2"], "auto", ["nccl"]),
    ("cuda:GPU-0", ["cuda:GPU-0"], "auto", ["gloo"]),
    ("cuda:GPU-0", ["cuda:GPU-1", "cuda:GPU-1"], "auto", ["gloo"]),
    ("cuda:GPU-0", ["cuda:GPU-1", "cpu"], "auto", ["gloo"]),
    ("cpu", ["cuda:GPU-1"], "auto", ["gloo"]),
    ("cpu", ["cpu"], "auto", ["gloo"]),
    ("cuda:GPU-0", ["cuda:GPU-1"], "gloo", ["gloo"]),
    ("cuda:GPU-0", ["cuda:GPU-0"], "nccl", []),
)
def test_the_backend_follows_from_where_the_roles_are(own: str, others: list[str], setting: str, expected: list[str]):
    devices = {f"g{index}": device for index, device in enumerate(others)}
    members = dict.fromkeys(devices, "well")
    publisher, generators, clock = make_publisher(snapshots=FakeSnapshots(), backend=setting, **members)
    generators.device, generators.devices = own, devices
    # Members fetch the first version, which reports their devices, and get the second by broadcast.
    publish(publisher, 1)
    clock.now += 10
    publish(publisher, 2)
    orders = [message.backend for message in generators.sent if isinstance(message, OpenEpoch)]
    assert generators.backends == orders == expected
    if not expected:
        assert "on separate GPUs, got two on one GPU: use weights.backend=auto" in generators.evicted[0][1]


def test_the_backend_changes_with_the_members():
    publisher, generators, clock = make_publisher(snapshots=FakeSnapshots(), g0="well")
    generators.device, generators.devices = "cuda:GPU-0", {"g0": "cuda:GPU-1", "g1": "cpu"}
    for version, names in enumerate([["g0"], ["g0"], ["g0", "g1"], ["g0", "g1"], ["g0"]]):
        generators.set_members(**dict.fromkeys(names, "well"))
        publish(publisher, version)
        clock.now += 10
    assert generators.backends == ["nccl", "gloo", "nccl"]


def start(**settings: Any) -> tuple[Publisher, FakeGenerators, FakeClock, FakeSnapshots]:
    snapshots = FakeSnapshots()
    return *make_publisher(snapshots=snapshots, **settings), snapshots


def start_many() -> tuple[Publisher, FakeGenerators, FakeClock]:
    names = {f"g{number:02}": "slow" for number in range(16)}
    return start(machines={name: f"machine-{name}" for name in names}, **names)[:3]


def test_a_joiner_fetches_its_first_version_and_does_not_disturb_the_group_before_it_holds_one():
    publisher, generators, _, snapshots = start(g0="well")
    published = publish(publisher, 1)
    assert (published.num_members, published.probe_diff_max) == (1, 2e-7)
    assert generators.updates(fetched=True) == [(1, ["g0"])]
    assert generators.updates(fetched=False) == []
    publish(publisher, 2)
    assert generators.updates(fetched=False) == [(2, ["g0"])]
    assert snapshots.added == [(1, False, [])]
    publisher.close()
    assert snapshots.is_closed
    publisher, generators, _, _ = start(g0="well")
    publish(publisher, 1)
    publish(publisher, 2)
    generators.set_members(g0="well", g1="slow")
    assert publish(publisher, 3).num_members == publish(publisher, 4).num_members == 1
    assert generators.opened_with == [1]
    assert not publisher.is_due
    generators.finish_fetching("g1", 3)
    assert not publisher.is_due
    assert publish(publisher, 5).num_members == 2
    assert generators.opened_with == [1, 2]
    assert generators.updates(fetched=True) == [(1, ["g0"]), (3, ["g1"])]


def test_a_version_that_only_a_slow_member_will_hold_waits_for_it_and_one_being_fetched_is_kept():
    publisher, generators, clock, _ = start(g0="slow")
    started_at = clock.now
    assert publish(publisher, 1).num_members == 0
    assert clock.now - started_at >= 60
    generators.finish_fetching("g0", 1)
    assert publish(publisher, 2).num_members == 1
    assert clock.now - started_at < 61
    publisher, generators, _, snapshots = start(transports={"g1": "snapshot"}, g0="well", g1="slow")
    publish(publisher, 1)
    generators.set_members(g0="well", g1="slow", g2="well")
    publish(publisher, 2)
    assert snapshots.added == [(1, False, []), (2, False, [1])]


def test_a_member_with_another_transport_joins_no_broadcast():
    transports = {"g1": "snapshot", "g2": "delta"}
    publisher, generators, _, snapshots = start(transports=transports, g0="well", g1="well", g2="well")
    publish(publisher, 1)
    publish(publisher, 2)
    publisher.poll(timeout_s=0)
    assert publisher.num_holding == 3
    assert generators.updates(fetched=False) == [(2, ["g0"])]
    assert generators.updates(fetched=True) == [(1, ["g0", "g1"]), (1, ["g2"]), (2, ["g1"]), (2, ["g2"])]
    sources = [order.source for order in generators.sent if getattr(order, "source", None)]
    assert [source.has_deltas for source in sources] == [False, True, False, True]
    assert {with_delta for _, with_delta, _ in snapshots.added} == {True}


def test_a_request_is_repeated_until_its_deadline_and_dropped_when_its_member_leaves():
    publisher, generators, clock, _ = start(g0="well", g1="slow")
    publish(publisher, 1)
    clock.now += 6
    publisher.poll(timeout_s=0)
    # Not to the other member, which may hold a later version.
    assert [names for _, names in generators.updates(fetched=True)] == [["g0", "g1"], ["g1"]]
    clock.now += 660
    publisher.poll(timeout_s=0)
    assert generators.evicted == [("g1", "evicted: version 1 was not applied within 660 s")]
    publisher, generators, clock, _ = start(g0="slow")
    publish(publisher, 1)
    generators.finish_fetching("g0", 7)
    publisher.poll(timeout_s=0)
    assert publisher.num_holding == 0
    generators.set_members()
    publisher.poll(timeout_s=0)
    clock.now += 700
    publisher.poll(timeout_s=0)
    assert generators.evicted == []


def test_a_member_that_failed_to_apply_a_version_is_evicted_and_fetches_before_it_joins_broadcasts_again():
    publisher, generators, clock, _ = start(g0="well", g1="wrong")
    assert publish(publisher, 1).num_members == 1
    assert generators.evicted == [("g1", "evicted: version 1 was not applied: the probe differs")]
    generators.members["g1"] = "well"
    clock.now += 3
    assert publisher.is_due
    publisher.synchronize()
    publisher.poll(timeout_s=0)
    assert publisher.num_holding == 2
    assert generators.updates(fetched=False) == []
    publisher, generators, clock, _ = start(g0="well")
    publish(publisher, 1)
    generators.members["g0"] = "wrong"
    publish(publisher, 2)
    generators.members["g0"] = "well"
    clock.now += 3
    publisher.synchronize()
    assert generators.updates(fetched=True) == [(1, ["g0"]), (2, ["g0"])]


def test_a_fetched_version_is_outdated_by_the_next_which_is_fetched_or_broadcast():
    publisher, generators, clock, _ = start(g0="well")
    publish(publisher, 1)
    generators.set_members(g0="well", g1="slow")
    publisher.synchronize()
    publish(publisher, 2)
    generators.finish_fetching("g1", 1)
    generators.members["g1"] = "well"
    assert not publisher.is_due
    clock.now += 6
    assert publisher.is_due
    publisher.synchronize()
    assert generators.updates(fetched=False) == [(2, ["g0"])]
    assert generators.updates(fetched=True) == [(1, ["g0"]), (1, ["g1"]), (2, ["g1"])]
    publisher, generators, _, _ = start(g0="slow")
    publish(publisher, 1)
    publish(publisher, 2)
    generators.finish_fetching("g0", 1)
    assert publisher.is_due
    publisher.synchronize()
    assert generators.updates(fetched=False) == [(2, ["g0"])]
    assert {version for version, _ in generators.updates(fetched=True)} == {1}


def test_joiners_get_files_where_memory_cannot_be_read_and_are_evicted_with_the_reason_where_the_disk_is_full():
    publisher, generators, clock, snapshots = start(g0="well")
    snapshots.error = "the snapshot of version 1 must fit into /weights"
    assert publish(publisher, 1).num_members == 0
    assert generators.evicted == [("g0", f"evicted: {snapshots.error}")]
    snapshots.error = ""
    clock.now += 3
    assert publisher.synchronize().num_members == 1
    publisher, generators, clock, snapshots = start(machines=HERE, g0="wrong")
    publish(publisher, 1)
    generators.set_members(g0="well")
    clock.now += 100
    publish(publisher, 2)
    assert [bool(source.memory) for source in sources(generators)] == [True, False]
    assert snapshots.added == [(2, False, [])]


@pytest.mark.parametrize("trusts_network", [False, True])
def test_on_an_untrusted_network_a_member_elsewhere_fetches_deltas_and_the_reason_is_recorded_once(trusts_network):
    machines = {"g0": "", "g1": "elsewhere"}
    publisher, generators, _, _ = start(machines=machines, trusts_network=trusts_network, g0="well", g1="well")
    for version in (1, 2, 3):
        publish(publisher, version)
        generators.set_members(g0="well", g1="well")
        publisher.poll(timeout_s=0)
    assert publisher.num_holding == 2
    assert generators.updates(fetched=False) == ([(2, ["g1"]), (3, ["g1"])] if trusts_network else [])
    assert [name for name, _ in generators.evicted] == ([] if trusts_network else ["g1"])
    assert all("cluster.trusted_network" in reason for _, reason in generators.evicted)


def test_few_members_elsewhere_are_sent_to_the_learner_and_lenders_that_alter_weights_are_reported():
    publisher, generators, clock = start_many()
    publisher.set_version(stage(1))
    publisher.poll(timeout_s=0)
    publisher._fetches.request(stage(1))
    orders = list(generators.sent)
    assert sorted(len(order.members) for order in orders if not order.source.lenders) == [2, 6]
    assert sum(len(order.members) for order in orders) == 16
    assert all(bool(order.digests) == bool(order.source.lenders) for order in orders)
    clock.now += 6
    publisher.poll(timeout_s=0)
    # One message per member: the other recipients may have finished.
    repeated = [[each.peer_id for each in order.members] for order in generators.sent[len(orders) :]]
    assert sorted(repeated) == [[name] for name in sorted(generators.members)]
    publisher, generators, _ = start_many()
    publish(publisher, 1)
    order = next(order for order in generators.sent if getattr(order, "source", None) and order.source.lenders)
    liar, by = order.source.lenders[0], order.members[0].peer_id
    generators.evicted.clear()
    generators.finish_fetching(by, 1, lender_errors=[LenderError(liar, "bucket 0 differs", is_altered=True)])
    publisher.poll(timeout_s=0)
    ((name, reason),) = generators.evicted
    assert liar == generators.lends_at(name)
    assert f"{by} got other weights from it than were published: bucket 0 differs" in reason


HERE = {"g0": "", "g1": ""}


def sources(generators: FakeGenerators) -> list[SnapshotSource]:
    return [order.source for order in generators.sent if isinstance(order, Update) and order.source]


def test_members_on_the_learners_machine_read_its_memory_and_a_version_waits_for_all_of_them():
    publisher, generators, clock, snapshots = start(machines=HERE, g0="well", g1="well")
    for version in (1, 2):
        staged = stage(version)
        publisher.set_version(staged)
        assert publisher.synchronize().num_members == 2
        assert sources(generators)[-1].memory == staged.memory.path
    assert generators.updates(fetched=True) == [(1, ["g0", "g1"]), (2, ["g0", "g1"])]
    assert generators.updates(fetched=False) == snapshots.added == generators.opened_with == []
    generators.set_members(g0="well", g1="slow")
    started_at = clock.now
    assert publish(publisher, 3).num_members == 1
    assert 60 <= clock.now - started_at < 62


@pytest.mark.parametrize("ends_by", ["answering", "leaving", "missing its deadline"])
def test_memory_is_overwritten_only_once_every_reader_has_answered(ends_by: str):
    publisher, generators, clock, _ = start(machines=HERE, g0="well", g1="slow")
    publisher.set_version(stage(1))
    publisher.poll(timeout_s=0)
    publisher._fetches.request(publisher._staged)
    if ends_by == "answering":
        generators.finish_fetching("g1", 1)
    elif ends_by == "leaving":
        generators.set_members(g0="well")
    else:
        clock.now += 1000
    publisher.poll(timeout_s=0)
    before = publisher.set_version(stage(2))
    assert (before is not None) == (ends_by == "answering")
