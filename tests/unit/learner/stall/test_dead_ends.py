"""Dead ends, told from looks made by hand: each cause is found and named, and what gets on is none."""

import pytest

from slipstream.learner.stall.causes import DeadEndCause
from slipstream.learner.stall.detector import DeadEndDetector
from slipstream.learner.stall.progress import RunProgress
from tests.builders import make_run
from tests.unit.learner.run_looks import FakeClock, make_generator, make_look, make_role

AFTER_S, START_AFTER_S, LIMIT_S = 120.0, 600.0, 1800.0
ONE_BATCH = 2 * 2
"""Trajectories of a step of the builders' run."""


class Scene:
    """A wait that has begun, looked at whenever the clock is moved."""

    def __init__(self, **overrides) -> None:
        self.clock = FakeClock()
        self.run = make_run(**overrides)
        self.dead_ends = DeadEndDetector(self.run, clock=self.clock)
        self.begin()

    def begin(self) -> None:
        self.dead_ends.begin(timeout_s=LIMIT_S, setting="learner.wait_timeout_s")

    def after(self, seconds: float, look: RunProgress) -> DeadEndCause | None:
        """What is judged of `look`, so long after the one before."""
        self.clock.now += seconds
        return self.dead_ends.judge(look)

    def stay(self, look: RunProgress, *, seconds: float = AFTER_S) -> DeadEndCause:
        """The cause when nothing changes for so long; none a second before."""
        self.after(0, look)
        assert self.after(seconds - 1, look) is None
        cause = self.after(1, look)
        assert cause is not None
        return cause


@pytest.fixture
def scene() -> Scene:
    return Scene()


# --- who is missing --------------------------------------------------------------------------------------------------
def test_that_no_generator_ever_came_is_a_dead_end(scene):
    cause = scene.stay(make_look())
    assert cause.kind == "generators"
    assert "no generator is alive" in cause.what
    assert "none ever joined" in cause.what
    assert scene.run.broker.address in cause.remedy


def test_dead_generators_are_named_with_their_last_word(scene):
    gone = make_generator("generator-1", liveness="gone", state="gone", report_age_s=95.0, reason="silent for 8 s")
    silent = make_generator(liveness="silent", report_age_s=40.0)
    cause = scene.stay(make_look(gone, silent))
    assert cause.kind == "generators"
    assert "generator-1 has been gone for 95 s: silent for 8 s" in cause.what
    assert "generator-0 has been silent for 40 s" in cause.what


def test_of_many_generators_the_freshest_are_named(scene):
    dead = [make_generator(f"generator-{n}", liveness="gone", report_age_s=100.0 - n) for n in range(5)]
    cause = scene.stay(make_look(*dead))
    assert "generator-4" in cause.what
    assert "generator-0" not in cause.what
    assert "and 2 more" in cause.what


def test_a_dead_broker_is_told_apart_from_dead_generators(scene):
    broker = make_role("broker", "broker", liveness="silent", report_age_s=130.0)
    cause = scene.stay(make_look(make_generator(liveness="silent", report_age_s=130.0), broker=broker))
    assert cause.kind == "broker"
    assert "the broker has been silent for 130 s" in cause.what
    assert "python -m broker" in cause.remedy


# --- starting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "reason", "waits_for", "kind"),
    [
        ("starting", "loading the model", "", "start"),
        ("unsynced", "fetching version 0 from the learner", "transfer", "weights"),
    ],
)
def test_a_generator_that_starts_has_more_time(scene, state, reason, waits_for, kind):
    starting = make_look(make_generator(state=state, version=None, reason=reason, waits_for=waits_for))
    cause = scene.stay(starting, seconds=START_AFTER_S)
    assert cause.kind == kind
    assert reason in cause.what


def test_one_that_has_started_has_time_for_a_first_batch(scene):
    assert scene.after(500, make_look(make_generator(state="starting", version=None))) is None
    assert scene.after(1, make_look(make_generator())) is None
    assert scene.after(AFTER_S - 1, make_look(make_generator())) is None
    assert scene.after(1, make_look(make_generator())) is not None


def test_one_that_starts_again_and_again_is_no_sign_of_life_for_ever(scene):
    found = None
    for _ in range(10):
        scene.after(1, make_look(make_generator(liveness="gone", state="gone")))
        found = found or scene.after(AFTER_S / 2, make_look(make_generator()))
    assert found is not None


