import asyncio
import queue
import threading
from collections import Counter

import msgspec
import pytest

from slipstream.broker.errors import ClientDiedError
from slipstream.broker.messages import (
    Ack,
    AnyMessage,
    Bye,
    Drain,
    Hello,
    LeaseRequest,
    LivingBrokers,
    Member,
    Members,
    MemberState,
    Message,
    Nack,
    OpenEpoch,
    Ping,
    Pong,
    Put,
    Refuse,
    ReturnLeases,
    Welcome,
)
from slipstream.broker.transport.channels import MemoryBroker, MemoryServerChannel
from slipstream.broker.transport.client import BrokerClient, BrokerClientThread, Route, preferred
from slipstream.broker.transport.outbox import Outbox
from slipstream.broker.transport.session import QueueInbox, call_threadsafe
from slipstream.buffer.codec import decode, encode
from slipstream.configs.broker import BROKER_SILENCE_S
from tests.builders import make_packed
from tests.cases import cases
from tests.fakes import FakeClock

BROKERS = {"broker": "ipc:///a", "broker-1": "ipc:///b"}
FOUR = {f"broker-{number}": f"tcp://10.0.0.1:{20000 + number}" for number in range(4)}
PEERS = [f"generator-{number}" for number in range(1000)]
BEST, SECOND = preferred("generator-7", ["broker", "broker-1"])
TUNNELS = {BEST: "tcp://127.0.0.1:5757", SECOND: "tcp://127.0.0.1:6757"}
ANNOUNCED = {BEST: "tcp://10.0.0.1:20000", SECOND: "tcp://10.0.0.1:20001"}


class FakeBroker:
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
    hello, status = Hello("generator", "g", "1", "here", 1), Pong(-1.0, "ready", 3, gauges={"running": 2})
    client = BrokerClient(hub.client(), hello=hello, status=lambda: status, on_message=received.append, clock=clock)
    return client, broker, clock, received


def make_welcome(incarnation: str = "b1") -> Welcome:
    credit = {"credit_messages": 8, "credit_bytes": 10**6}
    return Welcome("run", "{}", "", 0, broker_incarnation=incarnation, num_heldout={"sampled": 4}, **credit)


def deliver(client: BrokerClient, broker: FakeBroker, message: Message) -> None:
    broker.send(message)
    client.step(timeout_s=0)


def join(client: BrokerClient, broker: FakeBroker) -> None:
    client.step(timeout_s=0)
    broker.receive()
    deliver(client, broker, make_welcome())


def test_hello_is_repeated_until_welcome_and_a_ping_is_answered_with_the_role_s_status():
    client, broker, clock, received = make_pair()
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    clock.now += 1.0
    client.step(timeout_s=0)
    assert [type(m) for m in broker.receive()] == [Hello]
    deliver(client, broker, make_welcome())
    assert client.is_joined
    assert isinstance(received[-1], Welcome)
    client, broker, _, _ = make_pair()
    join(client, broker)
    broker.receive()
    deliver(client, broker, Ping(sent_at=7.0))
    client.step(timeout_s=0)
    assert broker.receive() == [Pong(7.0, "ready", 3, "", {"running": 2}, [])]


def test_trajectories_are_sent_in_one_message_until_acknowledged():
    client, broker, clock, _ = make_pair()
    packed = [make_packed(str(number)) for number in range(3)]
    for header, payload in packed:
        client.put(header, payload)
    put = Put([header for header, _ in packed])
    for _ in range(2):
        join(client, broker)
        client.step(timeout_s=0)
        assert [m for m in broker.receive() if isinstance(m, Put)] == [put]
        clock.now += 9.0
        client.step(timeout_s=0)
        assert not client.is_joined
    join(client, broker)
    deliver(client, broker, Ack([header.id for header in put.headers]))
    assert len(client.outbox) == 0


