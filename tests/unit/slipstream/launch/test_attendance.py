"""Generators that are away are waited for, for so long."""

from slipstream.launch.scaling import AbsenceTracker
from tests.unit.broker.router_scene import FakeClock

KEPT = {"generator-0", "generator-1"}


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.attendance = AbsenceTracker(patience_s=10.0, clock=self.clock)

    def note(self, *at_work: str, after_s: float = 0.0) -> tuple[list[str], bool]:
        self.clock.now += after_s
        return self.attendance.note(KEPT, at_work=set(at_work)), self.attendance.is_complete


def test_all_that_are_kept_are_waited_for_and_others_do_not_matter():
    scene = Scene()
    assert scene.note("generator-0", "by-hand") == ([], False)
    assert scene.note("generator-0", "generator-1") == ([], True)


def test_one_that_is_away_for_too_long_is_told_once_and_waited_for_no_more():
    scene = Scene()
    scene.note("generator-0")
    assert scene.note("generator-0", after_s=10.0) == ([], False)
    assert scene.note("generator-0", after_s=0.5) == (["generator-1"], True)
    assert scene.note("generator-0", after_s=99.0) == ([], True)


def test_one_that_was_back_is_waited_for_anew():
    scene = Scene()
    scene.note("generator-0")
    scene.note("generator-0", after_s=11.0)
    assert scene.note(*KEPT, after_s=1.0) == ([], True)
    assert scene.note("generator-0", after_s=1.0) == ([], False)
    assert scene.note("generator-0", after_s=11.0) == (["generator-1"], True)


def test_one_that_is_kept_no_more_is_forgotten():
    scene = Scene()
    scene.note("generator-0")
    assert scene.attendance.note({"generator-0"}, at_work={"generator-0"}) == []
    assert scene.attendance.is_complete
    scene.clock.now += 11.0
    assert scene.note("generator-0") == ([], False)
