"""Scaling requests and decisions of the autoscaler change the target of a pool; absences and events are reported."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from slipstream.buffer.errors import RunConflictError, StoreUnavailableError
from slipstream.cluster.role_process import RoleDiedError, RoleProcess
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import AutoscaleConfig
from slipstream.configs.load import load
from slipstream.launch import generator_pool, scaling
from slipstream.launch.generator_pool import Event, GeneratorPool, gpu_gib, place, visible_gpus
from slipstream.launch.scaling import AbsenceTracker, Autoscaler, LauncherReport, Scaling
from slipstream.observe.run_status import Monitor
from tests.builders import make_run
from tests.cases import cases
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

CONFIG, RAISED = AutoscaleConfig(min=1, max=3), AutoscaleConfig(min=3, max=4)
WAITED = "the learner waited {} of the last {} s for groups, above 30%"
EXPECTED = {"generator-0", "generator-1"}
EIGHT = list("01234567")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_SETTLE_S", 5.0)
    monkeypatch.setattr(scaling, "_ABSENT_AFTER_S", 20.0)


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
    """A launcher with `target` generators, and its store."""

    def __init__(self, autoscale: AutoscaleConfig | None = None, *, target: int = 1) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.store.open_run("test", config_json="{}", num_rows=1, seed=0)
        self.pool = FakePool()
        self.pool.target = target
        self.report = LauncherReport(self.store)
        run = make_run()
        count = autoscale.min if autoscale else 1
        run = structs.replace(run, generators=structs.replace(run.generators, autoscale=autoscale, count=count))
        self.monitor = Monitor(self.store, run)
        self.scaling = Scaling(self.pool, self.report, run=run, check_room=check_room, clock=self.clock)
        if autoscale:
            self.store.set_phase("training")

    def poll(self) -> list[Event]:
        events = self.scaling.poll(self.store, self.monitor.poll())
        self.report.send(restarts={}, generators_target=self.pool.target)
        return events

    def answer(self, count: int) -> dict[str, Any]:
        """The launcher's report after a request for this number, which it refuses."""
        self.store.request("launcher", "generators", f"{count} request-1")
        assert self.poll() == []
        launcher = self.store.roles()["launcher"]
        assert launcher["answered"] == "request-1"
        return launcher

    def report_roles(self, *states: str, waits_for: str = "groups") -> None:
        self.store.report_role("learner", {"role": "learner", "state": "ready", "waits_for": waits_for})
        for number, state in enumerate(states):
            gauges = {"role": "generator", "state": state, "running": 8, "max_concurrency": 8}
            self.store.report_role(f"generator-{number}", gauges)

    def watch(self, *states: str, polls: int, every_s: float = 1, waits_for: str = "groups") -> list[Event]:
        """The events while generators in these states are polled."""
        events = []
        for _ in range(polls):
            self.clock.now += every_s
            self.report_roles(*states, waits_for=waits_for)
            events += self.poll()
        return events

    def settle(self) -> list[Event]:
        """The events after a whole window with all generators ready and a starving learner."""
        self.report_roles(*["ready"] * self.pool.target)
        self.poll()
        return self.watch(*["ready"] * self.pool.target, polls=1, every_s=5)


def check_room(count: int) -> None:
    if count > 8:
        raise ConfigError("there are 8 GPUs")


def test_a_request_is_carried_out_reported_and_answered_or_refused_with_the_reason():
    scene = Scene()
    scene.store.request("launcher", "generators", "3 request-0")
    assert scene.poll() == []
    scene.store.request("launcher", "generators", "4 request-1")
    change = ("launcher", "the number of generators changes from 1 to 4: requested")
    assert scene.poll() == [change, ("generator-1", "started")]
    launcher = scene.store.roles()["launcher"]
    assert (launcher["answered"], launcher["refusal"], launcher["generators_target"]) == ("request-1", "", 4)
    scene = Scene()
    scene.poll()
    launcher = scene.answer(9)
    assert (launcher["refusal"], launcher["generators_target"]) == ("there are 8 GPUs", 1)
    for count in (1, 5):
        scene = Scene(AutoscaleConfig(min=2, max=4))
        scene.poll()
        refusal = scene.answer(count)["refusal"]
        assert f"between generators.autoscale.min and max (2 to 4), got {count}" in refusal


