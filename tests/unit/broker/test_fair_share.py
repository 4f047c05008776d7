"""How many groups each generator gets, by speeds."""

import pytest

from slipstream.broker.fair_share import FairShare, Pace, finish_s, share
from slipstream.broker.messages import Hello
from slipstream.broker.peers import Peer
from slipstream.buffer.records import Lease
from tests.unit.broker.router_scene import FakeClock

FAST = Pace(group_s=1.0, groups_per_s=8.0, in_flight=0)
SLOW = Pace(group_s=10.0, groups_per_s=0.8, in_flight=0)


# --- the formula -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("paces", "num_groups", "seconds"),
    [
        # Eight at eight a second.
        ([FAST], 8, 1.0),
        # Less than it does in one go.
        ([FAST], 2, 1.0),
        # 8 / 8.8 s of work, but the slow one's first group is back after 10.
        ([FAST, SLOW], 8, 1.0),
        # 100 / 8 = 12.5 without the slow one, 100 / 8.8 with it.
        ([SLOW, FAST], 100, 100 / 8.8),
        # 80 / 8 without, 80 / 8.8 = 9.1 with, but not before 10.
        ([SLOW, FAST], 80, 10.0),
        # What is out counts: (8 + 8) / 8.
        ([Pace(1.0, 8.0, 8)], 8, 2.0),
        # Two alike halve it.
        ([Pace(1.0, 2.0, 0), Pace(1.0, 2.0, 0)], 8, 2.0),
        # Alone 12 / 2; with the second (12 + 3) / 3.
        ([Pace(1.0, 2.0, 0), Pace(4.0, 1.0, 3)], 12, 5.0),
    ],
)
def test_the_last_group_is_back_after(paces: list[Pace], num_groups: int, seconds: float):
    assert finish_s(paces, num_groups=num_groups) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("paces", "num_groups", "shares"),
    [
        ([FAST], 8, [8]),
        ([FAST, SLOW], 8, [8, 0]),
        # A hundred and ten in 12.5 s.
        ([FAST, SLOW], 110, [100, 10]),
        # 80 in 9.1 s: 72.7 and 7.3.
        ([FAST, SLOW], 80, [73, 7]),
        # Twice what there is could be done in one go: half each.
        ([FAST, FAST], 8, [4, 4]),
        ([FAST, FAST], 7, [4, 4]),
        # Of 2 and 12: a third and two thirds of 15, less what they have.
        ([Pace(1.0, 2.0, 0), Pace(1.5, 1.0, 3)], 12, [10, 2]),
        # 9 in all, of which one has more than its half.
        ([Pace(1.0, 2.0, 0), Pace(1.0, 2.0, 6)], 3, [4, 0]),
        # 0.2 of a group is one; nobody's share is nothing while he has less than it.
        ([Pace(1.0, 8.0, 0), Pace(1.0, 0.2, 0)], 8, [8, 1]),
        ([Pace(1.0, 1.0, 1), Pace(1.0, 1.0, 1), Pace(1.0, 1.0, 1)], 1, [1, 1, 1]),
    ],
)
def test_shares_go_by_speed(paces: list[Pace], num_groups: int, shares: list[int]):
    assert [share(pace, paces, num_groups=num_groups) for pace in paces] == shares


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7, 8, 50, 10**6])
@pytest.mark.parametrize("in_flight", [0, 1, 9])
def test_somebody_always_gets_something(num_groups: int, in_flight: int):
    paces = [FAST, SLOW, Pace(2.0, 2.5, in_flight), Pace(1.0, 0.1, in_flight)]
    assert sum(share(pace, paces, num_groups=num_groups) for pace in paces) > 0


