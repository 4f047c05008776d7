"""Every store: trajectories written by guests, and the quarantine of a guest."""

import pytest

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.records import Claim, Insertion, Lease
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.buffer import ReuseConfig
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
