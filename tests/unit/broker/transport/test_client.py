"""A client rejoins after a loss of the broker and resends until acknowledged."""

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
    """A broker driven by the test."""

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
    client = BrokerClient(
        hub.client(),
        hello=Hello("generator", "g", "1", "here", 1),
        status=lambda: PeerStatus("ready", version=3, gauges={"running": 2}),
        on_message=received.append,
        clock=clock,
    )
    return client, broker, clock, received


def make_welcome(incarnation: str = "b1") -> Welcome:
    return Welcome(
        "run",
        "{}",
        "",
        0,
        credit_messages=8,
        credit_bytes=10**6,
        broker_incarnation=incarnation,
        num_heldout={"sampled": 4},
    )


def join(client: BrokerClient, broker: FakeBroker) -> None:
    client.step(timeout_s=0)
    broker.receive()
    broker.send(make_welcome())
    client.step(timeout_s=0)


def test_hello_is_repeated_until_welcome():
    client, broker, clock, received = make_pair()
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    clock.now += 1.0
    client.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    broker.send(make_welcome())
    client.step(timeout_s=0)
    assert client.is_joined
    assert isinstance(received[-1], Welcome)


def test_a_ping_is_answered_with_the_role_s_status():
    client, broker, _, _ = make_pair()
    join(client, broker)
    broker.receive()
    broker.send(Ping(sent_at=7.0))
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert broker.receive() == [Pong(7.0, "ready", 3, "", {"running": 2}, [])]


def test_a_trajectory_is_sent_until_acknowledged():
    client, broker, clock, _ = make_pair()
    header, payload = make_packed()
    client.put(header, payload)
    join(client, broker)
    client.step(timeout_s=0)
    assert Put([header]) in broker.receive()
    clock.now += 9.0
    client.step(timeout_s=0)
    assert not client.is_joined
    join(client, broker)
    client.step(timeout_s=0)
    assert Put([header]) in broker.receive()
    broker.send(Ack([header.id]))
    client.step(timeout_s=0)
    assert len(client.outbox) == 0


def test_waiting_trajectories_are_sent_in_one_message():
    client, broker, _, _ = make_pair()
    packed = [make_packed(str(number)) for number in range(3)]
    for header, payload in packed:
        client.put(header, payload)
    join(client, broker)
    client.step(timeout_s=0)
    assert [m for m in broker.receive() if isinstance(m, Put)] == [Put([header for header, _ in packed])]


def test_a_fatal_nack_removes_the_trajectory_and_reaches_the_role():
    client, broker, _, received = make_pair()
    header, payload = make_packed()
    join(client, broker)
    client.put(header, payload)
    client.step(timeout_s=0)
    nack = Nack(header.id, "malformed", is_fatal=True)
    broker.receive()
    broker.send(nack)
    client.step(timeout_s=0)
    assert len(client.outbox) == 0
    assert received[-1] == nack


def test_a_refused_client_sends_no_more_hellos():
    client, broker, clock, received = make_pair()
    client.step(timeout_s=0)
    broker.receive()
    broker.send(Refuse("id taken"))
    client.step(timeout_s=0)
    clock.now += 5.0
    client.step(timeout_s=0)
    assert client.refusal == "id taken"
    assert broker.receive() == []
    assert received == [Refuse("id taken")]


def test_a_bye_of_a_restarted_broker_is_answered_with_hello_at_once():
    client, broker, _, _ = make_pair()
    join(client, broker)
    client.put(*make_packed())
    client.step(timeout_s=0)
    broker.receive()
    broker.send(Bye())
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert [type(message) for message in broker.receive()] == [Hello]
    broker.send(make_welcome("b2"))
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert Put in [type(message) for message in broker.receive()]


def test_a_weight_order_is_resent_once_a_new_broker_reports_members():
    client, broker, _, _ = make_pair()
    join(client, broker)
    order = OpenEpoch(1, [], "127.0.0.1", 1, 1.0)
    client.send(order)
    broker.send(Members([]))
    client.step(timeout_s=0)
    assert broker.receive().count(order) == 1
    broker.send(Bye())
    broker.send(make_welcome("b2"))
    broker.send(Members([]))
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert broker.receive().count(order) == 1


def test_an_exception_on_the_clients_thread_reaches_the_role():
    client, *_ = make_pair()
    inbox = QueueInbox()
    client.on_end = inbox.put

    def fail(*, timeout_s: float) -> None:
        raise IndexError("a bug")

    client.step = fail  # type: ignore[method-assign]
    thread = BrokerClientThread(client)
    thread.start()
    with pytest.raises(ClientDiedError, match="IndexError: a bug"):
        inbox.get(timeout_s=10)
    thread.stop()