def test_a_fatal_nack_removes_the_trajectory_and_a_refused_client_sends_no_more_hellos():
    client, broker, _, received = make_pair()
    header, payload = make_packed()
    join(client, broker)
    client.put(header, payload)
    client.step(timeout_s=0)
    nack = Nack(header.id, "malformed", is_fatal=True)
    broker.receive()
    deliver(client, broker, nack)
    assert len(client.outbox) == 0
    assert received[-1] == nack
    client, broker, clock, received = make_pair()
    client.step(timeout_s=0)
    broker.receive()
    deliver(client, broker, Refuse("id taken"))
    clock.now += 5.0
    client.step(timeout_s=0)
    assert client.refusal == "id taken"
    assert broker.receive() == []
    assert received == [Refuse("id taken")]


def test_a_restarted_broker_is_answered_with_hello_at_once_and_gets_the_weight_order_again():
    client, broker, _, _ = make_pair()
    join(client, broker)
    client.put(*make_packed())
    client.step(timeout_s=0)
    broker.receive()
    deliver(client, broker, Bye())
    client.step(timeout_s=0)
    assert [type(message) for message in broker.receive()] == [Hello]
    deliver(client, broker, make_welcome("b2"))
    client.step(timeout_s=0)
    assert Put in [type(message) for message in broker.receive()]
    client, broker, _, _ = make_pair()
    join(client, broker)
    first, second = Member("g0", "1"), Member("g1", "1")
    order = OpenEpoch(1, [first, second], "127.0.0.1", 1, 1.0)
    deliver(client, broker, members(first, second))
    client.send(order)
    deliver(client, broker, members(first, second))
    assert broker.receive().count(order) == 1
    broker.send(Bye())
    broker.send(make_welcome("b2"))
    for connected in ([], [first], [first], [first, second]):
        broker.send(members(*connected))
    client.step(timeout_s=0)
    client.step(timeout_s=0)
    assert broker.receive().count(order) == 2, "once for each that came"


@cases(
    "is_moving, message, kept",
    (False, LeaseRequest(1), []),
    (True, ReturnLeases(["0-0"], reason="drained"), [ReturnLeases]),
)
def test_without_a_broker_requests_do_not_pile_up_and_returned_leases_wait(is_moving, message, kept):
    client, broker, clock, _ = make_moving_pair() if is_moving else make_pair()
    join(client, broker)
    clock.now += BROKER_SILENCE_S + 1
    broker.receive()
    client.step(timeout_s=0)
    client.send(message)
    client.step(timeout_s=0)
    assert [type(each) for each in broker.receive()] == [Hello, *kept]


def members(*connected: Member) -> Members:
    return Members([MemberState(member, "ready", 0) for member in connected])


def make_moving_pair():
    """A generator that prefers `broker` by its hash and knows one address."""
    client, broker, clock, received = make_pair()
    assert preferred("g", BROKERS) == ["broker", "broker-1"]
    client._route = Route("g", {"broker": "ipc:///a"}, is_reachable=lambda _: True)
    return client, broker, clock, received


def welcome_of(broker: str) -> Welcome:
    return msgspec.structs.replace(make_welcome(f"of {broker}"), living=LivingBrokers(broker, BROKERS))


def test_a_generator_goes_to_its_own_broker_and_to_the_next_after_a_silence_or_without_a_welcome():
    client, broker, _, received = make_moving_pair()
    client.put(*make_packed())
    client.step(timeout_s=0)
    broker.receive()
    deliver(client, broker, welcome_of("broker-1"))
    assert not client.is_joined
    assert received == [], "nobody has welcomed it yet"
    assert broker.receive() == [Bye(is_moving=True)]
    client.step(timeout_s=0)
    assert [type(message) for message in broker.receive()] == [Hello]
    deliver(client, broker, welcome_of("broker"))
    client.step(timeout_s=0)
    assert client.is_joined
    assert [type(message) for message in broker.receive()] == [Pong, Put]
    client, broker, clock, _ = make_moving_pair()
    client._route = Route("g", BROKERS, is_reachable=lambda _: True)
    client.step(timeout_s=0)
    broker.receive()
    deliver(client, broker, welcome_of("broker"))
    clock.now += BROKER_SILENCE_S + 1
    client.step(timeout_s=0)
    assert (client.is_joined, client._route.address) == (False, "ipc:///b")
    broker.receive()
    alone = LivingBrokers("broker-1", {"broker-1": "ipc:///b"})
    broker.send(msgspec.structs.replace(welcome_of("broker-1"), living=alone))
    client.step(timeout_s=0)
    assert client.is_joined
    broker.receive()
    deliver(client, broker, LivingBrokers("broker-1", BROKERS))
    assert broker.receive() == [Bye(is_moving=True)]
    assert (client.is_joined, client._route.address) == (False, "ipc:///a")
    client, broker, clock, _ = make_moving_pair()
    client._route = Route("g", BROKERS, is_reachable=lambda _: True)
    for address in ("ipc:///a", "ipc:///b", "ipc:///a"):
        client.step(timeout_s=0)
        assert client._route.address == address
        assert [type(message) for message in broker.receive()] == [Hello]
        clock.now += BROKER_SILENCE_S + 1


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


