import pytest

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import Claim, Insertion, LagSplit, Lease, VersionEntry
from slipstream.buffer.sampling import NotReady, SamplingRules
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.buffer import (
    DropShortConfig,
    FreshestConfig,
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

TWICE = SamplingRules(reuse=ReuseConfig(max_uses=3, fresh_fraction=0.5))


def fill_with(store: AnyStore, each: Lease, *, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    fields = [{"version_spans": [VersionSpan(6, version)], "reward": Reward(total=reward)} for reward in rewards]
    store.insert([answer(each, index, **fields[index]) for index in each.indices])


def take_step(store: AnyStore, step: int, count: int, rules: SamplingRules = TWICE) -> Claim:
    taken = claim(store, step, count, rules=rules)
    commit(store, taken)
    return taken


@pytest.fixture
def reusing(fresh_store):
    yield open_run(fresh_store, max_uses=3, keeps_finished=True)
    audit(fresh_store.counts())
    assert fresh_store.audit().is_sound


def test_freshest_takes_the_group_with_the_newest_oldest_token(store):
    store.announce_version(3)
    for each, version in zip(lease(store, 3), (1, 3, 2), strict=True):
        fill_with(store, each, version=version)
    assert claim(store, 1, 2, rules=SamplingRules(FreshestConfig())).group_ids == ["1", "2"]


def test_a_used_group_is_claimed_again_until_it_has_had_its_uses(reusing):
    make_ready(reusing, 1)
    assert take_step(reusing, 1, 1).reused == []
    make_ready(reusing, 1)
    second = take_step(reusing, 2, 2)
    assert (second.group_ids, second.reused) == (["1", "0"], [False, True]), "fresh ones first"
    assert sorted(take_step(reusing, 3, 2).group_ids) == ["0", "1"]
    assert take_step(reusing, 4, 1).group_ids == ["1"]
    assert (reusing.counts().used, reusing.counts().reusable) == (2, 0)
    refusal = reusing.claim(step=5, version=4, num_groups=1, rules=TWICE, lease_s=60)
    assert refusal == NotReady("0 of 1 groups are ready", ready_needed=1)
    with pytest.raises(StaleFenceError, match="got step 4"):
        claim(reusing, 4, 1, rules=TWICE)
    assert checkpoint(reusing, 4) == 2
    assert [group.steps for group in reusing.finished(limit=9)] == [[1, 2, 3], [2, 3, 4]]


def test_a_roll_back_undoes_exactly_the_uses_after_the_checkpoint(reusing):
    make_ready(reusing, 2)
    take_step(reusing, 1, 1, SamplingRules())
    checkpoint(reusing, 1)
    assert reusing.roll_back(to_step=1, to_version=1)[0] == 0, "the reusable group of step 1 stays used"
    take_step(reusing, 2, 2)
    take_step(reusing, 3, 2)
    assert (reusing.counts().used, reusing.counts().reusable) == (2, 1)
    assert reusing.roll_back(to_step=1, to_version=1)[0] == 2
    counts = reusing.counts()
    assert (counts.ready, counts.used, counts.reusable, counts.trained) == (1, 1, 1, GROUP_SIZE)
    limited = SamplingRules(reuse=ReuseConfig(max_uses=3, fresh_fraction=0.5, samples_per_insert=1.5))
    take_step(reusing, 2, 2, limited)
    reusing.set_phase("finishing")
    checkpoint(reusing, 2)
    assert [group.steps for group in reusing.finished(limit=9)] == [[2], [1, 2]]


@pytest.mark.parametrize("ending", ["rejected", "lapsed"])
def test_a_used_group_that_fails_later_is_only_released(reusing, clock, ending):
    make_ready(reusing, 1)
    take_step(reusing, 1, 1)
    if ending == "rejected":
        assert reusing.reject(claim(reusing, 2, 1, rules=TWICE), group_ids=["0"], reason="unfit") == 1
    for _ in range(3 if ending == "lapsed" else 0):
        claim(reusing, 2, 1, rules=TWICE, lease_s=1)
        clock.now += 2
        reusing.reap()
    counts = reusing.counts()
    assert (counts.used, counts.reusable, counts.outcomes) == (1, 0, {})
    assert checkpoint(reusing, 1) == 1


def test_only_the_first_use_makes_room_for_new_prompts_from_the_version_it_is_in(reusing):
    make_ready(reusing, 2)
    for step in (1, 2):
        take_step(reusing, step, 2)
        reusing.commit_version(step)
    assert reusing.run_state().consumed == 2
    reusing.roll_back(to_step=0, to_version=0)
    assert reusing.run_state().consumed == 0
    for step in (1, 2):
        commit(reusing, claim(reusing, step, 1))
    assert reusing.run_state().consumed == 0
    reusing.record_version(VersionEntry(1, 1, "sum"))
    reusing.commit_version(1)
    assert reusing.run_state().consumed == 1, "step 2 is not in version 1"


def test_stale_groups_expire_under_drop_and_give_their_admission_back(store):
    make_ready(store, 3)
    rules = SamplingRules(staleness=StalenessConfig(max_lag=1, on_stale="drop"))
    found = store.claim(step=1, version=2, num_groups=2, rules=rules, lease_s=60)
    assert found == NotReady("0 of 2 groups are ready", ready_needed=2)
    counts = store.counts()
    assert (counts.admitted, counts.reasons) == (0, {"expired: on_stale": 3})
    assert counts.waste_fraction == 1.0
    assert store.audit().expired == 3 * GROUP_SIZE


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_short_group_is_trained_on_or_expires_as_the_deadline_says(store, clock, is_trained):
    (each,) = lease(store)
    store.insert([answer(each, 0)])
    clock.now += 10
    for early in (None, RefillConfig(), TrainShortConfig(11.0, min_members=1), TrainShortConfig(5.0, min_members=2)):
        assert store.reap(group_deadline=early) == []
    (line,) = store.reap(group_deadline=TrainShortConfig(10.0, min_members=1) if is_trained else DropShortConfig(10.0))
    fate = "is trained on as it is" if is_trained else "expires"
    assert line == f"group 0 has 1 of 2 members after 10 s: it {fate}"
    counts = store.counts()
    assert (counts.leased, counts.ready, counts.admitted) == (0, is_trained, is_trained)
    assert counts.reasons == ({} if is_trained else {"expired: group_deadline": 1})
    assert store.insert([answer(each, 1)])[0].outcome == "superseded"
    if is_trained:
        taken = take_step(store, 1, 1, SamplingRules())
        assert len(store.fetch(taken.group_ids)[0]) == 1
        assert checkpoint(store, 1) == 1
    assert store.audit().is_sound


def test_lag_is_split_into_flight_publishing_and_queue(store):
    store.commit_version(2)
    store.announce_version(3)
    (each,) = lease(store)
    fill_with(store, each, version=1)
    taken = store.claim(step=1, version=7, num_groups=1, rules=SamplingRules(), lease_s=60)
    assert taken.lag == LagSplit(in_flight=1.0, publish=1.0, queue=4.0)


def test_length_bias_compares_trained_with_accepted_lengths(store):
    short, long = lease(store, 2)
    longer = {"token_ids": list(range(18)), "model_mask": [False] * 6 + [True] * 12}
    store.insert([answer(short, index) for index in (0, 1)] + [answer(long, index, **longer) for index in (0, 1)])
    biases = [store.counts().length_bias]
    for step in (1, 2):
        commit(store, claim(store, step, 1))
        biases.append(store.counts().length_bias)
    assert biases == pytest.approx([1.0, 6 / 9, 1.0])


REFUSED = Insertion(outcome="refused", reason="guest_quarantined")
REUSE = SamplingRules(reuse=ReuseConfig(max_uses=2, fresh_fraction=0.5))


def fill(store: AnyStore, each: Lease, *, guest: str) -> str:
    store.insert([answer(each, index) for index in each.indices], guest=guest)
    return each.group_id


def assert_reconciled(store: AnyStore) -> None:
    audit(store.counts())
    assert store.audit().is_sound, store.audit()


def test_quarantining_a_guest_ends_only_its_ready_and_open_groups_and_only_once(store):
    first, second, third = lease(store, 3)
    ready, honest = fill(store, first, guest="mallory"), fill(store, second, guest="alice")
    store.insert([answer(third, 0)], guest="mallory")
    assert store.quarantine_guest("mallory", reason="lies") == 2
    assert store.quarantine_guest("mallory", reason="again") == 0
    assert store.quarantined_guests() == {"mallory": "lies"}
    counts = store.counts()
    assert (counts.ready, counts.open, counts.leased) == (1, 0, 0)
    assert counts.reasons == {"quarantined: guest: mallory": 2}
    assert claim(store, 1, 1).group_ids == [honest] != [ready]
    assert_reconciled(store)


def test_one_member_of_a_quarantined_guest_ends_a_group_and_later_members_are_superseded_or_refused(store):
    (first,) = lease(store)
    store.insert([answer(first, 0)], guest="mallory")
    store.return_leases_of(owner="generator-0", reason="gone")
    (again,) = lease(store)
    assert again.indices == [1]
    assert store.quarantine_guest("mallory", reason="lies") == 1
    assert store.insert([answer(again, 1)]) == [Insertion(outcome="superseded")]
    assert store.counts().leased == store.counts().returned == 0
    assert_reconciled(store)
    # Nothing more of the guest is stored, and the lease can be returned.
    (each,) = lease(store)
    assert store.insert([answer(each, 0)], guest="mallory") == [REFUSED]
    assert store.counts().accepted == 1
    assert store.return_leases(lease_ids=[each.id], reason="refused") == 1
    (again,) = lease(store)
    assert fill(store, again, guest="alice") == each.group_id
    assert store.counts().ready == 1


def test_groups_in_a_claim_end_when_it_is_taken_back(store):
    first, second = lease(store, 2)
    fill(store, first, guest="mallory")
    honest = fill(store, second, guest="")
    held = claim(store, 1, 2)
    assert store.quarantine_guest("mallory", reason="lies") == 0
    assert claim(store, 1, 1).group_ids == [honest]
    with pytest.raises(StaleFenceError):
        commit(store, held)
    assert store.counts().reasons == {"quarantined: guest: mallory": 1}
    assert_reconciled(store)


def test_a_step_that_is_under_way_ends_and_its_groups_are_neither_reused_nor_ready_after_a_rollback(fresh_store):
    store = open_run(fresh_store, max_uses=2)
    first, second = lease(store, 2)
    fill(store, first, guest="mallory")
    honest = fill(store, second, guest="")
    held = claim(store, 1, 2, rules=REUSE)
    store.quarantine_guest("mallory", reason="lies")
    commit(store, held)
    assert (store.counts().used, store.counts().reusable) == (2, 1)
    assert_reconciled(store)
    assert store.roll_back(to_step=0, to_version=0)[0] == 1
    assert claim(store, 1, 1).group_ids == [honest]
    assert store.counts().reasons == {"quarantined: guest: mallory": 1}
    assert_reconciled(store)


def test_used_groups_are_not_sampled_again_and_retire_with_the_next_checkpoint(fresh_store):
    store = open_run(fresh_store, max_uses=2)
    fill(store, *lease(store), guest="mallory")
    commit(store, claim(store, 1, 1, rules=REUSE))
    assert store.counts().reusable == 1
    assert store.quarantine_guest("mallory", reason="lies") == 0
    assert store.counts().reusable == 0
    assert checkpoint(store, 1) == 1
    assert store.counts().outcomes == {"retired": 1}
    assert_reconciled(store)


def test_a_quarantined_group_returns_its_admission_and_is_archived_with_its_reason(fresh_store):
    store = open_run(fresh_store, keeps_finished=True)
    fill(store, *lease(store), guest="mallory")
    store.quarantine_guest("mallory", reason="lies")
    assert store.run_state().admitted == 0
    (over,) = store.finished(limit=9)
    assert (over.state, over.reason, len(over.payloads)) == ("quarantined", "guest: mallory", GROUP_SIZE)
    make_ready(store, 1)
    assert isinstance(store.claim(step=1, version=0, num_groups=1, rules=REUSE, lease_s=60.0), Claim)