def test_the_autoscaler_scales_up_from_min_to_the_room_and_reports_missing_room_once_per_target(quick):
    scene = Scene(AutoscaleConfig(max=20), target=7)
    events = [scene.settle()[0] for _ in range(2)]
    reason = WAITED.format("100%", 5)
    assert events == [
        ("launcher", f"the number of generators changes from 7 to 8: {reason}"),
        ("launcher", f"the number of generators stays at 8, although {reason}: there are 8 GPUs"),
    ]
    scene = Scene(AutoscaleConfig(max=20), target=8)
    events = []
    for target in (8, 8, 8, 7, 8, 8):
        scene.pool.target = target
        events += [event.message.partition(":")[0].partition(",")[0] for event in scene.settle()]
    stays, changes = "the number of generators stays at 8", "the number of generators changes from 7 to 8"
    assert events == [stays, changes, "started", stays]
    change = "the number of generators changes from 2 to 3: generators.autoscale.min is 3"
    assert Scene(AutoscaleConfig(min=3), target=2).settle()[0] == ("launcher", change)


@cases("states, waits_for", (("ready", "starting"), "groups"), (("ready",), ""), (("ready",), "evaluation"))
def test_nothing_is_measured_while_a_generator_starts_or_before_the_learner_waits_for_groups(quick, states, waits_for):
    scene = Scene(AutoscaleConfig(), target=len(states))
    assert scene.watch(*states, polls=4, every_s=5, waits_for=waits_for) == []
    assert scene.pool.target == len(states)


def test_a_generator_that_never_works_is_ignored_with_one_event_and_its_capacity_does_not_count(quick):
    scene = Scene(AutoscaleConfig(), target=2)
    assert scene.watch("ready", "unsynced", polls=21) == []
    ignored = "generator-1 is unsynced and has not worked for 20 s: the autoscaler ignores it until it works"
    change = f"the number of generators changes from 2 to 3: {WAITED.format('100%', 5)}"
    expected = [("generator-1", ignored), ("launcher", change), ("generator-1", "started")]
    assert scene.watch("ready", "unsynced", polls=6) == expected
    scene = Scene(AutoscaleConfig(), target=3)
    events = []
    for _ in range(40):
        scene.store.append_metrics({"step": 1, "time_s": 1.0, **rows(0.0, 1.0)[0]})
        scene.store.report_role("generator-2", {"role": "generator", "state": "unsynced", "max_concurrency": 32})
        events += scene.watch("ready", "ready", polls=1)
    assert [event.role for event in events] == ["generator-2"]
    assert scene.pool.target == 3
    scene = Scene(AutoscaleConfig())
    scene.report_roles("ready")
    events = []
    for _ in range(5):
        scene.clock.now += 10
        events += scene.poll()
    assert ([event.role for event in events], scene.pool.target) == (["generator-0"], 1)


def test_a_long_absence_is_reported_once_and_a_generator_is_waited_for_again_after_its_return():
    clock = FakeClock()
    tracker = AbsenceTracker(absent_after_s=10.0, clock=clock)

    def update(*working: str, after_s: float = 0.0, expected: set[str] = EXPECTED) -> tuple[list[str], bool]:
        clock.now += after_s
        return tracker.update(expected, working=set(working)), tracker.is_complete

    assert update("generator-0", "by-hand") == ([], False)
    assert update("generator-0", after_s=10.0) == ([], False)
    assert update("generator-0", after_s=0.5) == (["generator-1"], True)
    assert update("generator-0", after_s=99.0) == ([], True)
    assert update(*EXPECTED, after_s=1.0) == ([], True)
    assert update("generator-0", after_s=1.0) == ([], False)
    assert update("generator-0", after_s=11.0) == (["generator-1"], True)
    # One that is no longer expected is forgotten.
    assert update("generator-0", expected={"generator-0"}) == ([], True)
    assert update("generator-0", after_s=11.0) == ([], False)


class ShakyStore(MemoryStore):
    """Refuses events and reports while it is away."""

    is_away = False

    def record_event(self, role_id: str, text: str) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        super().record_event(role_id, text)


@pytest.fixture
def report() -> LauncherReport:
    store = ShakyStore()
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    return LauncherReport(store)


