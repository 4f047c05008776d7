"""Scaling requests and decisions of the autoscaler change the target of a pool; absences and events are reported."""

import os

import pytest
from msgspec import structs

from slipstream.buffer.errors import RunConflictError, StoreUnavailableError
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import AutoscaleConfig
from slipstream.launch.generator_pool import Event
from slipstream.launch.scaling import AbsenceTracker, LauncherReport, Scaling
from slipstream.observe.run_status import Monitor
from tests.builders import make_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore


class FakePool:
    def __init__(self) -> None:
        self.target = 1

    @property
    def active_names(self) -> set[str]:
        return {f"generator-{number}" for number in range(self.target)}

    def set_target(self, target: int) -> list[Event]:
        self.target = target
        return [Event("generator-1", "started")]


class Scene:
    def __init__(self, autoscale: AutoscaleConfig | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.store.open_run("test", config_json="{}", num_rows=1, seed=0)
        self.pool = FakePool()
        self.report = LauncherReport(self.store)
        run = make_run()
        count = autoscale.min if autoscale else 1
        run = structs.replace(run, generators=structs.replace(run.generators, autoscale=autoscale, count=count))
        self.monitor = Monitor(self.store, run)
        self.scaling = Scaling(self.pool, self.report, run=run, check_room=check_room, clock=self.clock)  # type: ignore[arg-type]

    def poll(self) -> list[Event]:
        events = self.scaling.poll(self.store, self.monitor.poll())
        self.report.send(restarts={}, generators_target=self.pool.target)
        return events


def check_room(count: int) -> None:
    if count > 8:
        raise ConfigError("there are 8 GPUs")


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.poll()
    return made


def test_a_request_is_carried_out_reported_and_answered(scene: Scene):
    scene.store.request("launcher", "generators", "4 request-1")
    assert scene.poll() == [
        ("launcher", "the number of generators changes from 1 to 4: requested"),
        ("generator-1", "started"),
    ]
    launcher = scene.store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"], launcher["generators_target"]) == ("request-1", "", 4)


def test_a_number_without_room_is_refused_with_the_reason(scene: Scene):
    scene.store.request("launcher", "generators", "9 request-1")
    assert scene.poll() == []
    launcher = scene.store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"]) == ("request-1", "there are 8 GPUs")
    assert scene.pool.target == 1


def test_a_request_to_the_previous_launcher_is_ignored():
    scene = Scene()
    scene.store.request("launcher", "generators", "4 request-1")
    assert scene.poll() == []
    assert scene.pool.target == 1


def report_roles(scene: Scene, *states: str, waits_for: str = "groups") -> None:
    scene.store.report_role("learner", {"role": "learner", "state": "ready", "waits_for": waits_for})
    for number, state in enumerate(states):
        gauges = {"role": "generator", "state": state, "running": 8, "max_concurrency": 8}
        scene.store.report_role(f"generator-{number}", gauges)


def test_the_autoscaler_scales_up_to_the_room_and_reports_why():
    scene = Scene(AutoscaleConfig(max=20, settle_s=5.0))
    scene.pool.target = 7
    scene.store.set_phase("training")
    events = []
    for _ in range(2):
        report_roles(scene, *["ready"] * scene.pool.target)
        scene.poll()
        scene.clock.now += 5
        report_roles(scene, *["ready"] * scene.pool.target)
        events.append(scene.poll()[0])
    reason = "the learner waited 100% of the last 5 s for groups, above 30%"
    assert events == [
        ("launcher", f"the number of generators changes from 7 to 8: {reason}"),
        ("launcher", f"the number of generators stays at 8, although {reason}: there are 8 GPUs"),
    ]


def test_nothing_is_measured_while_a_generator_starts():
    scene = Scene(AutoscaleConfig(settle_s=5.0))
    scene.pool.target = 2
    scene.store.set_phase("training")
    for _ in range(4):
        report_roles(scene, "ready", "starting", "ready")
        assert scene.poll() == []
        scene.clock.now += 5
    assert scene.pool.target == 2


def test_missing_room_is_reported_once_per_target():
    scene = Scene(AutoscaleConfig(max=20, settle_s=5.0))
    scene.pool.target = 8
    scene.store.set_phase("training")
    events = []
    for target in (8, 8, 8, 7, 8, 8):
        scene.pool.target = target
        report_roles(scene, *["ready"] * target)
        scene.poll()
        scene.clock.now += 5
        report_roles(scene, *["ready"] * target)
        events += [event.message.partition(":")[0].partition(",")[0] for event in scene.poll()]
    stays, changes = "the number of generators stays at 8", "the number of generators changes from 7 to 8"
    assert events == [stays, changes, "started", stays]


@pytest.mark.parametrize("target", [1, 5])
def test_a_request_must_lie_within_the_bounds_of_the_autoscaler(target: int):
    scene = Scene(AutoscaleConfig(min=2, max=4))
    scene.poll()
    scene.store.request("launcher", "generators", f"{target} request-1")
    assert scene.poll() == []
    refusal = scene.store.roles()["launcher"]["refusal"]
    assert f"between generators.autoscale.min and max (2 to 4), got {target}" in refusal


def test_below_min_generators_are_started_again():
    scene = Scene(AutoscaleConfig(min=3, settle_s=5.0))
    scene.pool.target = 2
    scene.store.set_phase("training")
    report_roles(scene, "ready", "ready")
    assert scene.poll() == []
    scene.clock.now += 5
    report_roles(scene, "ready", "ready")
    assert scene.poll()[0] == (
        "launcher",
        "the number of generators changes from 2 to 3: generators.autoscale.min is 3",
    )


def watch(scene: Scene, *states: str, polls: int) -> list[Event]:
    """The events while generators in these states are polled every second."""
    events = []
    for _ in range(polls):
        scene.clock.now += 1
        report_roles(scene, *states)
        events += scene.poll()
    return events


def test_a_generator_that_never_works_is_ignored_with_one_event():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=20.0))
    scene.pool.target = 2
    scene.store.set_phase("training")
    assert watch(scene, "ready", "unsynced", polls=21) == []
    events = watch(scene, "ready", "unsynced", polls=6)
    assert events[:2] == [
        (
            "generator-1",
            "generator-1 is unsynced and has not worked for 20 s: the autoscaler ignores it until it works",
        ),
        (
            "launcher",
            "the number of generators changes from 2 to 3: "
            "the learner waited 100% of the last 5 s for groups, above 30%",
        ),
    ]
    assert events[2:] == [("generator-1", "started")]


