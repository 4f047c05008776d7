from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from slipstream.buffer.records import Claim
from slipstream.buffer.role_reports import RoleStatus
from slipstream.buffer.trajectory import Reward
from slipstream.learner.errors import DeadEndError
from slipstream.learner.stall import StallDetector
from slipstream.learner.stall_causes import Progress, Snapshot, StallCause, find_cause
from slipstream.observe.run_status import dead_end_cause
from tests.builders import make_run
from tests.cases import cases
from tests.contract.stores import OLDEST_FIRST, answer, lease, open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

AFTER_S, START_AFTER_S, LIMIT_S = 120.0, 720.0, 1800.0
MAX_FAILED = 2 * 2 * 2
"""Trajectories in two steps of the builders' run."""


def role(name: str = "generator-0", kind: str = "generator", **overrides: Any) -> RoleStatus:
    fields = {"liveness": "alive", "state": "ready", "report_age_s": 0.5, "progress_age_s": None, "reason": ""}
    return RoleStatus(**({"name": name, "role": kind, "version": 0, **fields} | overrides))


def dead(name: str = "generator-0", kind: str = "generator", *, age_s: float = 95.0, **overrides: Any) -> RoleStatus:
    return role(name, kind, **({"liveness": "silent", "report_age_s": age_s} | overrides))


def snapshot(*generators: RoleStatus, version: int = 0, broker: RoleStatus | None = None, **overrides: Any) -> Snapshot:
    """A snapshot with a live broker by default. Overrides are fields of the snapshot or of its counts."""
    store = MemoryStore()
    store.open_run("test", config_json="{}", num_rows=4, seed=0)
    fields = {name: overrides.pop(name) for name in list(overrides) if name in Snapshot.__dataclass_fields__}
    fields["broker"] = broker or role("broker", "broker", version=None)
    return Snapshot(msgspec.structs.replace(store.counts(), **overrides), version, generators=generators, **fields)


def working(**overrides: Any) -> Snapshot:
    return snapshot(role(), **overrides)


class Scene:
    def __init__(self, **overrides: Any) -> None:
        self.clock = FakeClock(0.0)
        self.progress = Progress(make_run(**overrides), clock=self.clock)
        self.begin()

    def begin(self) -> None:
        self.progress.begin()

    def after(self, seconds: float, now: Snapshot) -> StallCause | None:
        self.clock.now += seconds
        self.progress.update(now)
        return find_cause(self.progress)


@pytest.fixture
def scene() -> Scene:
    return Scene()