def events_of(store: ShakyStore) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in store.events(limit=99)]


def test_the_report_holds_the_process_restarts_and_each_event_once_and_its_end_needs_no_store(report):
    report.record(Event("generator-0", "generator-0 died (signal SIGKILL)"))
    report.record(Event("store", "the store died"))
    for _ in range(2):
        report.send(restarts={"generator-0": 2}, generators_target=2)
    launcher = report._store.roles()["launcher"]
    assert (launcher["state"], launcher["pid"], launcher["restarts"]) == ("ready", os.getpid(), {"generator-0": 2})
    events = [("generator-0", "died (signal SIGKILL)"), ("store", "the store died")]
    assert events_of(report._store) == events
    for is_away in (False, True):
        report._store.is_away = is_away
        report.record(Event("learner", "learner: the settings are wrong"))
        report.end(reason="a role died", restarts={}, generators_target=2)
    launcher = report._store.roles()["launcher"]
    assert (launcher["state"], launcher["reason"]) == ("gone", "a role died")
    assert events_of(report._store) == [*events, ("learner", "learner: the settings are wrong")]


def test_events_wait_for_a_store_that_is_away_or_until_the_run_is_opened(report):
    report._store.is_away = True
    report.record(Event("store", "the store died"))
    with pytest.raises(StoreUnavailableError):
        report.send(restarts={}, generators_target=2)
    report._store.is_away = False
    report.send(restarts={}, generators_target=2)
    assert events_of(report._store) == [("store", "the store died")]
    unopened = LauncherReport(ShakyStore())
    unopened.record(Event("broker", "broker died (exit code 1)"))
    with pytest.raises(RunConflictError):
        unopened.send(restarts={}, generators_target=2)
    unopened._store.open_run("test", config_json="{}", num_rows=1, seed=0)
    unopened.send(restarts={}, generators_target=2)
    assert events_of(unopened._store) == [("broker", "died (exit code 1)")]


def rows(waited_s: float, worked_s: float, *, count: int = 6) -> list[dict[str, float]]:
    return [{"learner/wait_s": waited_s, "learner/train_s": worked_s, "learner/publish_s": 0.0}] * count


class Measured:
    """An autoscaler on a fake clock."""

    def __init__(self, config: AutoscaleConfig = CONFIG) -> None:
        self.clock = FakeClock()
        self.scaler = Autoscaler(config, clock=self.clock)

    def observe(self, rows, *, after_s=60, busy: float | None = 1.0, target=1, **more: Any) -> Any:
        """(new target, reason), or None."""
        self.clock.now += after_s
        settings = {"is_starving": False, "num_ready": target} | more
        change = self.scaler.observe(rows, busy=busy, target=target, **settings)
        return change and (change.target, change.reason)


@cases(
    "config, waited_s, busy, target, expected",
    (CONFIG, 0.4, 1.0, 2, (3, WAITED.format("40%", 60))),
    (CONFIG, 0.3, 1.0, 2, None),
    (CONFIG, 0.0, 0.4, 2, (1, "the generators used 40% of their capacity in the last 60 s, below 50%")),
    (CONFIG, 0.0, 0.5, 2, None),
    (CONFIG, 0.0, None, 2, None),
    # The remaining generators must be able to do the work.
    (CONFIG, 0.0, 0.49, 3, (2, "the generators used 49% of their capacity in the last 60 s, below 50%")),
    # The bounds are kept.
    (CONFIG, 0.9, 1.0, 3, None),
    (CONFIG, 0.0, 0.0, 1, None),
    # Idle generators are kept while the learner waits, also at max, against oscillation.
    (CONFIG, 0.9, 0.1, 2, (3, WAITED.format("90%", 60))),
    (CONFIG, 0.31, 0.1, 3, None),
    (CONFIG, 0.3, 0.1, 3, (2, "the generators used 10% of their capacity in the last 60 s, below 50%")),
    (RAISED, 0.9, 1.0, 1, (3, "generators.autoscale.min is 3")),
)
def test_one_generator_more_or_less_is_decided_by_the_waits(config, waited_s, busy, target, expected):
    assert Measured(config).observe(rows(waited_s, 1 - waited_s), busy=busy, target=target) == expected


