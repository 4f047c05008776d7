"""What a launcher does with a request for another number of generators, and what the command says of it."""

from pathlib import Path

import pytest
from msgspec import structs

from slipstream.broker.status.monitor import Monitor
from slipstream.buffer.memory.store import MemoryStore
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import AutoscaleConfig
from slipstream.launch.commands import scale
from slipstream.launch.scaling import LauncherReport, Scaling
from tests.builders import make_run
from tests.unit.broker.router_scene import FakeClock


class FakeFleet:
    def __init__(self) -> None:
        self.wanted = 1

    @property
    def kept(self) -> set[str]:
        return {f"generator-{number}" for number in range(self.wanted)}

    def set_wanted(self, wanted: int) -> list[tuple[str, str]]:
        self.wanted = wanted
        return [("generator-1", "started")]


class Scene:
    def __init__(self, autoscale: AutoscaleConfig | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.store.open_run("test", config_json="{}", num_rows=1, seed=0)
        self.fleet = FakeFleet()
        self.report = LauncherReport(self.store)
        run = make_run()
        count = autoscale.min if autoscale else 1
        run = structs.replace(run, generators=structs.replace(run.generators, autoscale=autoscale, count=count))
        self.monitor = Monitor(self.store, run)
        self.scaling = Scaling(self.fleet, self.report, run=run, check_room=check_room, clock=self.clock)  # type: ignore[arg-type]

    def look(self) -> list[tuple[str, str]]:
        happened = self.scaling.look(self.store, self.monitor.poll())
        self.report.send(restarts={}, generators_target=self.fleet.wanted)
        return happened


def check_room(count: int) -> None:
    if count > 8:
        raise ConfigError("there are 8 GPUs")


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.look()
    return made


def test_a_request_is_done_said_and_answered(scene: Scene):
    scene.store.request("launcher", "generators", "4 request-1")
    assert scene.look() == [("launcher", "4 generators are wanted, not 1: as asked"), ("generator-1", "started")]
    launcher = scene.store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"], launcher["generators_target"]) == ("request-1", "", 4)


def test_a_number_without_room_is_refused_with_the_reason(scene: Scene):
    scene.store.request("launcher", "generators", "9 request-1")
    assert scene.look() == []
    launcher = scene.store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"]) == ("request-1", "there are 8 GPUs")
    assert scene.fleet.wanted == 1


def test_a_request_to_the_launcher_before_is_not_done():
    scene = Scene()
    scene.store.request("launcher", "generators", "4 request-1")
    assert scene.look() == []
    assert scene.fleet.wanted == 1


def report_roles(scene: Scene, *states: str, waits_for: str = "groups") -> None:
    scene.store.report_role("learner", {"role": "learner", "state": "ready", "waits_for": waits_for})
    for number, state in enumerate(states):
        gauges = {"role": "generator", "state": state, "running": 8, "max_concurrency": 8}
        scene.store.report_role(f"generator-{number}", gauges)


def test_the_waits_are_followed_up_to_the_room_there_is_and_the_reason_is_said():
    scene = Scene(AutoscaleConfig(max=20, settle_s=5.0))
    scene.fleet.wanted = 7
    scene.store.set_phase("training")
    said = []
    for _ in range(2):
        report_roles(scene, *["ready"] * scene.fleet.wanted)
        scene.look()
        scene.clock.now += 5
        report_roles(scene, *["ready"] * scene.fleet.wanted)
        said.append(scene.look()[0])
    reason = "the learner waited 100% of the last 5 s for groups, above 30%"
    assert said == [
        ("launcher", f"8 generators are wanted, not 7: {reason}"),
        ("launcher", f"no generator more, though {reason}: there are 8 GPUs"),
    ]


def test_nothing_is_measured_while_a_generator_that_is_kept_still_starts():
    scene = Scene(AutoscaleConfig(settle_s=5.0))
    scene.fleet.wanted = 2
    scene.store.set_phase("training")
    for _ in range(4):
        report_roles(scene, "ready", "starting", "ready")
        assert scene.look() == []
        scene.clock.now += 5
    assert scene.fleet.wanted == 2


def test_that_there_is_no_room_is_said_once_until_another_number_is_wanted():
    scene = Scene(AutoscaleConfig(max=20, settle_s=5.0))
    scene.fleet.wanted = 8
    scene.store.set_phase("training")
    said = []
    for wanted in (8, 8, 8, 7, 8, 8):
        scene.fleet.wanted = wanted
        report_roles(scene, *["ready"] * wanted)
        scene.look()
        scene.clock.now += 5
        report_roles(scene, *["ready"] * wanted)
        said += [sentence.partition(",")[0] for _, sentence in scene.look()]
    no_room, room = "no generator more", ["8 generators are wanted", "started"]
    assert said == [no_room, *room, no_room]


@pytest.mark.parametrize("wanted", [1, 5])
def test_what_is_asked_for_must_lie_between_the_bounds_of_the_waits(wanted: int):
    scene = Scene(AutoscaleConfig(min=2, max=4))
    scene.look()
    scene.store.request("launcher", "generators", f"{wanted} request-1")
    assert scene.look() == []
    refusal = scene.store.roles()["launcher"]["refusal"]
    assert f"between generators.autoscale.min and max (2 to 4), got {wanted}" in refusal


def test_where_fewer_than_the_fewest_are_left_the_others_come_back():
    scene = Scene(AutoscaleConfig(min=3, settle_s=5.0))
    scene.fleet.wanted = 2
    scene.store.set_phase("training")
    report_roles(scene, "ready", "ready")
    assert scene.look() == []
    scene.clock.now += 5
    report_roles(scene, "ready", "ready")
    assert scene.look()[0] == ("launcher", "3 generators are wanted, not 2: generators.autoscale.min is 3")


def watch(scene: Scene, *states: str, looks: int) -> list[tuple[str, str]]:
    """What is said while every second somebody looks at generators in these states."""
    said = []
    for _ in range(looks):
        scene.clock.now += 1
        report_roles(scene, *states)
        said += scene.look()
    return said


def test_one_that_never_gets_to_work_is_left_out_with_one_event_and_the_waits_are_followed():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=20.0))
    scene.fleet.wanted = 2
    scene.store.set_phase("training")
    assert watch(scene, "ready", "unsynced", looks=21) == []
    said = watch(scene, "ready", "unsynced", looks=6)
    assert said[:2] == [
        (
            "generator-1",
            "generator-1 is unsynced, and has not been at work for 20 s: the number of generators is decided without "
            "it until it is",
        ),
        ("launcher", "3 generators are wanted, not 2: the learner waited 100% of the last 5 s for groups, above 30%"),
    ]
    assert said[2:] == [("generator-1", "started")]