def test_queued_messages_are_forwarded_first_and_calls_made_by_a_running_loop_only() -> None:
    inbox, received = QueueInbox(), []
    inbox.put(Drain("first"))
    inbox.forward_to(received.append)
    inbox.put(Drain("second"))
    assert received == [Drain("first"), Drain("second")]
    received: list[str] = []

    async def listen() -> None:
        call_threadsafe(asyncio.get_running_loop(), received.append, "drain")
        await asyncio.sleep(0)

    asyncio.run(listen())
    loop = asyncio.new_event_loop()
    loop.close()
    call_threadsafe(loop, received.append, "late")
    assert received == ["drain"]


def test_a_message_that_arrives_while_a_listener_begins_is_forwarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving, goes_on = threading.Event(), threading.Event()

    class SlowQueue(queue.SimpleQueue):
        def put(self, message: Drain) -> None:
            arriving.set()
            goes_on.wait(1)
            super().put(message)

    monkeypatch.setattr(queue, "SimpleQueue", SlowQueue)
    inbox, received = QueueInbox(), []
    putting = threading.Thread(target=inbox.put, args=(Drain("now"),))
    beginning = threading.Thread(target=inbox.forward_to, args=(received.append,))
    putting.start()
    assert arriving.wait(5)
    beginning.start()
    beginning.join(0.05)
    goes_on.set()
    for thread in (putting, beginning):
        thread.join(5)
    assert received == [Drain("now")]


def route(peer_id: str, brokers: dict[str, str], *, reachable: set[str] | None = None) -> Route:
    return Route(peer_id, brokers, is_reachable=lambda address: reachable is None or address in reachable)


def test_peers_are_divided_about_equally_and_without_one_broker_only_its_peers_move_to_all_others():
    first = Counter(preferred(peer, FOUR)[0] for peer in PEERS)
    assert set(first) == set(FOUR)
    assert all(200 < number < 300 for number in first.values()), first
    assert preferred("generator-7", FOUR) == preferred("generator-7", reversed(FOUR))
    rest = [name for name in FOUR if name != "broker-2"]
    moved = [preferred(peer, rest)[0] for peer in PEERS if preferred(peer, FOUR)[0] == "broker-2"]
    stayed = [peer for peer in PEERS if preferred(peer, FOUR)[0] != "broker-2"]
    assert all(preferred(peer, rest)[0] == preferred(peer, FOUR)[0] for peer in stayed)
    assert set(moved) == set(rest)


def test_after_the_last_broker_comes_the_first_and_those_that_cannot_be_reached_are_passed_by():
    own = route("generator-7", FOUR)
    order = [FOUR[name] for name in preferred("generator-7", FOUR)]
    assert own.address == order[0]
    assert [own.next() for _ in range(4)] == [*order[1:], order[0]]
    assert route("generator-7", FOUR, reachable={order[3]}).next() == order[3]
    assert route("generator-7", FOUR, reachable=set()).next() == order[1], "which may be back by then"


