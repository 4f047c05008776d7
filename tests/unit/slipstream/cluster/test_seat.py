"""SpreadSeat: the parts of a role rendezvous at each start, and when one ends, all end."""

from collections.abc import Mapping, Sequence

import pytest

from slipstream.cluster.seat import SpreadSeat


class FakeSeat:
    """A seat with a scripted end."""

    def __init__(self, number: int) -> None:
        self.pid = 70 + number
        self.place = f"pid {self.pid}"
        self.code: int | None = None
        self.asked: list[str] = []
        self.variables: dict[str, str] = {}

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self.code = None
        self.asked.append(" ".join(arguments))
        self.variables = dict(variables)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked.append("terminate")

    def stop(self, *, ends_at: float) -> None:
        self.asked.append("stop")


class Scene:
    """A seat of three parts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ports = iter(("20999", "20998"))
        self.parts = [FakeSeat(number) for number in range(3)]
        self.seat = SpreadSeat(self.parts, meet=self.meet, clock=lambda: self.now)

    def meet(self) -> dict[str, str]:
        return {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": next(self.ports)}

    def end(self, *codes: int | None) -> None:
        for part, code in zip(self.parts, codes, strict=True):
            part.code = code


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.seat.start(["learner"], variables={"A": "b"})
    return made


def test_each_part_has_its_number_and_all_meet_on_the_first_and_hear_of_the_end(scene: Scene):
    common = {"A": "b", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "20999"}
    assert [part.variables for part in scene.parts] == [common | {"NODE_RANK": str(number)} for number in range(3)]
    assert (scene.seat.pid, scene.seat.place) == (70, "pid 70, and pid 71, and pid 72")
    assert scene.seat.poll() is None
    scene.seat.start(["learner", "resume=true"], variables={})
    # The port of before may still be held by what is left of the first start.
    assert {part.variables["MASTER_PORT"] for part in scene.parts} == {"20998"}
    scene.seat.terminate()
    scene.seat.stop(ends_at=5.0)
    assert all(part.asked[2:] == ["terminate", "stop"] for part in scene.parts)


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0, 0), 0), ((None, -9, None), -9), ((75, 2, None), 2), ((75, 0, 75), 75), ((0, 0, None), 0)],
)
def test_when_a_part_has_ended_the_others_do_and_a_verdict_outweighs_their_loss(scene, codes, code):
    scene.end(*codes)
    if None in codes:
        assert scene.seat.poll() is None
        scene.now = 19.9
        assert scene.seat.poll() is None, "each may tell its own reason"
        scene.now = 20.0
    assert scene.seat.poll() == code
    assert scene.seat.poll() == code
    assert all(part.asked == ["learner", "stop"] for part in scene.parts)
