"""The outbox holds a trajectory until it is acknowledged."""

from slipstream.broker.messages import Nack
from slipstream.broker.transport.outbox import Outbox
from tests.builders import make_packed
from tests.fakes import FakeClock


def make_outbox(*, added: int = 0, messages: int = 2, size_bytes: int = 10**6, clock=lambda: 0.0) -> Outbox:
    """An outbox with a credit, to which the first members of a group were added."""
    outbox = Outbox(clock=clock)
    outbox.set_credit(messages=messages, size_bytes=size_bytes)
    for index in range(added):
        outbox.add(*make_packed(index=index, group_size=6))
    return outbox


def ids(sendable) -> list[str]:
    return [header.id for header, _ in sendable]


def test_sending_stops_at_the_credit_and_an_ack_frees_it():
    outbox = make_outbox(added=3)
    assert ids(outbox.pop_sendable()) == ["0-0-0", "0-0-1"]
    assert ids(outbox.pop_sendable()) == []
    outbox.acknowledge(["0-0-0"])
    assert ids(outbox.pop_sendable()) == ["0-0-2"]
    assert len(outbox) == 2


def test_the_credit_in_bytes_binds_and_acks_free_it_but_one_trajectory_always_fits():
    outbox = make_outbox(added=2, messages=10, size_bytes=1)
    assert ids(outbox.pop_sendable()) == ["0-0-0"]
    outbox.acknowledge(["0-0-0"])
    assert ids(outbox.pop_sendable()) == ["0-0-1"]
    payload_bytes = len(make_packed(index=0)[1])
    outbox = make_outbox(added=6, messages=10, size_bytes=2 * payload_bytes)
    for first in (0, 2, 4):
        sent = ids(outbox.pop_sendable())
        assert sent == [f"0-0-{first}", f"0-0-{first + 1}"]
        outbox.acknowledge(sent)


def test_everything_unacknowledged_is_resent_to_a_new_broker_and_a_late_nack_delays_nothing():
    outbox = make_outbox(added=2)
    outbox.pop_sendable()
    outbox.acknowledge(["0-0-1"])
    outbox.resend_all()
    assert ids(outbox.pop_sendable()) == ["0-0-0"]
    outbox = make_outbox(added=2)
    outbox.pop_sendable()
    outbox.resend_all()
    outbox.reject(Nack("0-0-0", "store_full", is_fatal=False, retry_after_s=60.0))
    assert ids(outbox.pop_sendable()) == ["0-0-0", "0-0-1"]


def test_a_nack_defers_a_trajectory_or_removes_it():
    clock = FakeClock(0.0)
    outbox = make_outbox(added=2, clock=clock)
    outbox.pop_sendable()
    outbox.reject(Nack("0-0-0", "store_full", is_fatal=False, retry_after_s=1.0))
    outbox.reject(Nack("0-0-1", "malformed", is_fatal=True))
    assert len(outbox) == 1
    assert ids(outbox.pop_sendable()) == []
    outbox.add(*make_packed(index=2, group_size=3))
    assert ids(outbox.pop_sendable()) == ["0-0-2"], "what is deferred delays no other"
    clock.now = 1.0
    assert ids(outbox.pop_sendable()) == ["0-0-0"]


def test_it_is_over_credit_only_while_trajectories_wait():
    outbox = make_outbox(added=1, messages=1)
    outbox.pop_sendable()
    assert not outbox.is_over_credit
    outbox.add(*make_packed(index=1))
    assert outbox.is_over_credit


def test_unanswered_trajectories_are_resent():
    """A brief connection loss silently drops frames in transit."""
    clock = FakeClock(0.0)
    payload_bytes = len(make_packed(index=0)[1])
    outbox = make_outbox(added=3, size_bytes=2 * payload_bytes, clock=clock)
    assert ids(outbox.pop_sendable()) == ["0-0-0", "0-0-1"]
    clock.now = 10.0
    outbox.acknowledge(["0-0-1"])
    assert ids(outbox.pop_sendable()) == ["0-0-2"]
    clock.now = 16.0
    assert ids(outbox.pop_sendable()) == ["0-0-0"]
    outbox.acknowledge(["0-0-0", "0-0-2"])
    clock.now = 60.0
    assert ids(outbox.pop_sendable()) == []
    assert len(outbox) == 0
