"""The order in which a generator joins brokers."""

from collections import Counter

from slipstream.broker.transport.client import Route, preferred

FOUR = {f"broker-{number}": f"tcp://10.0.0.1:{20000 + number}" for number in range(4)}
PEERS = [f"generator-{number}" for number in range(1000)]


def route(peer_id: str, brokers: dict[str, str], *, reachable: set[str] | None = None) -> Route:
    return Route(peer_id, brokers, is_reachable=lambda address: reachable is None or address in reachable)


def test_peers_are_divided_about_equally_and_always_alike():
    first = Counter(preferred(peer, FOUR)[0] for peer in PEERS)
    assert set(first) == set(FOUR)
    assert all(200 < number < 300 for number in first.values()), first
    assert preferred("generator-7", FOUR) == preferred("generator-7", reversed(FOUR))


def test_without_one_broker_only_its_peers_move_and_to_all_others():
    rest = [name for name in FOUR if name != "broker-2"]
    moved = [preferred(peer, rest)[0] for peer in PEERS if preferred(peer, FOUR)[0] == "broker-2"]
    stayed = [peer for peer in PEERS if preferred(peer, FOUR)[0] != "broker-2"]
    assert all(preferred(peer, rest)[0] == preferred(peer, FOUR)[0] for peer in stayed)
    assert set(moved) == set(rest)


def test_after_the_last_broker_comes_the_first():
    own = route("generator-7", FOUR)
    order = [FOUR[name] for name in preferred("generator-7", FOUR)]
    assert own.address == order[0]
    assert [own.next() for _ in range(4)] == [*order[1:], order[0]]


def test_a_peer_that_knows_one_address_learns_the_others_and_goes_to_its_own():
    best, second, *_ = preferred("generator-7", FOUR)
    own = route("generator-7", {"broker": FOUR[second]})
    assert not own.has_others
    assert own.follow(FOUR, at=second)
    assert own.address == FOUR[best]
    assert not own.follow(FOUR, at=best)
    assert own.address == FOUR[best]


def test_a_peer_stays_where_it_is_while_its_own_broker_is_gone_or_out_of_reach():
    best, second, *_ = preferred("generator-7", FOUR)
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


def test_a_tunnel_is_remembered_while_the_peer_is_at_another_broker():
    best, second = preferred("generator-7", ["broker", "broker-1"])
    tunnels = {best: "tcp://127.0.0.1:5757", second: "tcp://127.0.0.1:6757"}
    announced = {best: "tcp://10.0.0.1:20000", second: "tcp://10.0.0.1:20001"}
    reachable = set(tunnels.values())
    own = route("generator-7", tunnels, reachable=reachable)
    assert not own.follow(announced, at=best)
    assert own.next() == tunnels[second]
    assert not own.follow({second: announced[second]}, at=second)
    assert own.follow(announced, at=second), "the first one is back"
    assert own.address == tunnels[best]
    reachable.remove(tunnels[best])
    assert own.next() == tunnels[second]


def test_an_address_at_which_nobody_answered_is_not_tried_again_before_its_broker_was_gone():
    # A tunnel accepts connections even if its other end is down.
    best, second = preferred("generator-7", ["broker", "broker-1"])
    both = {best: "tcp://127.0.0.1:5757", second: "tcp://127.0.0.1:6757"}
    own = route("generator-7", both)
    assert own.next() == both[second]
    assert not own.follow(both, at=second)
    assert not own.follow({second: both[second]}, at=second)
    assert own.follow(both, at=second)
    assert own.address == both[best]


def test_tunnels_are_found_whatever_their_order():
    best, second = preferred("generator-7", ["broker", "broker-1"])
    announced = {best: "tcp://10.0.0.1:20000", second: "tcp://10.0.0.1:20001"}
    tunnels = {best: "tcp://127.0.0.1:5757", second: "tcp://127.0.0.1:5758"}
    own = route("generator-7", tunnels, reachable=set(tunnels.values()))
    assert own.follow(announced, at=second), "the first tunnel leads to the second one"
    assert own.address == tunnels[second]
    assert not own.follow(announced, at=best)
    assert own.next() == tunnels[best]


def test_a_broker_is_known_by_the_name_that_it_has_and_not_by_an_assumed_one():
    best, second = preferred("generator-7", ["broker", "broker-1"])
    own = route("generator-7", {best: "tcp://127.0.0.1:5757"}, reachable={"tcp://127.0.0.1:5757"})
    # The tunnel leads to the other one.
    assert not own.follow({best: "tcp://10.0.0.1:20000", second: "tcp://10.0.0.1:20001"}, at=second)
    assert own.address == "tcp://127.0.0.1:5757"


def test_a_peer_whose_broker_dies_passes_by_others_that_cannot_be_reached():
    order = [FOUR[name] for name in preferred("generator-7", FOUR)]
    assert route("generator-7", FOUR, reachable={order[3]}).next() == order[3]
    assert route("generator-7", FOUR, reachable=set()).next() == order[1], "which may be back by then"


def test_no_more_than_four_brokers_are_probed_at_a_time():
    many = {f"broker-{number}": f"tcp://10.0.0.1:{20000 + number}" for number in range(9)}
    last, probed = preferred("generator-7", many)[-1], []
    own = Route("generator-7", {last: many[last]}, is_reachable=lambda address: probed.append(address) is not None)
    assert not own.follow(many, at=last)
    assert probed == [many[name] for name in preferred("generator-7", many)[:4]]