def test_the_capacity_of_an_ignored_generator_does_not_count():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=1.0, fewer_below=0.9))
    scene.pool.target = 3
    scene.store.set_phase("training")
    events = []
    for _ in range(20):
        scene.store.append_metrics(
            {"step": 1, "time_s": 1.0, "learner/wait_s": 0.0, "learner/train_s": 1.0, "learner/publish_s": 0.0}
        )
        scene.store.report_role("generator-2", {"role": "generator", "state": "unsynced", "max_concurrency": 32})
        events += watch(scene, "ready", "ready", polls=1)
    assert [event.role for event in events] == ["generator-2"]
    assert scene.pool.target == 3


def test_nothing_is_decided_while_the_learner_is_silent():
    scene = Scene(AutoscaleConfig(settle_s=5.0, absent_after_s=1.0))
    scene.store.set_phase("training")
    report_roles(scene, "ready")
    events = []
    for _ in range(5):
        scene.clock.now += 10
        events += scene.poll()
    assert [event.role for event in events] == ["generator-0"]
    assert scene.pool.target == 1


@pytest.mark.parametrize("waits_for", ["", "evaluation"])
def test_nothing_is_measured_before_the_learner_waits_for_groups(waits_for: str):
    scene = Scene(AutoscaleConfig(settle_s=5.0))
    scene.store.set_phase("training")
    for _ in range(4):
        report_roles(scene, "ready", waits_for=waits_for)
        assert scene.poll() == []
        scene.clock.now += 5
    assert scene.pool.target == 1


# --- absences --------------------------------------------------------------------------------------------------------
EXPECTED = {"generator-0", "generator-1"}


class Absences:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.tracker = AbsenceTracker(absent_after_s=10.0, clock=self.clock)

    def update(self, *working: str, after_s: float = 0.0) -> tuple[list[str], bool]:
        self.clock.now += after_s
        return self.tracker.update(EXPECTED, working=set(working)), self.tracker.is_complete