# --- weights ---------------------------------------------------------------------------------------------------------
def test_that_nobody_holds_verified_weights_is_told_with_each_ones_reason(scene):
    generators = [make_generator(f"generator-{n}", state="unsynced", reason=f"probe differs by 0.{n}") for n in (1, 2)]
    cause = scene.stay(make_look(*generators))
    assert cause.kind == "weights"
    assert "none of the 2 living generators holds verified weights" in cause.what
    assert "probe differs by 0.1" in cause.what
    assert "probe differs by 0.2" in cause.what


def test_that_nobody_adopts_the_newest_version_is_told_with_what_they_hold(scene):
    cause = scene.stay(make_look(make_generator(version=3), version=7))
    assert cause.kind == "adoption"
    assert "no living generator has adopted version 7" in cause.what
    assert "generator-0 is ready with version 3" in cause.what


def test_adopting_is_progress(scene):
    scene.after(0, make_look(make_generator(version=3), version=4))
    assert scene.after(AFTER_S - 1, make_look(make_generator(version=4), version=4)) is None
    assert scene.after(AFTER_S - 1, make_look(make_generator(version=4), version=4)) is None


def test_training_on_while_nobody_adopts_is_a_dead_end_in_the_end(scene):
    found = []
    for step in range(1, 100):
        scene.clock.now += 10
        scene.begin()
        cause = scene.after(0, make_look(make_generator(version=2), version=2 + step, accepted=step))
        found += [(scene.clock.now, cause.kind)] if cause else []
    assert found[0] == (10 + START_AFTER_S, "adoption")


def test_a_long_step_is_no_lag_of_the_generators(scene):
    for step in range(5):
        scene.clock.now += 2 * START_AFTER_S
        scene.begin()
        assert scene.after(0, make_look(make_generator(version=step), version=step + 1)) is None


# --- rewards ---------------------------------------------------------------------------------------------------------
def test_rewards_that_all_fail_are_a_dead_end_at_once(scene):
    scene.after(0, make_look(make_generator()))
    one_less = 2 * ONE_BATCH - 1
    assert scene.after(1, make_look(make_generator(trajectories=one_less, rewards_failed=one_less))) is None
    cause = scene.after(1, make_look(make_generator(trajectories=one_less + 1, rewards_failed=one_less + 1)))
    assert cause is not None
    assert cause.kind == "rewards"
    assert f"none of the last {2 * ONE_BATCH} trajectories has a reward" in cause.what
    assert "position_match" in cause.what