UNSYNCED = [role(f"generator-{n}", state="unsynced", reason=f"probe differs by 0.{n}") for n in (1, 2)]
STARTING = snapshot(role(state="starting", version=None))
WITHOUT_WEIGHTS = role(state="unsynced", version=None, waits_for="weights")
FETCHING = role(state="unsynced", version=None, reason="fetching", waits_for="transfer")
STILL = {
    "nobody_joined": (snapshot(), "generators", AFTER_S, ["none ever joined", "python -m slipstream.generators name="]),
    "dead_generators": (
        snapshot(dead("generator-1", liveness="gone", reason="killed"), dead(age_s=40)),
        "generators", AFTER_S, ["generator-1 has been gone for 95 s: killed", "generator-0 has been silent for 40 s"],
    ),
    "many_dead_generators": (
        snapshot(*(dead(f"generator-{n}", age_s=100 - n) for n in range(5))),
        "generators", AFTER_S, ["generator-4", "generator-2", "and 2 more"],
    ),
    "dead_broker": (snapshot(dead(), broker=dead("broker", "broker")), "broker", AFTER_S, ["95 s", "m.broker"]),
    "starting": (snapshot(role(state="starting", version=None, reason="loading")), "start", START_AFTER_S, ["loading"]),
    "fetching": (snapshot(FETCHING), "weights", START_AFTER_S, ["generator-0 is unsynced with no weights: fetching"]),
    "unsynced": (snapshot(*UNSYNCED), "weights", AFTER_S, ["probe differs by 0.1", "probe differs by 0.2"]),
    "outdated": (snapshot(role(version=3), version=7), "outdated", AFTER_S, ["version 7", "ready with version 3"]),
    "store_readonly": (
        working(broker=role("broker", "broker", reason="store_cannot_write", waits_for="store")),
        "store", AFTER_S, ["store_cannot_write"],
    ),
    "silent": (
        snapshot(role(running=8, reason="pacing")), "silence", AFTER_S,
        ["generator-0 is ready with version 0, 8 trajectories running: pacing", "learner.stall.timeout_s"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("still", "kind", "after_s", "named"), STILL.values(), ids=STILL)
def test_a_run_without_progress_is_a_dead_end_after_its_deadline(scene, still, kind, after_s, named):
    assert scene.after(0, still) is None
    assert scene.after(after_s - 1, still) is None
    cause = scene.after(1, still)
    assert cause.kind == kind
    assert [words for words in named if words not in str(cause)] == []


def test_a_new_wait_a_slow_engine_and_a_long_step_have_their_own_time(scene):
    scene.after(0, working())
    assert scene.after(AFTER_S - 1, working()) is None
    scene.begin()
    assert scene.after(AFTER_S - 1, working()) is None
    assert scene.after(1, working()) is not None
    scene = Scene(generators={"engine": {"kind": "vllm"}}, learner={"stall": {"timeout_s": 300.0}})
    assert scene.after(0, STARTING) is None
    assert scene.after(4 * 300 - 1, STARTING) is None
    assert scene.after(1, STARTING).kind == "start"
    scene = Scene()
    assert scene.after(0, working()) is None
    for step in range(5):
        scene.clock.now += 2 * START_AFTER_S
        scene.begin()
        assert scene.after(0, snapshot(role(version=step), version=step + 1)) is None


def expiring(n: int) -> Snapshot:
    """By every other second, two groups of two have arrived and one has expired."""
    reasons = {"expired: stale": n, "retired: ": 3}
    return working(accepted=2 * n + n % 2 * 2, outcome_members={"expired": 2 * n}, reasons=reasons)


def filtered(n: int) -> Snapshot:
    return working(accepted=8 * n, outcome_members={"rejected": 8 * n}, reasons={"rejected: zero_advantage": n})


def refused(n: int) -> Snapshot:
    return working(refused={"oversize": 3, "nonfinite_logprob": n} if n else {"oversize": 3})


@cases(
    "come, kind, named, not_named",
    (expiring, "lost", "expired: stale", "retired"),
    (filtered, "filtered", "rejected: zero_advantage", "retired"),
    (refused, "refused", "nonfinite_logprob", "oversize"),
)
def test_arrivals_that_are_lost_are_a_dead_end_that_names_the_reason(scene, come, kind, named, not_named):
    causes = [scene.after(1, come(n)) for n in range(int(AFTER_S) + 3)]
    cause = next(filter(None, causes))
    assert cause.kind == kind
    assert named in cause.problem
    assert not_named not in cause.problem
    assert AFTER_S <= causes.index(cause) + 1 <= AFTER_S + 2


def test_lost_groups_do_not_explain_an_evaluation_and_a_crash_loop_hides_no_dead_end(scene):
    causes = [scene.after(1, working(answered=0, reasons={"expired: stale": n})) for n in range(int(AFTER_S) + 2)]
    assert causes[-1].kind == "silence"
    scene = Scene()
    causes = []
    for _ in range(10):
        causes += [scene.after(1, snapshot(dead(liveness="gone"))), scene.after(AFTER_S / 2, working())]
    assert any(causes)


@pytest.mark.parametrize(
    "come",
    [
        lambda n: working(accepted=n),
        lambda n: working(answered=n),
        lambda n: working(accepted=100 + n, **({"outcome_members": {"expired": 100}} if n else {"ready": 50})),
        lambda n: snapshot(role(version=n), version=n),
    ],
    ids=["trajectories", "answers", "trajectories_while_older_ones_expire", "applied_versions"],
)
def test_slow_progress_is_no_dead_end(scene, come):
    assert [scene.after(AFTER_S - 1, come(n)) for n in range(5)] == [None] * 5


@pytest.mark.parametrize(
    ("phases", "kind"),
    [
        ([(500, STARTING), (1, working()), (AFTER_S - 1, working())], "silence"),
        ([(500, STARTING), (1, snapshot(WITHOUT_WEIGHTS)), (START_AFTER_S - 1, snapshot(FETCHING))], "weights"),
    ],
    ids=["first batch", "first weights, before which a generator is briefly unsynced"],
)
def test_a_start_that_took_long_leaves_the_next_phase_its_own_time(scene, phases, kind):
    assert [scene.after(seconds, now) for seconds, now in phases] == [None] * len(phases)
    assert scene.after(1, phases[-1][1]).kind == kind


@pytest.mark.parametrize("starts_s", [0, 500])
def test_slow_progress_ends_at_the_limit_counted_from_the_first_generator(scene, starts_s):
    for _ in range(starts_s // 100):
        assert scene.after(100, STARTING) is None
    causes = [scene.after(100, working(accepted=n)) for n in range(20)]
    first = next(filter(None, causes))
    assert (first.kind, 100 * causes.index(first)) == ("slow", LIMIT_S)
    assert "learner.stall.timeout_s" in first.remedy


def test_training_while_no_generator_applies_newer_weights_becomes_a_dead_end(scene):
    found = []
    for step in range(1, 100):
        scene.clock.now += 10
        scene.begin()
        cause = scene.after(0, snapshot(role(version=2), version=2 + step, accepted=step))
        found += [(scene.clock.now, cause.kind)] if cause else []
    assert found[0] == (10 + START_AFTER_S, "outdated")


@pytest.mark.parametrize(
    ("sums", "failed"),
    [
        ([(0, 0), (0, MAX_FAILED - 1), (0, MAX_FAILED)], MAX_FAILED),
        ([(0, 500), (0, 500)], None),
        ([(0, 0), (1, 6), (2, 12), (3, 18)], None),
        ([(100, 0), (0, 5), (0, 8)], 8),
        ([(0, 4), (0, 0), (0, 8)], 8),
    ],
    ids=["all_fail", "failed_before_the_run", "some_succeed", "restarted_generator", "generator_left"],
)
def test_consecutive_failed_rewards_are_an_immediate_dead_end(scene, sums, failed):
    causes = [scene.after(1, working(rewarded=rewarded, unrewarded=unrewarded)) for rewarded, unrewarded in sums]
    assert not any(causes[:-1])
    assert (causes[-1] and causes[-1].kind) == (failed and "rewards")
    if failed:
        assert f"last {failed} trajectories" in causes[-1].problem
        assert "exact_match" in causes[-1].problem


def test_failed_rewards_explain_a_standstill_before_the_filter_does_and_a_replay_needs_no_new_ones(scene):
    for n in range(int(AFTER_S)):
        scene.after(1, working(unrewarded=min(n, 3), reasons={"rejected: zero_advantage": n}))
    assert scene.after(1, working(unrewarded=3, reasons={"rejected: zero_advantage": 200})).kind == "rewards"
    scene = Scene(mode="replay", replay={"path": "archive"}, weights={"transport": "memory"})
    scene.after(0, working())
    assert scene.after(1, working(unrewarded=99)) is None


AFTER_S = 120
STEP_1 = "waiting for the 2 groups of step 1: 0 are ready"


class DetectorScene:
    def __init__(self, *, policy: str) -> None:
        self.clock = FakeClock(0.0)
        self.num_keep_alives = 0
        self.store = MemoryStore(clock=self.clock)
        open_run(self.store)
        self.store.announce_version(0)
        self.detector = StallDetector(
            run=make_run(learner={"stall": {"policy": policy}}),
            store=self.store,
            describe=lambda: "1 generators alive",
            keep_alive=self.keep_alive,
            clock=self.clock,
        )
        self.begin(step=1)

    def begin(self, *, step: int) -> None:
        goal = f"the 2 groups of step {step}"
        self.detector.begin(goal, waits_for="groups")

    def keep_alive(self) -> None:
        self.num_keep_alives += 1

    def wait(self, seconds: int, **gauges) -> str:
        """Poll every second while all roles report. Returns the last reason."""
        generator = {"role": "generator", "state": "ready", "version": 0, "trajectories": 0, "rewards_failed": 0}
        for _ in range(seconds + 1):
            self.store.report_role("broker", {"role": "broker", "state": "ready"})
            self.store.report_role("generator-0", generator | gauges)
            reason = self.detector.poll("0 are ready")
            self.clock.now += 1
        self.clock.now -= 1
        return reason

    def claim_one(self, *, status: str) -> Claim:
        """A claim of one group: one reward with this status and one from a failed reward function."""
        (leased,) = lease(self.store, 1)
        rewards = [Reward(total=0.0, status=status), Reward(total=0.0, status="error")]
        self.store.insert([answer(leased, index, reward=reward) for index, reward in enumerate(rewards)])
        claim = self.store.claim(step=1, version=0, num_groups=1, rules=OLDEST_FIRST, lease_s=60)
        assert isinstance(claim, Claim)
        return claim

    def events(self) -> list[str]:
        return [event.text for event in self.store.events(limit=9) if event.role == "learner"]


@pytest.fixture
def patient() -> DetectorScene:
    return DetectorScene(policy="wait")


def test_a_dead_end_fails_with_cause_remedy_and_the_last_events_in_one_line():
    scene = DetectorScene(policy="fail")
    scene.store.record_event("launcher", "is not concerned")
    for number in range(4):
        scene.store.record_event("generator-0", f"died\nfor the {number}. time")
    with pytest.raises(DeadEndError) as caught:
        scene.wait(AFTER_S, state="gone", reason="silent for 8 s")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("the 2 groups of step 1 must come, but no generator is alive")
    expected = ["python -m slipstream.generators", "resume=true", "120 s ago generator-0: died for the 1. time | "]
    assert [part for part in expected if part not in line] == []
    assert line.endswith("generator-0: died for the 3. time.")
    assert [part for part in ("for the 0. time", "not concerned") if part in line] == []


def test_under_wait_the_cause_is_shown_until_it_is_resolved_also_by_a_wait_that_succeeds(patient: DetectorScene):
    assert patient.wait(AFTER_S - 1, state="unsynced") == STEP_1
    assert patient.wait(60, state="unsynced").startswith(f"{STEP_1}; dead end: ")
    assert "verified weights" in dead_end_cause({"learner": patient.detector.gauges()})
    assert patient.wait(1) == STEP_1
    began, ended = (event.partition(":")[0] for event in patient.events())
    assert (began, ended) == ("dead end, waits for the 2 groups of step 1", "dead end resolved")
    patient = DetectorScene(policy="wait")
    patient.wait(AFTER_S)
    patient.detector.end()
    patient.begin(step=2)
    assert patient.wait(1) == "waiting for the 2 groups of step 2: 0 are ready"


def test_the_log_regularly_shows_missing_groups_and_then_the_cause_with_the_time_up_to_now(patient: DetectorScene):
    with capture_logs() as lines:
        assert f"nothing has arrived for {AFTER_S + 60} s" in patient.wait(AFTER_S + 60)
    assert [line["event"] for line in lines].count("waiting") == AFTER_S / 5 - 1
    assert [line["log_level"] for line in lines if line["event"] == "dead_end"] == ["warning"] * (1 + 60 // 5 + 1)
    assert patient.num_keep_alives == (AFTER_S + 60) / 5
    assert len(patient.events()) == 1


def test_groups_and_evaluations_without_any_reward_are_rejected_only_while_rewards_are_the_cause(
    patient: DetectorScene,
):
    patient.wait(1)
    unscored = patient.claim_one(status="error")
    assert not patient.detector.reject_unscored(unscored)
    assert patient.store.counts().outcomes == {}
    reason = patient.wait(1, trajectories=MAX_FAILED, rewards_failed=MAX_FAILED)
    assert f"dead end: none of the last {MAX_FAILED}" in reason
    assert patient.detector.reject_unscored(unscored)
    assert patient.store.counts().reasons == {"rejected: no_reward": 1}
    assert not patient.detector.reject_unscored(patient.claim_one(status="ok"))
    assert patient.wait(1, trajectories=MAX_FAILED + 1, rewards_failed=MAX_FAILED) == STEP_1
    patient = DetectorScene(policy="wait")
    with pytest.raises(DeadEndError, match="last 4 trajectories"):
        DetectorScene(policy="fail").detector.report_no_reward(num_failed=4)
    patient.wait(1)
    patient.detector.report_no_reward(num_failed=4)
    patient.detector.end()
    assert "dead end: none of the last 4 trajectories" in patient.wait(3, trajectories=4, rewards_failed=4)
    assert patient.wait(1, trajectories=5, rewards_failed=4) == STEP_1


def test_a_full_disk_is_not_a_dead_end_and_restarts_the_clock(monkeypatch):
    scene = DetectorScene(policy="fail")
    monkeypatch.setattr(scene.store, "full_disk", lambda: "/data (0 MiB of 9 MiB free)")
    for _ in range(3 * AFTER_S):
        reason = scene.detector.poll("0 are ready")
        scene.clock.now += 1
    assert "room on the disk of the store: /data" in reason
    monkeypatch.setattr(scene.store, "full_disk", lambda: "")
    scene.wait(AFTER_S - 5)
    with pytest.raises(DeadEndError):
        scene.wait(AFTER_S)


def test_a_pause_keeps_the_ranks_alive_says_so_and_ends_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = DetectorScene(policy="fail")
    assert list(scene.detector.while_paused()) == []
    scene.store.request("learner", "pause", "0.0")

    def pass_time(seconds: float) -> None:
        scene.clock.now += seconds
        if scene.clock.now >= 3600:
            scene.store.take_requests("learner", subjects=["pause"])

    monkeypatch.setattr("slipstream.learner.stall.time.sleep", pass_time)
    seen = [(reason, scene.detector.gauges()["waits_for"]) for reason in scene.detector.while_paused()]
    assert set(seen) == {("paused: `slipstream pause --off` resumes the run", "user")}
    assert scene.num_keep_alives == 3600 / 5
    assert scene.detector.gauges()["waits_for"] == ""
    assert [event.text for event in scene.store.events(limit=9)] == ["paused, as requested", "resumed, as requested"]
    scene.begin(step=1)
    assert scene.wait(AFTER_S - 2).startswith(STEP_1), "A pause does not count as time without progress."
