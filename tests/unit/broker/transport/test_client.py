"""A link stays joined through losses of the broker, and delivers until acknowledged."""

import pytest

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import (
    Ack,
    AnyMessage,
    Bye,
    Hello,
    Members,
    Nack,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    Refuse,
    Welcome,
)
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, PeerStatus
from slipstream.broker.transport.inbox import QueueInbox
from slipstream.broker.transport.memory_channels import MemoryBroker, MemoryServerChannel
from slipstream.buffer.codec import decode, encode
from tests.builders import make_packed
from tests.fakes import FakeClock


class FakeBroker:
    """Answers by hand; keeps what it received."""

    def __init__(self, server: MemoryServerChannel) -> None:
        self.server = server
        self.identity = b""

    def receive(self) -> list:
        messages = []
        while (received := self.server.receive(timeout_s=0)) is not None:
            self.identity, frames = received
            messages.append(decode(frames[0], AnyMessage))
        return messages

    def send(self, message) -> None:
        assert self.server.send(self.identity, [encode(message)])


def make_pair():
    hub, clock, received = MemoryBroker(), FakeClock(100.0), []
    broker = FakeBroker(hub.server())
    link = BrokerClient(
        hub.client(),
        hello=Hello("generator", "g", "1", "here", 1),
        status=lambda: PeerStatus("ready", version=3, gauges={"running": 2}),
        on_message=received.append,
        clock=clock,
    )
    return link, broker, clock, received


def make_welcome(incarnation: str = "b1") -> Welcome:
    return Welcome("run", "{}", "", 0, credit_messages=8, credit_bytes=10**6, broker_incarnation=incarnation)


def join(link: BrokerClient, broker: FakeBroker) -> None:
    link.step(timeout_s=0)
    broker.receive()
    broker.send(make_welcome())
    link.step(timeout_s=0)


def test_hello_is_repeated_until_welcome():
    link, broker, clock, received = make_pair()
    link.step(timeout_s=0)
    link.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    clock.now += 1.0
    link.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    broker.send(make_welcome())
    link.step(timeout_s=0)
    assert link.is_joined
    assert isinstance(received[-1], Welcome)


def test_a_ping_is_answered_with_the_role_s_status():
    link, broker, _, _ = make_pair()
    join(link, broker)
    broker.receive()
    broker.send(Ping(sent_at=7.0))
    link.step(timeout_s=0)
    link.step(timeout_s=0)
    assert broker.receive() == [Pong(7.0, "ready", 3, "", {"running": 2}, [])]


def test_a_trajectory_is_sent_until_acknowledged():
    link, broker, clock, _ = make_pair()
    header, payload = make_packed()
    link.put(header, payload)
    join(link, broker)
    link.step(timeout_s=0)
    assert Put([header]) in broker.receive()
    clock.now += 9.0
    link.step(timeout_s=0)
    assert not link.is_joined
    join(link, broker)
    link.step(timeout_s=0)
    assert Put([header]) in broker.receive()
    broker.send(Ack([header.id]))
    link.step(timeout_s=0)
    assert len(link.outbox) == 0


def test_trajectories_that_wait_together_travel_together():
    link, broker, _, _ = make_pair()
    packed = [make_packed(str(number)) for number in range(3)]
    for header, payload in packed:
        link.put(header, payload)
    join(link, broker)
    link.step(timeout_s=0)
    assert [m for m in broker.receive() if isinstance(m, Put)] == [Put([header for header, _ in packed])]


def test_a_fatal_nack_ends_the_sending_and_is_told_to_the_role():
    link, broker, _, received = make_pair()
    header, payload = make_packed()
    join(link, broker)
    link.put(header, payload)
    link.step(timeout_s=0)
    nack = Nack(header.id, "malformed", is_fatal=True)
    broker.receive()
    broker.send(nack)
    link.step(timeout_s=0)
    assert len(link.outbox) == 0
    assert received[-1] == nack


def test_a_refused_peer_stops_saying_hello():
    link, broker, clock, received = make_pair()
    link.step(timeout_s=0)
    broker.receive()
    broker.send(Refuse("id taken"))
    link.step(timeout_s=0)
    clock.now += 5.0
    link.step(timeout_s=0)
    assert link.refusal == "id taken"
    assert broker.receive() == []
    assert received == [Refuse("id taken")]


def test_a_broker_that_does_not_know_us_is_greeted_at_once():
    link, broker, _, _ = make_pair()
    join(link, broker)
    link.put(*make_packed())
    link.step(timeout_s=0)
    broker.receive()
    broker.send(Bye())
    link.step(timeout_s=0)
    link.step(timeout_s=0)
    assert [type(message) for message in broker.receive()] == [Hello]
    broker.send(make_welcome("b2"))
    link.step(timeout_s=0)
    link.step(timeout_s=0)
    assert Put in [type(message) for message in broker.receive()]


def test_an_order_about_weights_is_said_again_to_the_members_a_new_broker_knows():
    link, broker, _, _ = make_pair()
    join(link, broker)
    order = OpenEpoch(1, [], "127.0.0.1", 1, 1.0)
    link.send(order)
    broker.send(Members([]))
    link.step(timeout_s=0)
    assert broker.receive().count(order) == 1
    broker.send(Bye())
    broker.send(make_welcome("b2"))
    broker.send(Members([]))
    link.step(timeout_s=0)
    link.step(timeout_s=0)
    assert broker.receive().count(order) == 1


def test_a_bug_on_the_links_own_thread_is_heard_by_the_role():
    link, *_ = make_pair()
    inbox = QueueInbox()
    link.on_end = inbox.put

    def fail(*, timeout_s: float) -> None:
        raise IndexError("a bug")

    link.step = fail  # type: ignore[method-assign]
    thread = BrokerClientThread(link)
    thread.start()
    with pytest.raises(ClientDiedError, match="the link to the broker ended: IndexError: a bug"):
        inbox.get(timeout_s=10)
    thread.stop()