# --- generators ------------------------------------------------------------------------------------------------------
class Scene:
    """Generators by name; each lease has one member."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.shares = FairShare(lost_after_s=8.0, clock=self.clock)
        self.num_leased = 0

    def enter(self, name: str, *, version: int = 0, state: str = "ready") -> Peer:
        peer = Peer(name.encode(), Hello("generator", name, "1", "here", 1), self.clock.now, state, version)
        self.shares.enter(peer)
        return peer

    def lease(self, peer: Peer, count: int) -> list[str]:
        """Returns the ids of their trajectories; the peer says in its Pongs that it holds them."""
        ordinals = range(self.num_leased, self.num_leased + count)
        self.num_leased += count
        leases = [Lease(f"{n}-0", str(n), "train", n, n, attempt=0, indices=[0]) for n in ordinals]
        self.shares.lease(peer, leases)
        peer.lease_ids = [*peer.lease_ids, *(lease.id for lease in leases)]
        return [f"{lease.id}-0" for lease in leases]

    def measure(self, peer: Peer, *, count: int, seconds: float) -> None:
        """Lease so many together, and have them back after so long."""
        ids = self.lease(peer, count)
        self.clock.now += seconds
        self.shares.accept(peer, ids)
        peer.lease_ids = []

    def of(self, peer: Peer, num_groups: int, *, oldest_version: int = 0) -> int:
        return self.shares.of(peer, num_groups=num_groups, oldest_version=oldest_version)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def pair(scene: Scene) -> tuple[Peer, Peer]:
    """Eight together take one a second, the other ten."""
    fast, slow = scene.enter("fast"), scene.enter("slow")
    scene.measure(fast, count=8, seconds=1.0)
    scene.measure(slow, count=8, seconds=10.0)
    return fast, slow


def test_nothing_is_limited_for_one_alone_nor_before_anybody_is_measured(scene: Scene):
    first = scene.enter("first")
    scene.measure(first, count=1, seconds=100.0)
    assert (scene.of(first, 64), scene.shares.are_limited) == (64, False)
    scene.shares.leave(first)
    for name in ("second", "third"):
        assert scene.of(scene.enter(name), 64) == 64


def test_equals_share_equally_also_one_that_is_new(scene: Scene):
    first, second = scene.enter("first"), scene.enter("second")
    scene.measure(first, count=8, seconds=2.0)
    assert scene.shares.are_limited
    assert (scene.of(first, 8), scene.of(second, 8)) == (4, 4)
    scene.lease(first, 4)
    assert (scene.of(first, 4), scene.of(second, 4)) == (0, 4)


def test_a_slow_one_gets_nothing_of_a_batch_it_would_hold_up(scene: Scene):
    fast, slow = pair(scene)
    assert (scene.of(slow, 8), scene.of(fast, 8)) == (0, 8)
    scene.lease(fast, 8)
    assert scene.of(slow, 1) == 0


def test_a_slow_one_gets_what_it_does_while_the_others_are_busy(scene: Scene):
    fast, slow = pair(scene)
    assert (scene.of(slow, 110), scene.of(fast, 110)) == (10, 100)
    scene.lease(slow, 10)
    assert (scene.of(slow, 100), scene.of(fast, 100)) == (0, 100)


def test_one_that_hangs_or_is_gone_leaves_the_work_to_the_others(scene: Scene):
    fast, slow = pair(scene)
    scene.lease(fast, 8)
    assert scene.of(slow, 8) == 0
    scene.clock.now += 10.1
    assert scene.of(slow, 8) > 0
    third, _ = scene.enter("third"), scene.shares.leave(fast)
    assert scene.of(third, 8) > 0


def test_prompts_nobody_takes_go_to_the_slow_one_after_its_own_time(scene: Scene):
    _, slow = pair(scene)
    assert scene.of(slow, 8) == 0
    scene.clock.now += 9.9
    assert scene.of(slow, 8) == 0
    scene.clock.now += 0.2
    assert scene.of(slow, 8) == 1


def test_prompts_somebody_takes_do_not(scene: Scene):
    fast, slow = pair(scene)
    for _ in range(50):
        assert scene.of(slow, 8) == 0
        scene.measure(fast, count=8, seconds=1.0)


def test_one_that_was_left_out_long_is_tried_again_and_judged_by_that(scene: Scene):
    fast, slow = pair(scene)
    grants = []
    for _ in range(1010):
        grants.append(scene.of(slow, 8))
        if grants[-1]:
            scene.measure(slow, count=1, seconds=0.5)
        scene.measure(fast, count=8, seconds=1.0)
    # After a hundred times its ten seconds; then (8 groups at 8 + 2 a second) it has a share again.
    assert grants[:1000] == [0] * 1000
    assert grants[1000] == 1
    assert grants[-1] == 2


def test_one_with_weights_that_are_too_old_takes_no_part(scene: Scene):
    fast, slow = pair(scene)
    fast.version, slow.version = 3, 5
    assert scene.of(slow, 8, oldest_version=4) == 8
    fast.version = -1
    assert scene.of(slow, 8, oldest_version=4) == 0


@pytest.mark.parametrize("state", ["unsynced", "draining"])
def test_one_that_takes_no_prompts_takes_no_part(scene: Scene, state: str):
    fast, slow = pair(scene)
    fast.state = state
    assert scene.of(slow, 8) == 8


def test_leases_that_went_back_do_not_count_for_long(scene: Scene):
    first, second = scene.enter("first"), scene.enter("second")
    scene.measure(first, count=8, seconds=60.0)
    scene.measure(second, count=8, seconds=60.0)
    scene.lease(first, 8)
    assert scene.of(first, 8) == 0
    first.lease_ids = []
    scene.clock.now += 8.1
    assert scene.of(first, 8) == 4


def test_rows_of_evaluations_are_not_measured(scene: Scene):
    first, second = scene.enter("first"), scene.enter("second")
    scene.shares.lease(first, [Lease("e:0-0", "e:0", "greedy", 0, 0, attempt=0, indices=[0])])
    scene.shares.accept(first, ["e:0-0-0"])
    assert not scene.shares.are_limited
    assert scene.of(second, 8) == 8


def test_rows_of_evaluations_go_by_speed_and_nobody_is_left_without(scene: Scene):
    fast, slow = pair(scene)
    assert scene.shares.rows(fast, wanted=10) == 10
    assert scene.shares.rows(slow, wanted=20) == 2
    assert scene.shares.rows(slow, wanted=1) == 1
    assert scene.shares.rows(scene.enter("new"), wanted=10) == 10, "not measured yet"


def test_a_generator_on_a_new_connection_is_the_same_one(scene: Scene):
    fast, slow = pair(scene)
    again = Peer(b"anew", slow.hello, scene.clock.now, "ready", 0)
    scene.shares.enter(again)
    assert scene.of(again, 8) == 0
    assert scene.of(fast, 8) == 8