def test_a_peer_learns_the_other_brokers_and_stays_while_its_own_is_gone_or_out_of_reach():
    best, second, *_ = preferred("generator-7", FOUR)
    own = route("generator-7", {"broker": FOUR[second]})
    assert not own.has_others
    assert own.follow(FOUR, at=second)
    assert own.address == FOUR[best]
    assert not own.follow(FOUR, at=best)
    assert own.address == FOUR[best]
    living = {name: address for name, address in FOUR.items() if name != best}
    own = route("generator-7", FOUR)
    own.next()
    assert not own.follow(living, at=second)
    assert own.address == FOUR[second]
    behind_tunnel = route("generator-7", {"broker": "tcp://127.0.0.1:5757"}, reachable={"tcp://127.0.0.1:5757"})
    assert not behind_tunnel.follow(FOUR, at=second)
    assert behind_tunnel.address == "tcp://127.0.0.1:5757", "not the one that the broker knows"
    assert not behind_tunnel.follow(dict.fromkeys(FOUR, ""), at=second)
    assert not behind_tunnel.has_others, "no other one has an address"


def test_tunnels_are_found_whatever_their_order_and_remembered_while_the_peer_is_at_another_broker():
    reachable = set(TUNNELS.values())
    own = route("generator-7", TUNNELS, reachable=reachable)
    assert not own.follow(ANNOUNCED, at=BEST)
    assert own.next() == TUNNELS[SECOND]
    assert not own.follow({SECOND: ANNOUNCED[SECOND]}, at=SECOND)
    assert own.follow(ANNOUNCED, at=SECOND), "the first one is back"
    assert own.address == TUNNELS[BEST]
    reachable.remove(TUNNELS[BEST])
    assert own.next() == TUNNELS[SECOND]
    # A tunnel accepts connections even if its other end is down.
    own = route("generator-7", TUNNELS)
    assert own.next() == TUNNELS[SECOND]
    assert not own.follow(TUNNELS, at=SECOND)
    assert not own.follow({SECOND: TUNNELS[SECOND]}, at=SECOND)
    assert own.follow(TUNNELS, at=SECOND)
    assert own.address == TUNNELS[BEST]
    own = route("generator-7", TUNNELS, reachable=set(TUNNELS.values()))
    assert own.follow(ANNOUNCED, at=SECOND), "the first tunnel leads to the second one"
    assert own.address == TUNNELS[SECOND]
    assert not own.follow(ANNOUNCED, at=BEST)
    assert own.next() == TUNNELS[BEST]
    own = route("generator-7", {BEST: TUNNELS[BEST]}, reachable={TUNNELS[BEST]})
    # The tunnel leads to the other one.
    assert not own.follow(ANNOUNCED, at=SECOND)
    assert own.address == TUNNELS[BEST]


def test_no_more_than_four_brokers_are_probed_at_a_time():
    many = {f"broker-{number}": f"tcp://10.0.0.1:{20000 + number}" for number in range(9)}
    last, probed = preferred("generator-7", many)[-1], []
    own = Route("generator-7", {last: many[last]}, is_reachable=lambda address: probed.append(address) is not None)
    assert not own.follow(many, at=last)
    assert probed == [many[name] for name in preferred("generator-7", many)[:4]]


def make_outbox(*, added: int = 0, messages: int = 2, size_bytes: int = 10**6, clock=lambda: 0.0) -> Outbox:
    """An outbox with a credit, to which the first members of a group were added."""
    outbox = Outbox(clock=clock)
    outbox.set_credit(messages=messages, size_bytes=size_bytes)
    for index in range(added):
        outbox.add(*make_packed(index=index, group_size=6))
    return outbox


def ids(sendable) -> list[str]:
    return [header.id for header, _ in sendable]


def test_sending_stops_at_the_credit_which_acks_free_but_one_trajectory_always_fits():
    outbox = make_outbox(added=3)
    assert ids(outbox.pop_sendable()) == ["0-0-0", "0-0-1"]
    assert ids(outbox.pop_sendable()) == []
    outbox.acknowledge(["0-0-0"])
    assert ids(outbox.pop_sendable()) == ["0-0-2"]
    assert len(outbox) == 2
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
    outbox = make_outbox(added=1, messages=1)
    outbox.pop_sendable()
    assert not outbox.is_over_credit
    outbox.add(*make_packed(index=1))
    assert outbox.is_over_credit


def test_a_nack_defers_a_trajectory_or_removes_it_and_a_new_broker_gets_everything_unacknowledged():
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