def test_the_room_of_one_that_is_left_out_is_not_room_of_the_others():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=1.0, fewer_below=0.9))
    scene.fleet.wanted = 3
    scene.store.set_phase("training")
    said = []
    for _ in range(20):
        scene.store.append_metrics(
            {"step": 1, "time_s": 1.0, "learner/wait_s": 0.0, "learner/train_s": 1.0, "learner/publish_s": 0.0}
        )
        scene.store.report_role("generator-2", {"role": "generator", "state": "unsynced", "max_concurrency": 32})
        said += watch(scene, "ready", "ready", looks=1)
    assert [name for name, _ in said] == ["generator-2"]
    assert scene.fleet.wanted == 3


def test_nothing_is_decided_while_the_learner_is_silent():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=1.0))
    scene.store.set_phase("training")
    report_roles(scene, "ready")
    said = []
    for _ in range(5):
        scene.clock.now += 10
        said += scene.look()
    assert [name for name, _ in said] == ["generator-0"]
    assert scene.fleet.wanted == 1


@pytest.mark.parametrize("waits_for", ["", "evaluation"])
def test_nothing_is_measured_before_the_learner_wants_groups(waits_for: str):
    scene = Scene(AutoscaleConfig(settle_s=5.0))
    scene.store.set_phase("training")
    for _ in range(4):
        report_roles(scene, "ready", waits_for=waits_for)
        assert scene.look() == []
        scene.clock.now += 5
    assert scene.fleet.wanted == 1


@pytest.mark.parametrize("words", [[], ["generators=-1"], ["generators=two"], ["generators=1", "generators=2"]])
def test_what_is_no_number_is_refused(words: list[str]):
    with pytest.raises(ConfigError, match="scale needs generators=N"):
        scale(words)


def test_a_run_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/mine must be a run folder"):
        scale(["generators=2", f"runs_dir={tmp_path}", "name=mine"])