def test_every_expected_generator_is_waited_for_and_no_other():
    absences = Absences()
    assert absences.update("generator-0", "by-hand") == ([], False)
    assert absences.update("generator-0", "generator-1") == ([], True)


def test_a_long_absence_is_reported_once_and_waited_for_no_longer():
    absences = Absences()
    absences.update("generator-0")
    assert absences.update("generator-0", after_s=10.0) == ([], False)
    assert absences.update("generator-0", after_s=0.5) == (["generator-1"], True)
    assert absences.update("generator-0", after_s=99.0) == ([], True)


def test_a_generator_that_returned_is_waited_for_again():
    absences = Absences()
    absences.update("generator-0")
    absences.update("generator-0", after_s=11.0)
    assert absences.update(*EXPECTED, after_s=1.0) == ([], True)
    assert absences.update("generator-0", after_s=1.0) == ([], False)
    assert absences.update("generator-0", after_s=11.0) == (["generator-1"], True)


def test_a_generator_that_is_no_longer_expected_is_forgotten():
    absences = Absences()
    absences.update("generator-0")
    assert absences.tracker.update({"generator-0"}, working={"generator-0"}) == []
    assert absences.tracker.is_complete
    absences.clock.now += 11.0
    assert absences.update("generator-0") == ([], False)


# --- the report ------------------------------------------------------------------------------------------------------
class ShakyStore(MemoryStore):
    """Answers unless it is away."""

    is_away = False

    def record_event(self, role_id: str, text: str) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        super().record_event(role_id, text)

    def report_role(self, role_id: str, gauges: dict) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        super().report_role(role_id, gauges)


@pytest.fixture
def store() -> ShakyStore:
    store = ShakyStore()
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    return store


def events_of(store: ShakyStore) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in store.events(limit=99)]


def test_the_report_holds_the_process_and_the_restarts(store):
    LauncherReport(store).send(restarts={"generator-0": 2}, generators_target=2)
    launcher = store.roles()["launcher"]
    assert (launcher["state"], launcher["pid"], launcher["restarts"]) == ("ready", os.getpid(), {"generator-0": 2})


def test_an_event_is_sent_once_without_repeating_the_name_of_its_role(store):
    report = LauncherReport(store)
    report.record(Event("generator-0", "generator-0 died (signal SIGKILL)"))
    report.record(Event("store", "the store died"))
    for _ in range(2):
        report.send(restarts={}, generators_target=2)
    assert events_of(store) == [("generator-0", "died (signal SIGKILL)"), ("store", "the store died")]


def test_events_wait_for_a_store_that_is_away(store):
    report = LauncherReport(store)
    store.is_away = True
    report.record(Event("store", "the store died"))
    with pytest.raises(StoreUnavailableError):
        report.send(restarts={}, generators_target=2)
    store.is_away = False
    report.send(restarts={}, generators_target=2)
    assert events_of(store) == [("store", "the store died")]


def test_events_wait_until_the_run_is_opened():
    store = ShakyStore()
    report = LauncherReport(store)
    report.record(Event("broker", "broker died (exit code 1)"))
    with pytest.raises(RunConflictError):
        report.send(restarts={}, generators_target=2)
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    report.send(restarts={}, generators_target=2)
    assert events_of(store) == [("broker", "died (exit code 1)")]


def test_the_end_is_reported_with_its_reason_and_needs_no_store(store):
    report = LauncherReport(store)
    report.record(Event("learner", "learner: the settings are wrong"))
    report.end(reason="a role died", restarts={}, generators_target=2)
    launcher = store.roles()["launcher"]
    assert (launcher["state"], launcher["reason"]) == ("gone", "a role died")
    assert events_of(store) == [("learner", "learner: the settings are wrong")]
    store.is_away = True
    report.end(reason="a role died", restarts={}, generators_target=2)


def test_the_target_and_the_answer_to_a_request_are_sent(store):
    report = LauncherReport(store)
    report.send(restarts={}, generators_target=3)
    assert store.roles()["launcher"]["generators_target"] == 3
    report.answer("request-1", "there are only 8 GPUs")
    report.send(restarts={}, generators_target=3)
    launcher = store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"]) == ("request-1", "there are only 8 GPUs")
