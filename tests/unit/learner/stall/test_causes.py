"""Every stall cause is found and named after its deadline. A run that makes progress has none."""

from typing import Any

import msgspec
import pytest

from slipstream.buffer.role_reports import RoleStatus
from slipstream.learner.stall_causes import Progress, Snapshot, StallCause, find_cause
from tests.builders import make_run
from tests.fakes import FakeClock
from tests.memory_store.store import MemoryStore

AFTER_S, START_AFTER_S, LIMIT_S = 120.0, 720.0, 1800.0
MAX_FAILED = 2 * 2 * 2
"""Trajectories in two steps of the builders' run."""


def role(name: str = "generator-0", kind: str = "generator", **overrides: Any) -> RoleStatus:
    """A live role that is ready at version 0."""
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
    """A wait in progress, checked each time the clock moves."""

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


def test_a_new_wait_has_its_own_time(scene):
    scene.after(0, working())
    assert scene.after(AFTER_S - 1, working()) is None
    scene.begin()
    assert scene.after(AFTER_S - 1, working()) is None
    assert scene.after(1, working()) is not None


def expiring(n: int) -> Snapshot:
    """By every other second, two groups of two have arrived and one has expired."""
    return working(
        accepted=2 * n + n % 2 * 2, outcome_members={"expired": 2 * n}, reasons={"expired: stale": n, "retired: ": 3}
    )


def filtered(n: int) -> Snapshot:
    return working(accepted=8 * n, outcome_members={"rejected": 8 * n}, reasons={"rejected: zero_advantage": n})


def refused(n: int) -> Snapshot:
    return working(refused={"oversize": 3, "nonfinite_logprob": n} if n else {"oversize": 3})


@pytest.mark.parametrize(
    ("come", "kind", "named", "not_named"),
    [
        (expiring, "lost", "expired: stale", "retired"),
        (filtered, "filtered", "rejected: zero_advantage", "retired"),
        (refused, "refused", "nonfinite_logprob", "oversize"),
    ],
)
def test_arrivals_that_are_lost_are_a_dead_end_that_names_the_reason(scene, come, kind, named, not_named):
    causes = [scene.after(1, come(n)) for n in range(int(AFTER_S) + 3)]
    cause = next(filter(None, causes))
    assert cause.kind == kind
    assert named in cause.problem
    assert not_named not in cause.problem
    assert AFTER_S <= causes.index(cause) + 1 <= AFTER_S + 2


def test_lost_groups_do_not_explain_an_evaluation(scene):
    causes = [scene.after(1, working(answered=0, reasons={"expired: stale": n})) for n in range(int(AFTER_S) + 2)]
    assert causes[-1].kind == "silence"


def test_a_crash_loop_hides_no_dead_end(scene):
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


def test_an_engine_that_may_start_longer_has_that_time():
    scene = Scene(generators={"engine": {"kind": "vllm"}}, learner={"stall": {"timeout_s": 300.0}})
    assert scene.after(0, STARTING) is None
    assert scene.after(4 * 300 - 1, STARTING) is None
    assert scene.after(1, STARTING).kind == "start"


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


def test_a_long_step_is_no_lag_of_the_generators(scene):
    assert scene.after(0, working()) is None
    for step in range(5):
        scene.clock.now += 2 * START_AFTER_S
        scene.begin()
        assert scene.after(0, snapshot(role(version=step), version=step + 1)) is None


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


def test_failed_rewards_explain_a_standstill_before_the_filter_does(scene):
    for n in range(int(AFTER_S)):
        scene.after(1, working(unrewarded=min(n, 3), reasons={"rejected: zero_advantage": n}))
    assert scene.after(1, working(unrewarded=3, reasons={"rejected: zero_advantage": 200})).kind == "rewards"


def test_a_replay_needs_no_new_rewards():
    scene = Scene(mode="replay", replay={"path": "archive"}, weights={"transport": "memory"})
    scene.after(0, working())
    assert scene.after(1, working(unrewarded=99)) is None
