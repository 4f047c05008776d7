"""Joiners fetch before they join broadcasts. A fetch delays no other member; a failed fetch evicts the member."""

from typing import Any

import pytest

from slipstream.broker.messages import LenderError, SnapshotSource, Update
from slipstream.learner.publishing.publisher import Publisher
from tests.fakes import FakeClock
from tests.unit.learner.fake_generators import FakeGenerators, FakeSnapshots, make_publisher, publish, stage


def start(**settings: Any) -> tuple[Publisher, FakeGenerators, FakeClock, FakeSnapshots]:
    snapshots = FakeSnapshots()
    return *make_publisher(snapshots=snapshots, **settings), snapshots


def start_many() -> tuple[Publisher, FakeGenerators, FakeClock]:
    """Slow generators on 16 other machines."""
    names = {f"g{number:02}": "slow" for number in range(16)}
    return start(machines={name: f"machine-{name}" for name in names}, **names)[:3]


def test_a_joiner_fetches_its_first_version_and_joins_the_next_broadcast():
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


def test_a_joiner_does_not_disturb_the_group_before_it_holds_a_version():
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


def test_a_version_that_only_a_slow_member_will_hold_waits_for_it():
    publisher, generators, clock, _ = start(g0="slow")
    started_at = clock.now
    assert publish(publisher, 1).num_members == 0
    assert clock.now - started_at >= 60
    generators.finish_fetching("g0", 1)
    assert publish(publisher, 2).num_members == 1
    assert clock.now - started_at < 61


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


def test_a_version_that_is_being_fetched_is_kept():
    publisher, generators, _, snapshots = start(transports={"g1": "snapshot"}, g0="well", g1="slow")
    publish(publisher, 1)
    generators.set_members(g0="well", g1="slow", g2="well")
    publish(publisher, 2)
    assert snapshots.added == [(1, False, []), (2, False, [1])]


def test_a_request_is_repeated_and_ends_with_an_eviction_at_its_deadline():
    publisher, generators, clock, _ = start(g0="well", g1="slow")
    publish(publisher, 1)
    clock.now += 6
    publisher.poll(timeout_s=0)
    # Not to the other member, which may hold a later version.
    assert [names for _, names in generators.updates(fetched=True)] == [["g0", "g1"], ["g1"]]
    clock.now += 660
    publisher.poll(timeout_s=0)
    assert generators.evicted == [("g1", "evicted: version 1 was not applied within 660 s")]


def test_answers_for_another_version_do_not_count_and_requests_of_members_that_left_are_dropped():
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


def test_a_member_that_failed_to_apply_a_version_is_evicted_and_asked_again():
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


def test_a_member_that_fetched_an_outdated_version_fetches_the_next_if_no_broadcast_follows():
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


def test_a_version_that_no_member_holds_is_broadcast_to_one_that_just_fetched():
    publisher, generators, _, _ = start(g0="slow")
    publish(publisher, 1)
    publish(publisher, 2)
    generators.finish_fetching("g0", 1)
    assert publisher.is_due
    publisher.synchronize()
    assert generators.updates(fetched=False) == [(2, ["g0"])]
    assert {version for version, _ in generators.updates(fetched=True)} == {1}


def test_an_evicted_member_fetches_before_it_joins_broadcasts_again():
    publisher, generators, clock, _ = start(g0="well")
    publish(publisher, 1)
    generators.members["g0"] = "wrong"
    publish(publisher, 2)
    generators.members["g0"] = "well"
    clock.now += 3
    publisher.synchronize()
    assert generators.updates(fetched=True) == [(1, ["g0"]), (2, ["g0"])]


def test_a_full_disk_evicts_the_joiners_with_the_reason():
    publisher, generators, clock, snapshots = start(g0="well")
    snapshots.error = "the snapshot of version 1 must fit into /weights"
    assert publish(publisher, 1).num_members == 0
    assert generators.evicted == [("g0", f"evicted: {snapshots.error}")]
    snapshots.error = ""
    clock.now += 3
    assert publisher.synchronize().num_members == 1


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


def test_only_few_members_elsewhere_are_sent_to_the_learner_and_the_others_get_digests():
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


def test_a_lender_that_altered_weights_is_reported():
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


def test_a_member_that_cannot_read_memory_gets_files():
    publisher, generators, clock, snapshots = start(machines=HERE, g0="wrong")
    publish(publisher, 1)
    generators.set_members(g0="well")
    clock.now += 100
    publish(publisher, 2)
    assert [bool(source.memory) for source in sources(generators)] == [True, False]
    assert snapshots.added == [(2, False, [])]
