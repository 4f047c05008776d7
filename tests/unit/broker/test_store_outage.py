"""An outage is reported when it begins, every few seconds while it lasts, and when it ends."""

from slipstream.buffer.errors import StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.store import StoreOutage
from tests.fakes import FakeClock


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.reported: list[str] = []
        self.outage = StoreOutage(report=self.reported.append, clock=self.clock)

    def fail(self, error: StoreUnavailableError, *, at: float) -> None:
        self.clock.now = at
        self.outage.record(error)


def test_a_thousand_failures_produce_few_lines():
    scene = Scene()
    for number in range(1000):
        scene.fail(StoreUnavailableError("it does not answer"), at=100 + number / 100)
    assert scene.reported == [f"waiting for the store for {s} s: it does not answer" for s in (0, 5)]
    assert scene.outage.reason == "store_unavailable"
    assert round(scene.outage.seconds) == 10


def test_its_end_is_reported_once_and_the_next_outage_starts_afresh():
    scene = Scene()
    scene.outage.end()
    scene.fail(StoreCannotWriteError("its disk is full"), at=101)
    assert scene.outage.reason == "store_cannot_write"
    scene.clock.now = 103
    scene.outage.end()
    scene.outage.end()
    scene.fail(StoreUnavailableError("gone"), at=104)
    assert scene.outage.seconds == 0
    assert scene.reported == [
        "waiting for the store for 0 s: its disk is full",
        "the store works again after 2.0 s",
        "waiting for the store for 0 s: gone",
    ]