def test_every_change_starts_a_new_window_and_starving_observations_count_without_a_step():
    measured, waiting = Measured(), rows(0.9, 0.1)
    assert measured.observe(waiting, after_s=59) is None
    assert measured.observe([], after_s=1) == (2, WAITED.format("90%", 60))
    assert measured.observe([], target=2) is None
    assert measured.observe(rows(0, 1), after_s=0, target=2) is None
    measured = Measured()
    assert measured.observe(rows(0.0, 100.0)) is None
    assert measured.observe(rows(0.4, 0.6)) == (2, WAITED.format("40%", 60))
    measured = Measured()
    assert measured.observe(rows(9.0, 1.0), after_s=59, is_starving=True) is None
    measured.scaler.start_window()
    assert measured.observe([], after_s=59) is None
    assert measured.observe(rows(0.0, 1.0), after_s=1) is None
    assert Measured().observe([], after_s=61, is_starving=True) == (2, WAITED.format("100%", 61))
    measured = Measured()
    for is_starving in (False, False, False, True):
        assert measured.observe([], after_s=0, is_starving=is_starving) is None
    assert measured.observe([], is_starving=True) == (2, WAITED.format("40%", 60))
    assert Measured().observe(rows(9.0, 1.0, count=4)) is None
    measured, step = Measured(), rows(9.0, 1.0, count=1)
    for _ in range(4):
        assert measured.observe(step, is_starving=True) is None
    assert measured.observe(step, is_starving=True) == (2, WAITED.format("90%", 300))
    assert Measured(CONFIG).observe(rows(0.0, 1.0), busy=0.4, target=3, num_ready=1) is None


STAYS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(sys.argv[1], "w").close()
signal.sigtimedwait([signal.SIGTERM], 120)
"""
ENDS = "import sys; sys.exit(int(sys.argv[1]))"
PATIENCE_S = 30.0


class PoolScene:
    """A pool of processes that run until they are asked to leave, except the names in `ends`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: dict[str, str] = {}
        self.messages: list[str] = []
        self.has_others = False
        self.pool = GeneratorPool(self.make, has_others=lambda: self.has_others)

    def make(self, name: str) -> RoleProcess:
        arguments = ["ends", self.ends[name]] if name in self.ends else ["stays", str(self.folder / f"{name}.up")]
        return RoleProcess(name, arguments, logs=self.folder)

    def keep(self, target: int) -> None:
        self.messages += [event.message for event in self.pool.set_target(target)]

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, self.messages
            self.messages += [event.message for event in self.pool.poll()]

    def are_up(self, *numbers: int) -> bool:
        names = {f"generator-{number}" for number in numbers}
        running = {role.name for role in self.pool.roles if role.is_running}
        return running == names and all((self.folder / f"{name}.up").exists() for name in names)

    def close(self) -> None:
        for role in self.pool.roles:
            role.stop(ends_at=0.0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolScene]:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = PoolScene(tmp_path)
    yield made
    made.close()


def test_the_pool_grows_and_shrinks_and_a_name_is_reused_only_when_its_process_is_gone(scene: PoolScene):
    scene.keep(1)
    scene.until(lambda: scene.are_up(0))
    scene.keep(3)
    scene.until(lambda: scene.are_up(0, 1, 2))
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1) and len(scene.pool.roles) == 2)
    assert "generator-2 is asked to leave: the target is 2" in scene.messages
    assert "generator-2 left" in scene.messages
    scene.keep(1)
    scene.keep(2)
    assert [role.name for role in scene.pool.roles] == ["generator-0", "generator-1"]
    (scene.folder / "generator-1.up").unlink()
    scene.until(lambda: scene.are_up(0, 1))
    assert len(scene.pool.roles) == 2


def test_a_generator_that_was_drained_is_not_replaced(scene: PoolScene):
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1))
    scene.pool.roles[0].terminate()
    scene.until(lambda: scene.pool.target == 1)
    assert scene.messages[-1] == "generator-0 left; the target is 1 now"
    assert scene.are_up(1)


