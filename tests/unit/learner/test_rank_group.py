"""Ranks that follow carry out what rank 0 orders, and wait on when it has nothing to order yet."""

from collections import deque

import pytest

from slipstream.buffer.codec import encode, pack
from slipstream.buffer.trajectory import Trajectory, VersionSpan
from slipstream.learner.rank_group import Command, KeepAlive, RankGroup, Shutdown
from tests.builders import make_run
from tests.unit.learner.builders import make_response


class FakeRanks:
    """Rank 0's broadcasts, one after the other."""

    def __init__(self, *orders: Command) -> None:
        self.left = deque(orders)
        self.told: list[list[bytes]] = []

    def broadcast_bytes(self, payloads: list[bytes] | None) -> list[bytes]:
        if payloads is not None:
            self.told.append(payloads)
            return payloads
        return [encode(self.left.popleft())]


class FakeTrainer:
    """Trains on anything, and has nothing to tell."""

    def step(self, groups: list[list[Trajectory]], **_: object) -> dict[str, float]:
        return {}


def make_team(ranks: FakeRanks, *, trainer: FakeTrainer | None = None) -> RankGroup:
    return RankGroup(run=make_run(), trainer=trainer, ranks=ranks, checkpoints=None)


def lag_metrics(*versions: int, learner_version: int) -> dict[str, object]:
    """Of a step on one trajectory whose tokens are of these versions."""
    spans = [VersionSpan(4 + place, version) for place, version in enumerate(versions)]
    answer = make_response(response=tuple(range(5, 5 + len(versions))), version_spans=spans)
    _, payload = pack(answer, lease_id="1-0", purpose="train", group_size=1)
    team = make_team(FakeRanks(), trainer=FakeTrainer())
    return team.train(step=1, version=learner_version, payloads=[[payload]])


def test_a_rank_that_stands_by_waits_for_the_next_order():
    ranks = FakeRanks(KeepAlive(), KeepAlive(), Shutdown())
    make_team(ranks).worker_loop()
    assert not ranks.left


def test_rank_0_tells_the_others_that_it_waits():
    ranks = FakeRanks()
    make_team(ranks).keep_alive()
    assert ranks.told == [[encode(KeepAlive())]]


def test_percentiles_of_lag_are_over_tokens():
    found = lag_metrics(*[9] * 11, *[7] * 8, 2, learner_version=9)
    assert found["lag/histogram"] == {0: 11, 2: 8, 7: 1}
    assert (found["lag/p50"], found["lag/p95"], found["lag/max"]) == (0, 2, 7)
    assert found["lag/mean"] == pytest.approx((8 * 2 + 7) / 20)


def test_percentiles_of_lag_reach_the_oldest_token_where_a_twentieth_is_older():
    found = lag_metrics(*[5] * 9, *[4] * 9, 1, 0, learner_version=5)
    assert (found["lag/p50"], found["lag/p95"], found["lag/max"]) == (1, 4, 5)


def test_one_token_is_every_percentile():
    found = lag_metrics(3, learner_version=5)
    assert (found["lag/p50"], found["lag/p95"], found["lag/max"]) == (2, 2, 2)
