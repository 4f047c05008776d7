"""A silent rank ends the others with its name and machine. Long steps and regular exits do not."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from slipstream.learner import ranks as rank_watch
from slipstream.learner.ranks import RankWatch, leave

TIMEOUT_S = 0.3
DEADLINE_S = 20.0


class Lost(dist.Store):
    """A rendezvous on a machine that vanished."""

    def __init__(self) -> None:
        super().__init__()
        self.is_back = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.is_back.wait(DEADLINE_S)


class Ranks:
    """Watches over one rendezvous, as if each were in a separate process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.watches: list[RankWatch] = []
        self.ended: dict[int, str] = {}
        self.has_ended = threading.Event()

    def join(self, rank: int, *, size: int = 2, store: dist.Store | None = None) -> RankWatch:
        def end(message: str) -> None:
            self.ended[rank] = message
            self.has_ended.set()

        watch = RankWatch(store or self.store, rank=rank, size=size, timeout_s=TIMEOUT_S, end=end, host=f"node{rank}")
        self.watches.append(watch)
        watch.start()
        return watch


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for watch in made.watches:
        watch.stop()


def test_a_silent_rank_is_named_with_its_machine(ranks: Ranks):
    ranks.join(0, size=3)
    ranks.join(1, size=3)
    silent = ranks.join(2, size=3)
    ranks.store.wait(["alive/2"], timedelta(seconds=DEADLINE_S))
    silent.stop()
    assert ranks.has_ended.wait(DEADLINE_S)
    message = next(iter(ranks.ended.values()))
    assert message == (
        "all learner ranks must send a heartbeat within learner.rank_timeout_s (0.3 s), got none from rank 2 on node2: "
        "a machine is down or a process hangs; the ranks are restarted."
    )


def test_live_ranks_and_ranks_that_left_end_no_rank(ranks: Ranks):
    ranks.join(0)
    other = ranks.join(1)
    assert not ranks.has_ended.wait(2 * TIMEOUT_S)
    leave(ranks.store, 1)
    other.stop()
    assert not ranks.has_ended.wait(2 * TIMEOUT_S)


def test_a_lost_rendezvous_is_blamed_on_rank_0(ranks: Ranks):
    lost = Lost()
    ranks.join(1, store=lost)
    assert ranks.has_ended.wait(DEADLINE_S)
    lost.is_back.set()
    assert ranks.ended[1].startswith("the machine of learner rank 0, an unknown machine, must answer")


def test_a_process_that_was_suspended_blames_no_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    stood_still_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s[0])
    monkeypatch.setattr(rank_watch, "time", clock)
    ranks.join(0)
    ranks.join(1)
    assert not ranks.has_ended.wait(TIMEOUT_S / 2)
    stood_still_s[0] = 1000.0
    assert not ranks.has_ended.wait(2 * TIMEOUT_S)