def test_a_generator_that_cannot_start_is_abandoned_but_the_last_one_ends_the_run_unless_it_has_others(
    scene: PoolScene,
):
    scene.ends["generator-1"] = "2"
    scene.keep(2)
    scene.until(lambda: scene.pool.target == 1)
    assert "generator-1 is abandoned, the target is 1 now: generator-1 ended with exit code 2" in scene.messages[-1]
    scene.until(lambda: scene.are_up(0))
    scene.close()
    scene = PoolScene(scene.folder)
    scene.ends["generator-0"] = "2"
    scene.keep(1)
    with pytest.raises(RoleDiedError, match="generator-0"):
        scene.until(lambda: False)
    scene.has_others = True
    scene.until(lambda: scene.pool.target == 0)
    assert "generator-0 is abandoned, the target is 0 now" in scene.messages[-1]


@cases(
    "overrides, gpus, placed",
    ([], [], {}),
    (["experiment=gsm8k_1gpu"], ["5"], {"learner": ["5"], "generator-0": ["5"]}),
    (["experiment=gsm8k_8gpu"], EIGHT, {"learner": EIGHT[:4], "generator-0": EIGHT[4:6], "generator-1": EIGHT[6:]}),
    ([], ["6", "GPU-8932f937"], {"learner": ["6"], "generator-0": ["GPU-8932f937"]}),
    # vLLM's build decides its device; a setting decides the learner's.
    (["learner.device=cpu"], ["5"], {"learner": [], "generator-0": ["5"]}),
    (["learner.device=cpu", "generators/engine=hf"], ["5"], {"learner": [], "generator-0": []}),
    (["generators/engine=hf"], ["5"], {"learner": ["5"], "generator-0": ["5"]}),
    (["generators/engine=scripted"], ["5"], {"learner": ["5"], "generator-0": []}),
)
def test_each_role_gets_its_gpus_in_order_and_one_is_shared(overrides, gpus, placed):
    assert place(load(overrides), gpus=gpus) == placed


@cases(
    "overrides, gpus, message",
    (["learner.num_ranks=2"], ["5"], r"learner.num_ranks must be <= the GPUs here \(1\), got 2: each"),
    (["generators.engine.tensor_parallel_size=2"], ["5"], r"size must be <= the GPUs here \(1\), got 2: each"),
    (["experiment=gsm8k_8gpu"], EIGHT[:4], "got 8"),
    (["weights.backend=nccl"], None, r"weights\.backend=nccl must have a GPU for the learner and .* got 0 here"),
)
def test_no_two_processes_of_a_group_share_a_gpu_and_a_role_that_must_have_one_gets_one(overrides, gpus, message):
    generator_pool.check_placement(load(["learner.device=cpu"]))
    run = load(overrides)
    with pytest.raises(ConfigError, match=message):
        place(run, gpus=gpus) if gpus else generator_pool.check_placement(run)


def test_an_implausible_number_of_generators_is_refused():
    generator_pool.check_target(make_run(), 8, num_cores=2)
    with pytest.raises(ConfigError, match=r"generators must be <= 8 on this machine of 2 cores, got 100: lower it"):
        generator_pool.check_target(make_run(), 100, num_cores=2)
    for settings in ({"count": 20}, {"autoscale": {"max": 20}}):
        generator_pool.check_target(make_run(generators=settings), 20, num_cores=2)
        with pytest.raises(ConfigError, match="<= 20"):
            generator_pool.check_target(make_run(generators=settings), 21, num_cores=2)


def test_the_driver_is_asked_for_the_gpus_and_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = tmp_path / "nvidia-smi"
    asked.write_text('#!/bin/sh\ncase "$*" in *memory.total*"-i 1") echo 81559;; *index*) echo 0; echo 1;; esac\n')
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}, torch_version="2.13.0") == ["0", "1"]
    assert visible_gpus({}, torch_version="2.13.0+cpu") == []
    shown = {" 7 , GPU-8932f937 ": ["7", "GPU-8932f937"], "MIG-3a/1/0": ["MIG-3a/1/0"], "": [], "1,-1,2": ["1"]}
    for value, names in shown.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, torch_version="2.13.0+cu130") == names
    assert gpu_gib("1") == pytest.approx(79.65, abs=0.01)
    with pytest.raises(ConfigError, match=r"^nvidia-smi must report the memory of GPU MIG-3a"):
        gpu_gib("MIG-3a")
