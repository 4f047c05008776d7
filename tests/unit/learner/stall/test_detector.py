"""A wait is watched over a store: dead ends end it with their events, or are shown until somebody mends them."""

import pytest
from structlog.testing import capture_logs

from slipstream.broker.status.blocking import dead_end_cause
from slipstream.buffer.memory.store import MemoryStore
from slipstream.buffer.records import Claim
from slipstream.buffer.trajectory import Reward
from slipstream.configs.run import RunConfig
from slipstream.learner.errors import DeadEndError
from slipstream.learner.stall.detector import StallDetector
from tests.builders import make_run
from tests.contract.stores import OLDEST_FIRST, answer, lease, open_run
from tests.unit.learner.run_looks import FakeClock

AFTER_S = 120.0
BATCHES = 2 * 2 * 2
"""Trajectories whose rewards must fail in a row."""


class Scene:
    """A store in which a broker and one generator report, and a learner that waits."""

    def __init__(self, *, policy: str = "fail") -> None:
        self.clock = FakeClock()
        self.run: RunConfig = make_run(learner={"dead_end": {"policy": policy}})
        self.store = MemoryStore(clock=self.clock)
        open_run(self.store)
        self.store.announce_version(0)
        self.stood_by = 0
        self.watch = StallDetector(
            run=self.run,
            store=self.store,
            who_is_missing=lambda: "1 generators alive",
            keep_alive=self.keep_alive,
            clock=self.clock,
        )
        self.report()
        self.watch.begin("the 2 groups of step 1", waits_for="groups", timeout_s=1800, setting="learner.wait_timeout_s")

    def keep_alive(self) -> None:
        self.stood_by += 1

    def report(self, **gauges) -> None:
        self.store.report_role("broker", {"role": "broker", "state": "ready"})
        told = {"role": "generator", "state": "ready", "version": 0, "trajectories": 0, "rewards_failed": 0}
        self.store.report_role("generator-0", told | gauges)

    def wait(self, seconds: float, **gauges) -> str:
        """Look every second for so long, while everybody reports; returns the last reason."""
        reason = self.watch.look("0 are ready")
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.report(**gauges)
            reason = self.watch.look("0 are ready")
        return reason

    def claim_one(self, *, status: str) -> Claim:
        """A claim of one group, of whose rewards the first is `status` and the second an error."""
        (handed,) = lease(self.store, 1)
        rewards = [Reward(total=0.0, status=status), Reward(total=0.0, status="error")]
        members = [answer(handed, index, reward=reward) for index, reward in enumerate(rewards)]
        self.store.insert(members)
        claim = self.store.claim(step=1, version=0, num_groups=1, rules=OLDEST_FIRST, lease_s=60)
        assert isinstance(claim, Claim)
        return claim


def test_a_dead_end_fails_with_cause_remedy_and_the_last_events_in_one_line():
    scene = Scene()
    scene.store.record_event("launcher", "is not concerned")
    for number in range(4):
        scene.store.record_event("generator-0", f"died\nfor the {number}. time")
    with pytest.raises(DeadEndError) as caught:
        scene.wait(AFTER_S, state="gone", reason="silent for 8 s")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("the 2 groups of step 1 must come, but no generator is alive")
    assert "python -m generators" in line
    assert "resume=true" in line
    assert line.endswith("generator-0: died for the 3. time.")
    assert "120 s ago generator-0: died for the 1. time | " in line
    assert "for the 0. time" not in line
    assert "not concerned" not in line


def test_before_it_is_a_dead_end_the_reason_says_what_is_missing():
    assert Scene().wait(AFTER_S - 1) == "waiting for the 2 groups of step 1: 0 are ready"


def test_told_to_wait_it_shows_the_cause_and_goes_on_by_itself():
    scene = Scene(policy="wait")
    reason = scene.wait(AFTER_S + 60, state="unsynced", reason="the probe differs")
    assert reason.startswith("waiting for the 2 groups of step 1: 0 are ready; dead end: ")
    assert "does not hold verified weights" in dead_end_cause({"learner": scene.watch.gauges()})
    assert scene.wait(1, state="ready") == "waiting for the 2 groups of step 1: 0 are ready"
    told = [event.text for event in scene.store.events(limit=9) if event.role == "learner"]
    assert len(told) == 2
    assert told[0].startswith("dead end, waits for the 2 groups of step 1: the only living generator")
    assert told[1] == "goes on after a dead end"


def test_the_log_says_every_few_seconds_what_it_waits_for_and_then_why_in_vain():
    scene = Scene(policy="wait")
    with capture_logs() as lines:
        scene.wait(AFTER_S + 60)
    assert [line["event"] for line in lines].count("waiting") == AFTER_S / 5 - 1
    assert [line["log_level"] for line in lines if line["event"] == "dead_end"] == ["warning"] * (1 + 60 // 5 + 1)
    assert scene.stood_by == (AFTER_S + 60) / 5


def test_what_comes_ends_the_dead_end_of_the_wait_for_it():
    scene = Scene(policy="wait")
    scene.wait(AFTER_S)
    scene.watch.end()
    scene.watch.begin("the 2 groups of step 2", waits_for="groups", timeout_s=1800, setting="learner.wait_timeout_s")
    assert scene.wait(1) == "waiting for the 2 groups of step 2: 0 are ready"


# --- rewards ---------------------------------------------------------------------------------------------------------
def test_while_rewards_answer_every_claim_is_taken():
    scene = Scene(policy="wait")
    scene.wait(1)
    assert scene.watch.takes(scene.claim_one(status="error"))
    assert scene.store.counts().outcomes == {}


def test_while_no_reward_answers_groups_without_any_are_let_go():
    scene = Scene(policy="wait")
    scene.wait(1)
    assert "dead end: none of the last 8 trajectories" in scene.wait(1, trajectories=BATCHES, rewards_failed=BATCHES)
    assert not scene.watch.takes(scene.claim_one(status="error"))
    assert scene.store.counts().reasons == {"rejected: no_reward": 1}
    assert scene.watch.takes(scene.claim_one(status="ok"))
    assert scene.wait(1, trajectories=BATCHES + 1, rewards_failed=BATCHES).endswith("0 are ready")


def test_an_evaluation_without_a_reward_fails():
    with pytest.raises(DeadEndError, match="none of the last 4 trajectories has a reward"):
        Scene().watch.find_no_reward(num_failed=4)


def test_told_to_wait_for_rewards_it_goes_on_when_one_answers():
    scene = Scene(policy="wait")
    scene.wait(1)
    scene.watch.find_no_reward(num_failed=4)
    scene.watch.end()
    assert "dead end: none of the last 4 trajectories" in scene.wait(3, trajectories=4, rewards_failed=4)
    assert scene.wait(1, trajectories=5, rewards_failed=4).endswith("0 are ready")
