"""A wait over a store: a dead end fails it with the last events, or is shown until resolved."""

import pytest
from structlog.testing import capture_logs

from slipstream.buffer.records import Claim
from slipstream.buffer.trajectory import Reward
from slipstream.learner.errors import DeadEndError
from slipstream.learner.stall import StallDetector
from slipstream.observe.run_status import dead_end_cause
from tests.builders import make_run
from tests.contract.stores import OLDEST_FIRST, answer, lease, open_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

AFTER_S = 120
MAX_FAILED = 2 * 2 * 2
STEP_1 = "waiting for the 2 groups of step 1: 0 are ready"


class Scene:
    """A store with reports from a broker and one generator, and a waiting learner."""

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
def patient() -> Scene:
    return Scene(policy="wait")


def test_a_dead_end_fails_with_cause_remedy_and_the_last_events_in_one_line():
    scene = Scene(policy="fail")
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


def test_under_wait_the_cause_is_shown_until_it_is_resolved(patient: Scene):
    assert patient.wait(AFTER_S - 1, state="unsynced") == STEP_1
    assert patient.wait(60, state="unsynced").startswith(f"{STEP_1}; dead end: ")
    assert "verified weights" in dead_end_cause({"learner": patient.detector.gauges()})
    assert patient.wait(1) == STEP_1
    assert [event.partition(":")[0] for event in patient.events()] == [
        "dead end, waits for the 2 groups of step 1",
        "dead end resolved",
    ]


def test_the_log_regularly_shows_missing_groups_and_then_the_cause_with_the_time_up_to_now(patient: Scene):
    with capture_logs() as lines:
        assert f"nothing has arrived for {AFTER_S + 60} s" in patient.wait(AFTER_S + 60)
    assert [line["event"] for line in lines].count("waiting") == AFTER_S / 5 - 1
    assert [line["log_level"] for line in lines if line["event"] == "dead_end"] == ["warning"] * (1 + 60 // 5 + 1)
    assert patient.num_keep_alives == (AFTER_S + 60) / 5
    assert len(patient.events()) == 1


def test_a_wait_that_succeeds_resolves_its_dead_end(patient: Scene):
    patient.wait(AFTER_S)
    patient.detector.end()
    patient.begin(step=2)
    assert patient.wait(1) == "waiting for the 2 groups of step 2: 0 are ready"


def test_only_while_rewards_are_the_cause_groups_without_any_are_rejected(patient: Scene):
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


def test_an_evaluation_without_a_reward_is_a_dead_end_until_a_reward_arrives(patient: Scene):
    with pytest.raises(DeadEndError, match="last 4 trajectories"):
        Scene(policy="fail").detector.report_no_reward(num_failed=4)
    patient.wait(1)
    patient.detector.report_no_reward(num_failed=4)
    patient.detector.end()
    assert "dead end: none of the last 4 trajectories" in patient.wait(3, trajectories=4, rewards_failed=4)
    assert patient.wait(1, trajectories=5, rewards_failed=4) == STEP_1


def test_a_full_disk_is_not_a_dead_end_and_restarts_the_clock(monkeypatch):
    scene = Scene(policy="fail")
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
    scene = Scene(policy="fail")
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
