"""A version is committed only when every live generator holds it. A failing generator is evicted and retried."""

import weakref
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import OpenEpoch, Update
from tests.unit.learner.fake_generators import (
    CANARY,
    WEIGHTS,
    FakeSnapshots,
    make_background,
    make_publisher,
    make_stager,
    publish,
    stage,
)


def test_all_living_generators_get_the_version_over_one_group():
    publisher, generators, _ = make_publisher(g0="well", g1="well")
    published = publish(publisher, 1)
    assert (published.version, published.num_members) == (1, 2)
    assert (published.probe_diff_max, published.pause_s) == (2e-7, 0.02)
    assert publish(publisher, 2).num_members == 2
    assert generators.opened_with == [2]
    assert not publisher.is_due


def test_a_joiner_is_due_and_a_new_epoch_is_opened_when_members_change_and_only_then():
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


def test_a_silent_member_is_evicted_and_the_others_get_the_version():
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


def test_a_generator_with_a_failed_probe_is_evicted_and_tried_again_with_a_backoff_that_doubles():
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


def test_a_waiting_version_is_replaced_by_the_next_and_neither_blocks_publish_nor_overwrites_buckets_in_flight():
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


def test_a_broadcast_is_aborted_when_a_member_dies_and_repeated_with_the_others():
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


def test_an_error_in_the_background_is_raised_in_the_learner():
    publisher, generators, _ = make_publisher(g0="well")
    background, _ = make_background(publisher)

    def broken(buckets, *, timeout_s: float) -> None:
        raise RuntimeError("a bug")

    generators.broadcast = broken
    background.publish(version=1, step=1, weights=WEIGHTS, canary=CANARY)
    with pytest.raises(RuntimeError, match="a bug"):
        background.flush()


def test_a_late_answer_of_an_evicted_member_counts():
    """A broker that restarts during a publish briefly knows no generators."""
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


@pytest.mark.parametrize(
    ("own", "others", "setting", "expected"),
    [
        ("cuda:GPU-0", ["cuda:GPU-1", "cuda:GPU-2"], "auto", ["nccl"]),
        ("cuda:GPU-0", ["cuda:GPU-0"], "auto", ["gloo"]),
        ("cuda:GPU-0", ["cuda:GPU-1", "cuda:GPU-1"], "auto", ["gloo"]),
        ("cuda:GPU-0", ["cuda:GPU-1", "cpu"], "auto", ["gloo"]),
        ("cpu", ["cuda:GPU-1"], "auto", ["gloo"]),
        ("cpu", ["cpu"], "auto", ["gloo"]),
        ("cuda:GPU-0", ["cuda:GPU-1"], "gloo", ["gloo"]),
        ("cuda:GPU-0", ["cuda:GPU-0"], "nccl", []),
    ],
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