def test_a_single_reward_that_answers_starts_the_count_anew(scene):
    scene.after(0, make_look(make_generator()))
    for finished in range(7, 70, 7):
        assert (
            scene.after(1, make_look(make_generator(trajectories=finished, rewards_failed=finished // 7 * 6))) is None
        )


def test_rewards_that_failed_before_the_learner_began_do_not_count(scene):
    assert scene.after(0, make_look(make_generator(trajectories=500, rewards_failed=500))) is None


def test_a_generator_that_was_started_again_counts_its_failures_anew(scene):
    scene.after(0, make_look(make_generator(trajectories=100, rewards_failed=0)))
    assert scene.after(1, make_look(make_generator(trajectories=5, rewards_failed=5))) is None
    cause = scene.after(1, make_look(make_generator(trajectories=8, rewards_failed=8)))
    assert cause is not None
    assert "last 8 trajectories" in cause.what


def test_one_generator_whose_rewards_answer_is_enough(scene):
    for n in range(10):
        broken = make_generator("generator-0", trajectories=10 * n, rewards_failed=10 * n)
        sound = make_generator("generator-1", trajectories=n)
        assert scene.after(1, make_look(broken, sound)) is None


def test_an_evaluation_without_a_reward_is_a_dead_end_until_one_answers(scene):
    scene.after(0, make_look(make_generator()))
    assert "none of the last 3 trajectories" in scene.dead_ends.find_no_reward(num_failed=3).what
    again = scene.after(1, make_look(make_generator()))
    assert again is not None
    assert again.kind == "rewards"
    assert scene.after(1, make_look(make_generator(trajectories=1))) is None


def test_a_replay_does_without_rewards_of_its_own():
    archive = {"path": "archive"}
    scene = Scene(mode="replay", replay=archive, weights={"transport": "memory"}, buffer={"store": {"kind": "memory"}})
    scene.after(0, make_look(make_generator()))
    assert scene.after(1, make_look(make_generator(trajectories=99, rewards_failed=99))) is None


# --- groups that do not stay -----------------------------------------------------------------------------------------
def test_groups_that_are_all_let_go_are_a_dead_end_however_many_come(scene):
    scene.after(0, make_look(make_generator()))
    cause = None
    for n in range(1, 200):
        # A group comes, is ready for a second, and expires.
        cause = cause or scene.after(1, make_look(make_generator(), accepted=2 * n, outcome_members={"expired": 2 * n}))
        cause = cause or scene.after(
            1,
            make_look(
                make_generator(),
                accepted=2 * n + 2,
                outcome_members={"expired": 2 * n},
                reasons={"expired: on_stale": n, "retired: ": 3},
            ),
        )
    assert cause is not None
    assert cause.kind == "lost"
    assert "expired: on_stale" in cause.what
    assert "retired" not in cause.what
    assert "buffer.staleness" in cause.remedy
    assert scene.clock.now < 2 * AFTER_S


def test_groups_that_are_all_filtered_name_the_filter(scene):
    scene.after(0, make_look(make_generator()))
    cause = None
    for n in range(1, 200):
        counts = {"accepted": 8 * n, "outcome_members": {"rejected": 8 * n}, "reasons": {"rejected: zero_signal": n}}
        cause = scene.after(1, make_look(make_generator(), **counts))
        if cause:
            break
    assert cause is not None
    assert cause.kind == "filtered"
    assert "buffer.filter rejected every group that came for 120 s (120 rejected: zero_signal)" in cause.what
    assert "group_size" in cause.remedy


def test_what_was_there_before_the_wait_may_go_without_counting_against_what_comes(scene):
    scene.after(0, make_look(make_generator(), accepted=100, ready=50))
    for n in range(1, 300):
        look = make_look(make_generator(), accepted=100 + n, outcome_members={"expired": 100})
        assert scene.after(1, look) is None


def test_a_trickle_is_no_dead_end(scene):
    for n in range(10):
        assert scene.after(AFTER_S - 1, make_look(make_generator(), accepted=n)) is None


def test_a_trickle_ends_at_the_limit_of_the_wait(scene):
    causes = [scene.after(100, make_look(make_generator(), accepted=n)) for n in range(20)]
    first = next(number for number, cause in enumerate(causes) if cause)
    assert 100 * first == LIMIT_S
    assert causes[first].kind == "slow"
    assert "learner.wait_timeout_s" in causes[first].remedy


def test_the_limit_of_a_wait_counts_from_when_somebody_is_there_to_work(scene):
    for _ in range(5):
        assert scene.after(110, make_look(make_generator(state="starting", version=None))) is None
    causes = [scene.after(100, make_look(make_generator(), accepted=n)) for n in range(19)]
    assert [cause is None for cause in causes] == [True] * 18 + [False]


def test_answers_of_an_evaluation_are_progress(scene):
    for n in range(10):
        assert scene.after(AFTER_S - 1, make_look(make_generator(), answered=n)) is None


def test_refused_frames_are_told_by_reason(scene):
    scene.after(0, make_look(make_generator(), refused={"oversize": 3}))
    cause = scene.after(AFTER_S, make_look(make_generator(), refused={"oversize": 3, "nonfinite_logprob": 64}))
    assert cause is not None
    assert cause.kind == "refused"
    assert "64 nonfinite_logprob" in cause.what
    assert "oversize" not in cause.what


def test_a_full_store_is_told_as_that(scene):
    assert scene.stay(make_look(make_generator(), capacity_reason="capacity: 9 groups are in play")).kind == "store"


def test_a_store_that_takes_no_writes_is_told_by_the_brokers_word(scene):
    reason = "trajectories are put off: store_cannot_write"
    cause = scene.stay(
        make_look(make_generator(), broker=make_role("broker", "broker", reason=reason, waits_for="store"))
    )
    assert cause.kind == "store"
    assert "store_cannot_write" in cause.what


def test_silence_of_those_that_work_is_told_with_what_they_do(scene):
    cause = scene.stay(make_look(make_generator(running=8, reason="pacing: the learner must consume")))
    assert cause.kind == "silence"
    assert "generator-0 is ready with version 0, 8 trajectories under way: pacing" in cause.what
    assert "learner.dead_end.after_s" in cause.remedy


def test_a_new_wait_has_its_own_time(scene):
    scene.after(0, make_look(make_generator()))
    assert scene.after(AFTER_S - 1, make_look(make_generator())) is None
    scene.begin()
    assert scene.after(AFTER_S - 1, make_look(make_generator())) is None
    assert scene.after(1, make_look(make_generator())) is not None
