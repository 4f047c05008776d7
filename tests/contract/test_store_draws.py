"""What every store does with groups that are used again, too old or short of members, and what it counts of them."""

import pytest

from slipstream.buffer.errors import RunConflictError, StaleFenceError
from slipstream.buffer.records import Claim, LagSplit, Lease, VersionEntry
from slipstream.buffer.sampling import NotReady, SamplingRules
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.buffer import (
    DropShortConfig,
    FreshestConfig,
    PrioritizedConfig,
    RefillConfig,
    ReuseConfig,
    StalenessConfig,
    TrainShortConfig,
)
from tests.contract.stores import (
    GROUP_SIZE,
    AnyStore,
    answer,
    audit,
    checkpoint,
    claim,
    commit,
    lease,
    make_ready,
    open_run,
)


def on_stale(policy: str, *, max_lag: int = 1, **reuse: object) -> SamplingRules:
    return SamplingRules(reuse=ReuseConfig(**reuse), staleness=StalenessConfig(max_lag, policy))


def ask(store: AnyStore, rules: SamplingRules, *, step: int, version: int, count: int) -> Claim | NotReady:
    return store.claim(step=step, version=version, num_groups=count, rules=rules, lease_s=60)


def fill_with(store: AnyStore, each: Lease, *, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    spans = [VersionSpan(6, version)]
    store.insert(
        [
            answer(each, index, version_spans=spans, reward=Reward(total=reward))
            for index, reward in zip(each.indices, rewards, strict=True)
        ]
    )


def take_step(store: AnyStore, step: int, count: int, rules: SamplingRules) -> Claim:
    taken = claim(store, step, count, rules=rules)
    commit(store, taken)
    return taken


@pytest.fixture
def reusing(fresh_store):
    """A store whose groups may be used three times."""
    yield open_run(fresh_store, max_uses=3, keeps_finished=True)
    audit(fresh_store.counts())
    assert fresh_store.audit().is_sound


def test_how_often_a_group_may_be_used_stays_as_the_run_was_opened_with(fresh_store):
    once = '{"buffer": {"reuse": {"max_uses": 1}}}'
    open_run(fresh_store, config_json=once, max_uses=1)
    with pytest.raises(RunConflictError, match=r"buffer\.reuse\.max_uses must stay 1 .* got 3"):
        open_run(fresh_store, config_json=once.replace("1", "3"), max_uses=3)
    make_ready(fresh_store, 1)
    commit(fresh_store, claim(fresh_store, 1, 1))
    assert (fresh_store.counts().used, fresh_store.counts().reusable) == (1, 0)


TWICE = SamplingRules(reuse=ReuseConfig(max_uses=3, fresh_fraction=0.5))


# --- samplers --------------------------------------------------------------------------------------------------------
def test_freshest_takes_the_group_whose_oldest_token_is_newest(store):
    store.announce_version(3)
    for each, version in zip(lease(store, 3), (1, 3, 2), strict=True):
        fill_with(store, each, version=version)
    assert claim(store, 1, 2, rules=SamplingRules(FreshestConfig())).group_ids == ["1", "2"]


def test_prioritized_draws_by_the_spread_of_rewards_and_tells_the_weights(store):
    for each, spread in zip(lease(store, 4), (0.0, 4.0, 4.0, 4.0), strict=True):
        fill_with(store, each, rewards=(0.0, spread))
    taken = claim(store, 1, 2, rules=SamplingRules(PrioritizedConfig(exponent=4)))
    assert "0" not in taken.group_ids
    assert len(taken.weights) == 2
    assert taken.reused == []


# --- reuse -----------------------------------------------------------------------------------------------------------
def test_a_used_group_is_drawn_again_until_it_has_had_its_uses(reusing):
    make_ready(reusing, 2)
    for step in (1, 2, 3):
        assert sorted(take_step(reusing, step, 2, TWICE).group_ids) == ["0", "1"]
    assert (reusing.counts().used, reusing.counts().reusable) == (2, 0)
    assert ask(reusing, TWICE, step=4, version=3, count=1) == NotReady("0 of 1 groups are ready", ready_needed=1)
    assert checkpoint(reusing, 3) == 2
    assert [group.steps for group in reusing.finished(limit=9)] == [[1, 2, 3], [1, 2, 3]]


def test_a_claim_tells_which_groups_were_used_before(reusing):
    make_ready(reusing, 2)
    take_step(reusing, 1, 2, TWICE)
    (third,) = make_ready(reusing, 1)
    taken = claim(reusing, 2, 2, rules=TWICE)
    assert taken.group_ids[0] == third
    assert taken.reused == [False, True]


def test_a_checkpoint_keeps_what_may_be_used_again_until_the_run_ends(reusing):
    make_ready(reusing, 2)
    take_step(reusing, 1, 2, TWICE)
    assert checkpoint(reusing, 1) == 0
    assert reusing.counts().reusable == 2
    reusing.set_phase("finishing")
    assert checkpoint(reusing, 1) == 2
    assert reusing.counts().outcomes == {"retired": 2}


def test_going_back_gives_back_exactly_the_uses_after_the_checkpoint(reusing):
    make_ready(reusing, 2)
    take_step(reusing, 1, 1, SamplingRules())
    checkpoint(reusing, 1)
    take_step(reusing, 2, 2, TWICE)
    take_step(reusing, 3, 2, TWICE)
    assert (reusing.counts().used, reusing.counts().reusable) == (2, 1)
    assert reusing.roll_back(to_step=1, to_version=1) == 2
    counts = reusing.counts()
    assert (counts.ready, counts.used, counts.reusable, counts.trained) == (1, 1, 1, GROUP_SIZE)
    assert reusing.audit().is_sound


def test_a_used_group_that_is_refused_later_is_only_let_go(reusing):
    make_ready(reusing, 1)
    take_step(reusing, 1, 1, TWICE)
    again = claim(reusing, 2, 1, rules=TWICE)
    assert reusing.reject(again, group_ids=["0"], reason="unfit") == 1
    assert (reusing.counts().used, reusing.counts().reusable) == (1, 0)
    assert checkpoint(reusing, 1) == 1


def test_a_used_group_that_ends_every_claim_is_only_let_go(reusing, clock):
    make_ready(reusing, 1)
    take_step(reusing, 1, 1, TWICE)
    for _ in range(3):
        claim(reusing, 2, 1, rules=TWICE, lease_s=1)
        clock.now += 2
        reusing.reap()
    assert (reusing.counts().used, reusing.counts().reusable) == (1, 0)
    assert reusing.counts().outcomes == {}


def test_only_the_first_use_makes_room_for_new_prompts(reusing):
    make_ready(reusing, 2)
    for step in (1, 2):
        take_step(reusing, step, 2, TWICE)
        reusing.commit_version(step)
    assert reusing.run_state().consumed == 2
    reusing.roll_back(to_step=0, to_version=0)
    assert reusing.run_state().consumed == 0


def test_what_was_consumed_counts_from_the_version_it_is_in(store):
    make_ready(store, 3)
    for step in (1, 2):
        commit(store, claim(store, step, 1))
    assert store.run_state().consumed == 0
    store.record_version(VersionEntry(1, 1, "sum"))
    store.commit_version(1)
    assert store.run_state().consumed == 1, "step 2 is not in version 1"


# --- over age --------------------------------------------------------------------------------------------------------
def test_dropped_groups_expire_and_give_their_admission_back(store):
    make_ready(store, 3)
    found = ask(store, on_stale("drop"), step=1, version=2, count=2)
    assert found == NotReady("0 of 2 groups are ready", ready_needed=2)
    counts = store.counts()
    assert (counts.admitted, counts.reasons) == (0, {"expired: on_stale": 3})
    assert counts.waste_fraction == 1.0
    assert store.audit().expired == 3 * GROUP_SIZE


# --- groups short of members -----------------------------------------------------------------------------------------
def half_a_group(store: AnyStore) -> Lease:
    (each,) = lease(store, 1)
    store.insert([answer(each, 0)])
    return each


def test_a_short_group_waits_by_default(store, clock):
    half_a_group(store)
    clock.now += 30
    assert store.reap() == store.reap(group_deadline=RefillConfig()) == []


def test_a_short_group_is_trained_on_when_the_deadline_says_so(store, clock):
    each = half_a_group(store)
    deadline = TrainShortConfig(10.0, min_members=1)
    clock.now += 9
    assert store.reap(group_deadline=deadline) == []
    clock.now += 1
    (line,) = store.reap(group_deadline=deadline)
    assert line == "group 0 has 1 of 2 members after 10 s: it is trained on as it is"
    assert store.counts().leased == 0
    (late,) = store.insert([answer(each, 1)])
    assert late.outcome == "superseded"
    taken = claim(store, 1, 1)
    assert len(store.fetch(taken.group_ids)[0]) == 1
    commit(store, taken)
    assert checkpoint(store, 1) == 1
    assert store.audit().is_sound


def test_too_few_members_wait_on(store, clock):
    half_a_group(store)
    clock.now += 30
    assert store.reap(group_deadline=TrainShortConfig(10.0, min_members=2)) == []


def test_a_short_group_is_dropped_when_the_deadline_says_so(store, clock):
    each = half_a_group(store)
    clock.now += 10
    (line,) = store.reap(group_deadline=DropShortConfig(10.0))
    assert line == "group 0 has 1 of 2 members after 10 s: it expires"
    assert store.counts().reasons == {"expired: group_deadline": 1}
    assert store.counts().admitted == 0
    assert store.insert([answer(each, 1)])[0].outcome == "superseded"


# --- what is counted -------------------------------------------------------------------------------------------------
def test_lag_is_split_into_flight_publishing_and_waiting(store):
    store.commit_version(2)
    store.announce_version(3)
    (each,) = lease(store, 1)
    fill_with(store, each, version=1)
    taken = ask(store, SamplingRules(), step=1, version=7, count=1)
    assert isinstance(taken, Claim)
    assert taken.lag == LagSplit(in_flight=1.0, publish=1.0, queue=4.0)


def test_length_bias_compares_what_was_trained_on_with_what_arrived(store):
    short, long = lease(store, 2)
    store.insert([answer(short, index) for index in (0, 1)])
    longer = {"token_ids": list(range(18)), "model_mask": [False] * 6 + [True] * 12}
    store.insert([answer(long, index, **longer) for index in (0, 1)])
    assert store.counts().length_bias == 1.0
    commit(store, claim(store, 1, 1))
    assert store.counts().length_bias == pytest.approx(6 / 9)
    commit(store, claim(store, 2, 1))
    assert store.counts().length_bias == 1.0


def test_what_is_never_trained_on_is_waste(store):
    make_ready(store, 4)
    taken = claim(store, 1, 2)
    store.reject(taken, group_ids=[taken.group_ids[0]], reason="unfit")
    assert store.counts().waste_fraction == 0.25


def test_stored_bytes_are_those_of_the_payloads_that_are_there(fresh_store):
    store = open_run(fresh_store, keeps_finished=True)
    make_ready(store, 2)
    size = sum(len(payload) for group in store.fetch(["0", "1"]) for payload in group)
    assert store.counts().payload_bytes == size
    commit(store, claim(store, 1, 2))
    checkpoint(store, 1)
    assert store.counts().payload_bytes == size, "until the archive has them"
    store.forget(["0", "1"])
    assert store.counts().payload_bytes == 0
    assert store.counts().outstanding == 0


def test_a_step_that_was_committed_is_not_claimed_again_whatever_the_rules(reusing):
    make_ready(reusing, 1)
    take_step(reusing, 1, 1, TWICE)
    with pytest.raises(StaleFenceError, match="got step 1"):
        claim(reusing, 1, 1, rules=TWICE)
