import threading

import pytest

from slipstream.buffer.errors import RunConflictError, StaleFenceError
from slipstream.buffer.records import CheckpointPointer, Insertion, Lease
from slipstream.buffer.sampling import FileShare, NotReady, row_of
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.buffer import DropShortConfig
from tests.builders import make_packed
from tests.contract.stores import (
    GROUP_SIZE,
    MAX_ATTEMPTS,
    NUM_ROWS,
    OLDEST_FIRST,
    SEED,
    answer,
    check_state,
    checkpoint,
    claim,
    commit,
    entry_of,
    fill,
    lease,
    make_ready,
    make_redis_store,
    open_run,
    renew,
)

INSERTED = Insertion(outcome="inserted")
READY = Insertion(outcome="inserted", group_is_ready=True)
DUPLICATE = Insertion(outcome="duplicate")
SUPERSEDED = Insertion(outcome="superseded")


def refused(reason: str) -> Insertion:
    return Insertion(outcome="refused", reason=reason)


def test_operations_on_a_run_that_was_not_opened_are_refused(fresh_store):
    asking = [fresh_store.run_state, fresh_store.run_config_json, fresh_store.counts, fresh_store.reap]
    changing = [lambda: lease(fresh_store), lambda: fresh_store.insert([make_packed("0", 0)])]
    for operation in [*asking, *changing, lambda: fresh_store.record_event("learner", "evicted")]:
        with pytest.raises(RunConflictError, match="must be opened"):
            operation()
    assert fresh_store.events(limit=9) == []


def test_a_run_starts_at_zero_is_found_again_where_it_stands_and_its_versions_only_grow(fresh_store):
    state = open_run(fresh_store).run_state()
    assert (state.phase, state.step, state.version, state.announced_version) == ("starting", 0, 0, 0)
    assert state.target_lag is None
    fresh_store.set_phase("training", detail="first batch")
    fresh_store.set_target_lag(1.25)
    fresh_store.commit_version(4)
    store = open_run(fresh_store)
    state = store.run_state()
    assert (state.phase, state.detail, state.version, state.announced_version) == ("training", "first batch", 4, 4)
    assert state.target_lag == 1.25
    for announced in (7, 2):
        store.announce_version(announced)
    for committed in (5, 1):
        store.commit_version(committed)
    assert (store.run_state().version, store.run_state().announced_version) == (5, 7)


def test_only_settings_of_the_end_of_a_run_may_change_and_its_name_is_known(fresh_store):
    opened = '{"learner": {"prompts_per_step": 8, "max_steps": 10}, "resume": false}'
    open_run(fresh_store, config_json=opened)
    other = {"config_json": opened.replace("8", "16")}
    for changes, key in ((other, r"learner\.prompts_per_step"), ({"num_rows": 8}, "num_rows")):
        with pytest.raises(RunConflictError, match=f"{key} must stay"):
            open_run(fresh_store, **{"config_json": opened} | changes)
    longer = opened.replace("10", "20").replace("false", "true")
    open_run(fresh_store, config_json=longer)
    assert fresh_store.run_config_json() == longer
    with pytest.raises(RunConflictError, match="somebody-else"):
        fresh_store.open_run("somebody-else", config_json="{}", num_rows=NUM_ROWS, seed=SEED)


def test_leases_follow_the_seeded_permutation_of_rows_up_to_the_limit(store):
    most = 2 * NUM_ROWS
    leases = lease(store, most)
    assert [each.ordinal for each in leases] == list(range(most))
    assert [each.row for each in leases] == [row_of(n, num_rows=NUM_ROWS, seed=SEED) for n in range(most)]
    assert sorted(each.row for each in leases[:NUM_ROWS]) == list(range(NUM_ROWS))
    assert leases[3] == Lease(
        id="3-0", group_id="3", purpose="train", row=leases[3].row, ordinal=3, attempt=0, indices=[0, 1]
    )
    asked = {"owner": "g", "max_groups": 10, "group_size": GROUP_SIZE, "lease_s": 60.0}
    assert len(store.lease(admission_limit=most + 3, **asked)) == 3
    assert store.lease(admission_limit=most + 3, **asked) == lease(store, 0) == lease(store, -1) == []
    assert [each.ordinal for each in store.lease(admission_limit=most + 4, **asked)] == [most + 3]
    assert store.counts().admitted == most + 4


def test_leases_follow_the_mixture_of_files_across_a_restart(fresh_store):
    files = [FileShare(3, 0.25), FileShare(NUM_ROWS, 0.75)]
    store = open_run(fresh_store, num_rows=files)
    rows = [each.row for each in lease(store, 5)]
    open_run(store, num_rows=files)
    rows += [each.row for each in lease(store, 11)]
    assert rows == [row_of(n, num_rows=files, seed=SEED) for n in range(16)]
    assert sum(row < 3 for row in rows) == 4
    with pytest.raises(RunConflictError, match="num_rows must stay"):
        open_run(store, num_rows=[FileShare(3, 0.5), FileShare(NUM_ROWS, 0.75)])


def test_a_returned_prompt_is_leased_again_before_new_ones(store):
    first, second = lease(store, 2)
    store.insert([answer(second, 0)])
    assert store.return_leases(lease_ids=[second.id, first.id, "99-0", "nonsense", second.id], reason="drain") == 2
    again = lease(store, 3, owner="generator-1")
    assert [(each.id, each.ordinal, each.attempt) for each in again] == [("0-1", 0, 1), ("1-1", 1, 1), ("2-0", 2, 0)]
    assert again[1].indices == [1], "it keeps the members it has"
    assert store.counts().admitted == 3
    assert store.return_leases(lease_ids=[first.id], reason="drain") == 0, "an earlier lease"
    assert store.counts().leased == 3
    assert store.insert([answer(again[1], 1)]) == [READY]


def test_an_owner_returns_only_its_own_leases(store):
    held, *_ = lease(store, 3, owner="a")
    lease(store, 2, owner="b")
    assert store.return_leases(lease_ids=[held.id], reason="drain", owner="stranger") == 0
    assert store.return_leases(lease_ids=[held.id], reason="drain", owner="a") == 1
    assert store.return_leases_of(owner="a", reason="gone") == 2
    assert store.return_leases_of(owner="a", reason="gone") == 0
    assert (store.counts().leased, store.counts().returned) == (2, 3)


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_leases_claims_and_open_groups_keep_their_time_when_the_clock_is_set(store, clock, jump_s):
    late = DropShortConfig(after_s=30.0)
    make_ready(store, 1)
    claim(store, 1, 1, lease_s=120)
    (short, _) = lease(store, 2, lease_s=30)
    store.insert([answer(short, 0)])
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0])
    lease(store, 1, lease_s=30)
    clock.now += jump_s
    store.follow_clock(jump_s=max(jump_s, 0.0), lease_s=30, claim_lease_s=120)
    clock.now += 29
    # No-op without a jump.
    store.follow_clock(jump_s=0.0, lease_s=30, claim_lease_s=120)
    assert store.reap(group_deadline=late) == []
    clock.now += 2
    assert len(store.reap(group_deadline=late)) == 4, "three leases, and a group that expires"
    assert (store.counts().outcomes, store.counts().claimed) == ({"expired": 1}, 1)
    clock.now += 90
    assert store.reap() == ["claim of step 1 lapsed: 1 groups are ready again"]


def test_a_prompt_that_lapses_too_often_is_quarantined_with_its_members(store, clock):
    for attempt in range(MAX_ATTEMPTS):
        (each,) = lease(store, lease_s=1)
        assert each.id == f"0-{attempt}"
        store.insert([answer(each, 0)])
        clock.now += 2
        events = store.reap()
    assert events == [f"lease 0-{MAX_ATTEMPTS - 1} of generator-0 lapsed: group put into quarantine (lease_attempts)"]
    counts = store.counts()
    assert (counts.outcomes, counts.outcome_members) == ({"quarantined": 1}, {"quarantined": 1})
    assert (counts.open, counts.returned) == (0, 0)
    assert counts.admitted == 0, "its admission is returned"
    assert store.insert([answer(each, 1)]) == [SUPERSEDED]
    assert lease(store)[0].ordinal == 1


def test_training_prompts_are_leased_only_before_the_finish(store):
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0, 1, 2])
    store.set_phase("finishing")
    assert [each.group_id for each in lease(store, 1)] == ["e:0", "e:1"]
    for phase in ("failed", "finished"):
        store.set_phase(phase)
        assert lease(store, 2) == []
    store.set_phase("training")
    assert [each.group_id for each in lease(store, 2)] == ["e:2", "0"]


def test_a_repeat_is_acknowledged_other_content_a_conflict_and_an_answer_for_a_taken_index_superseded(store, clock):
    (first,) = lease(store, lease_s=1)
    clock.now += 2
    store.reap()
    (second,) = lease(store)
    assert store.insert([answer(second, 0)]) == [INSERTED]
    assert store.insert([answer(second, 0), answer(second, 0)]) == [DUPLICATE, DUPLICATE]
    assert store.insert([answer(second, 0, reward=Reward(total=0.75))]) == [refused("content_conflict")]
    assert (store.counts().duplicates, store.counts().accepted) == (2, 1)
    assert store.counts().refused == {}, "counted when it goes to quarantine"
    assert store.insert([answer(first, 0), answer(first, 1)]) == [SUPERSEDED, READY]
    assert store.insert([answer(second, 1)]) == [SUPERSEDED]
    assert store.counts().superseded == 2
    assert (store.counts().leased, store.counts().ready) == (0, 1), "the new lease has ended"
    assert renew(store, [second.id], lease_s=1) == 0


def test_a_late_answer_completes_its_group(store, clock):
    (first,) = lease(store, owner="slow", lease_s=1)
    clock.now += 2
    store.reap()
    assert store.counts().returned == 1
    fill(store, first)
    assert (store.counts().leased, store.counts().returned, store.counts().ready) == (0, 0, 1)
    assert lease(store)[0].ordinal == 1


def test_an_answer_of_no_lease_or_that_does_not_fit_it_is_refused(store):
    (each,) = lease(store)
    never_leased = ["1", "007x", "-1", "99999999999999999999", "e:0", ""]
    assert store.insert([make_packed(group_id, 0) for group_id in never_leased]) == [refused("unknown_group")] * 6
    assert store.insert([make_packed("0", 0, group_size=3)]) == [refused("group_size")]
    assert store.insert([make_packed("0", 2, group_size=2)]) == [refused("group_size")]
    assert store.insert([make_packed("0", 0, attempt=1)]) == [refused("unknown_lease")]
    future = answer(each, 0, version_spans=[VersionSpan(6, 0), VersionSpan(9, 1)])
    assert store.insert([future]) == [refused("future_version")]
    store.announce_version(1)
    assert store.insert([future]) == [INSERTED]
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0])
    lease(store)
    stray = make_packed("e:0", 0, purpose="greedy", group_size=1, attempt=1)
    assert store.insert([stray]) == [refused("unknown_lease")]
    others = [("nobody:0", "greedy"), ("e:1", "greedy"), ("e:0", "sampled"), ("0", "greedy"), ("e:0", "train")]
    strays = [make_packed(group_id, 0, purpose=purpose, group_size=1) for group_id, purpose in others]
    assert store.insert(strays) == [refused("unknown_group")] * 5
    assert store.evaluation("nobody") is None
    store.open_evaluation("of nothing", purpose="greedy", version=0, rows=[])
    assert store.evaluation("of nothing").is_complete


def test_of_many_trajectories_each_has_its_own_outcome_in_order_and_is_fetched_by_its_index(store):
    leases = lease(store, 150)
    first, second, *others = whole = [answer(each, index) for each in leases for index in range(GROUP_SIZE)]
    insertions = store.insert([second, first, *others, make_packed("150", 0), whole[0]])
    assert insertions == [INSERTED, READY] * 150 + [refused("unknown_group"), DUPLICATE]
    counts = store.counts()
    assert (counts.ready, counts.open, counts.leased, counts.accepted) == (150, 0, 0, 300)
    groups = store.fetch([each.group_id for each in leases])
    assert [payload for group in groups for payload in group] == [payload for _, payload in whole]
    with pytest.raises(StaleFenceError, match="group 777"):
        store.fetch(["0", "777"])


def test_answers_for_a_group_past_ready_do_not_change_it(store):
    (group_id,) = make_ready(store, 1)
    late = make_packed(group_id, 0, attempt=1)
    taken = claim(store, 1, 1)
    assert store.insert([late]) == [SUPERSEDED]
    commit(store, taken)
    assert store.insert([late]) == [SUPERSEDED]
    assert (checkpoint(store, 1), checkpoint(store, 1)) == (1, 0)
    with pytest.raises(StaleFenceError):
        store.fetch([group_id])
    assert store.insert([make_packed(group_id, 0), late]) == [SUPERSEDED, SUPERSEDED], "a very late repeat"
    counts = store.counts()
    assert (counts.open, counts.unarchived, counts.outcomes) == (0, 0, {"retired": 1})
    assert store.finished(limit=9) == [], "without an archive it is deleted"
    assert counts.accepted == GROUP_SIZE


def test_rejected_frames_are_kept_short_few_and_counted(store):
    for number in range(260):
        store.quarantine("malformed", bytes([number % 256]) * 5000)
    frames = store.quarantined_frames()
    assert len(frames) == 256
    assert frames[0] == ("malformed", bytes([259 % 256]) * 4096)
    assert store.counts().refused == {"malformed": 260}


def test_fifo_claims_the_groups_that_were_ready_first_all_or_none_and_asking_again_takes_a_claim_back(store):
    for each in reversed(lease(store, 3)):
        fill(store, each)
    found = store.claim(step=1, version=0, num_groups=4, rules=OLDEST_FIRST, lease_s=60)
    assert found == NotReady("3 of 4 groups are ready", ready_needed=4)
    assert store.counts().ready == 3
    lost = claim(store, 1, 2)
    assert lost.group_ids == ["2", "1"]
    assert claim(store, 2, 1).group_ids == ["0"], "two steps may be claimed at once"
    again = claim(store, 1, 2)
    assert again.group_ids == lost.group_ids
    assert again.fence > lost.fence
    with pytest.raises(StaleFenceError):
        commit(store, lost)
    assert store.counts().claimed == 3


def test_a_lapsed_claim_is_fenced_off_and_its_groups_come_back_in_order(store, clock):
    make_ready(store, 3)
    old = claim(store, 1, 2, lease_s=10)
    clock.now += 9
    store.renew_claim(old, lease_s=10)
    clock.now += 9
    assert store.reap() == [], "renewed"
    clock.now += 1
    assert store.reap() == ["claim of step 1 lapsed: 2 groups are ready again"]
    assert store.wait_ready(num_groups=3, timeout_s=0)
    for act in (lambda each: commit(store, each), lambda each: store.renew_claim(each, lease_s=1)):
        with pytest.raises(StaleFenceError, match="step 1 with fence 1"):
            act(old)
    new = claim(store, 1, 3)
    assert (new.group_ids, new.fence) == (["0", "1", "2"], 2)
    with pytest.raises(StaleFenceError):
        commit(store, old)
    commit(store, new)


@pytest.mark.parametrize("ending", ["lapse", "roll back"])
def test_a_group_that_crashes_every_learner_is_quarantined(store, clock, ending):
    make_ready(store, 2)
    for _ in range(MAX_ATTEMPTS):
        claim(store, 1, 1, lease_s=1)
        clock.now += 2
        events = store.reap() if ending == "lapse" else store.roll_back(to_step=0, to_version=0)
    if ending == "lapse":
        assert events == ["claim of step 1 lapsed: 0 groups are ready again, put into quarantine (claim_attempts): 0"]
    counts = store.counts()
    assert counts.reasons == {"quarantined: claim_attempts": 1}
    assert (counts.outcome_members, counts.ready, counts.admitted) == ({"quarantined": GROUP_SIZE}, 1, 1)
    assert claim(store, 1, 1).group_ids == ["1"]


def test_a_rejected_group_leaves_the_claim_and_returns_its_admission(store):
    first, second, third = make_ready(store, 3)
    taken = claim(store, 1, 2)
    assert store.reject(taken, group_ids=[first, first, third], reason="unfit") == 1
    counts = store.counts()
    assert (counts.claimed, counts.ready, counts.admitted) == (1, 1, 2)
    assert (counts.reasons, counts.waste_fraction) == ({"rejected: unfit": 1}, 1 / 3)
    again = claim(store, 1, 2)
    assert again.group_ids == [second, third]
    with pytest.raises(StaleFenceError):
        store.reject(taken, group_ids=[second], reason="unfit")
    assert store.audit().rejected == GROUP_SIZE


def test_a_waiter_is_woken_by_the_group_it_waits_for(store):
    first, second = lease(store, 2)
    fill(store, first)
    assert store.wait_ready(num_groups=1, timeout_s=0)
    for timeout_s in (0, 0.03, 0.0009):
        assert not store.wait_ready(num_groups=2, timeout_s=timeout_s), "the deadline holds"
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(store.wait_ready(num_groups=2, timeout_s=20)))
    waiter.start()
    fill(store, second)
    waiter.join(timeout=10)
    assert answers == [True]


def test_a_claim_takes_no_group_if_one_has_moved(clock):
    store = open_run(make_redis_store(clock))
    make_ready(store, 3)
    run, moved = store._run, []

    def run_late(script, *arguments):
        if script == "claim" and not moved:
            moved.append(run("claim", 7, 60_000, "1"))
        return run(script, *arguments)

    store._run = run_late
    assert claim(store, 1, 2).group_ids == ["0", "2"], "the second was taken for another step"
    check_state(store)


def test_a_commit_moves_groups_and_the_runs_step_one_after_the_other(store, clock):
    assert store.run_state().stepped_at is None
    make_ready(store, 3)
    taken, ahead = claim(store, 1, 2), claim(store, 2, 1)
    with pytest.raises(StaleFenceError, match="got step 2 after step 0"):
        commit(store, ahead)
    clock.now += 5
    commit(store, taken)
    clock.now += 5
    counts, state = store.counts(), store.run_state()
    assert (counts.claimed, counts.used, state.step) == (1, 2, 1)
    assert (state.stepped_at, store.now()) == (1005.0, 1010.0)
    commit(store, taken)
    assert store.counts() == counts, "a repeated commit changes nothing"
    commit(store, ahead)
    with pytest.raises(StaleFenceError, match="got step 2, but step 2 is the last one committed"):
        claim(store, 2, 1)


def test_a_rollback_returns_the_groups_after_the_checkpoint(store):
    make_ready(store, 5)
    assert store.run_state().checkpoint is None
    entries = []
    for step in (1, 2, 3):
        taken = claim(store, step, 1)
        commit(store, taken)
        entries.append(entry_of(taken))
    claim(store, 4, 1)
    store.commit_version(3)
    with pytest.raises(StaleFenceError, match=r"got step 4 .* but step 3 is the last one committed"):
        checkpoint(store, 4)
    assert store.run_state().checkpoint is None
    checkpoint(store, 1)
    assert (store.ledger(), store.ledger(first_step=3)) == (entries, entries[2:])
    returned, fence = store.roll_back(to_step=1, to_version=1)
    state = store.run_state()
    assert (returned, fence) == (3, state.fence)
    assert (state.step, state.version, state.announced_version) == (1, 1, 3)
    assert state.checkpoint == CheckpointPointer(1, 1, "step-00000001")
    assert store.ledger() == entries[:1]
    assert store.audit().is_sound
    assert store.roll_back(to_step=1, to_version=1) == (0, fence + 1), "called twice"
    assert claim(store, 2, 4).group_ids == ["1", "2", "3", "4"], "in the order of the first time"


def test_after_a_roll_back_the_learner_of_before_neither_commits_nor_checkpoints(store):
    make_ready(store, 3)
    taken = claim(store, 1, 1)
    commit(store, taken)
    store.roll_back(to_step=0, to_version=0)
    start = CheckpointPointer(0, 0, "step-00000000")
    with pytest.raises(StaleFenceError):
        store.checkpoint(start, fence=taken.fence)
    store.checkpoint(start, fence=store.run_state().fence)
    assert store.run_state().checkpoint == start, "a checkpoint needs no step after a roll back"
    with pytest.raises(StaleFenceError):
        commit(store, taken)
    commit(store, claim(store, 1, 1))
    pointer = CheckpointPointer(1, 1, "step-00000001")
    with pytest.raises(StaleFenceError, match="another learner"):
        store.checkpoint(pointer, fence=taken.fence)
    assert store.run_state().checkpoint == start
    assert store.counts().used == 1, "not retired either"
    assert store.checkpoint(pointer, fence=store.run_state().fence) == 1


def test_evaluation_rows_are_leased_first_and_counted_once(store):
    store.announce_version(4)
    store.open_evaluation("at-4", purpose="sampled", version=4, rows=[9, 5, 9])
    store.open_evaluation("at-4", purpose="sampled", version=4, rows=[1])
    first, second, training = lease(store, 2)
    assert first == Lease(id="at-4:9-0", group_id="at-4:9", purpose="sampled", row=9, ordinal=9, attempt=0, indices=[0])
    assert (second.row, training.purpose) == (5, "train")
    at_4 = {"version_spans": [VersionSpan(6, 4)]}
    right = answer(first, reward=Reward(total=1.0, is_correct=True), **at_4)
    assert store.insert([right, right]) == [INSERTED, DUPLICATE]
    failed = answer(second, reward=Reward(total=0.0, status="timeout"), **at_4)
    assert store.insert([failed, failed]) == [READY, DUPLICATE]
    result = store.evaluation("at-4")
    assert result.is_complete
    assert (result.purpose, result.version, result.num_asked, result.num_answered) == ("sampled", 4, 2, 2)
    assert (result.num_correct, result.num_failed) == (1, 1)
    counts = store.counts()
    assert (counts.accepted, counts.duplicates, counts.leased) == (0, 0, 1), "evaluations do not count as buffered"


def test_each_sample_of_an_evaluation_row_is_a_separate_answer(store, clock):
    store.announce_version(0)
    store.open_evaluation("e", purpose="hard.set-2", version=0, rows=[7, 3], samples=3)
    leases = lease(store, 4)
    assert [(each.row, each.ordinal, each.indices) for each in leases[:6]] == [(7, 7, [0])] * 3 + [(3, 3, [0])] * 3
    assert len({each.id for each in leases}) == 7
    right = Reward(total=1.0, is_correct=True)
    first = [answer(each, reward=right) for each in leases[:2]]
    assert store.insert([*first, *first]) == [Insertion(outcome="inserted")] * 2 + [Insertion(outcome="duplicate")] * 2
    result = store.evaluation("e")
    assert (result.num_asked, result.num_answered, result.num_correct, result.is_complete) == (6, 2, 2, False)
    store.return_leases(lease_ids=[leases[2].id], reason="drain")
    (again,) = lease(store, 1, owner="generator-1")
    assert (again.group_id, again.attempt, again.row) == (leases[2].group_id, 1, 7)
    outcomes = store.insert([answer(each, attempt=each.attempt) for each in (again, *leases[3:6])])
    assert [each.group_is_ready for each in outcomes] == [False, False, False, True]
    assert (store.evaluation("e").accuracy, store.evaluation("e").is_complete) == (2 / 6, True)


def test_an_evaluation_accepts_answers_only_from_its_version(store):
    store.announce_version(3)
    for version in (2, 3):
        store.open_evaluation(f"at-{version}", purpose="greedy", version=version, rows=[0, 1])
    ask = {"group_size": GROUP_SIZE, "lease_s": 60.0, "admission_limit": 0}
    assert store.lease(owner="behind", max_groups=9, version=1, **ask) == []
    leased = store.lease(owner="generator-0", max_groups=9, version=3, **ask)
    assert [each.group_id for each in leased] == ["at-3:0", "at-3:1"]
    early, late, exact = ([VersionSpan(6, first), VersionSpan(9, last)] for first, last in ((2, 3), (3, 2), (3, 3)))
    for spans in (early, late):
        assert store.insert([answer(leased[0], version_spans=spans)]) == [refused("other_version")]
    store.return_leases(lease_ids=[leased[0].id], reason="refused")
    (again,) = store.lease(owner="generator-0", max_groups=9, version=3, **ask)
    sent = [answer(each, attempt=each.attempt, version_spans=exact) for each in (again, leased[1])]
    assert store.insert(sent)[1] == READY
    assert [each.row for each in store.lease(owner="generator-0", max_groups=1, version=2, **ask)] == [0, 1]


def test_a_lapsed_evaluation_row_is_leased_again_without_limit(store, clock):
    store.open_evaluation("e", purpose="greedy", version=0, rows=[3])
    for attempt in range(MAX_ATTEMPTS + 2):
        (each,) = lease(store, lease_s=1)
        assert each.id == f"e:3-{attempt}"
        clock.now += 2
        assert len(store.reap()) == 1
    assert store.insert([answer(each)]) == [READY]


def test_evaluations_leave_training_its_share_and_take_the_rest(store):
    store.open_evaluation("e", purpose="greedy", version=0, rows=list(range(8)))
    ask = {"owner": "generator-0", "group_size": GROUP_SIZE, "lease_s": 60.0, "version": 0}

    def purposes(**limits: int) -> list[str]:
        return [each.purpose for each in store.lease(**ask, **limits)]

    # Two rows fit into the slot of a group of two.
    assert purposes(max_groups=3, max_evaluations=2, admission_limit=100) == ["greedy"] * 2 + ["train"] * 2
    assert purposes(max_groups=3, max_evaluations=1, admission_limit=3) == ["greedy", "train", "greedy", "greedy"]
    assert purposes(max_groups=4, max_evaluations=2, admission_limit=0) == ["greedy"] * 3
    assert store.counts().admitted == 3, "evaluations do not use the training budget"


def test_a_negative_limit_leases_no_returned_prompt(store):
    (first,) = lease(store, 1)
    store.return_leases(lease_ids=[first.id], reason="test")
    store.open_evaluation("e", purpose="greedy", version=0, rows=[0])
    ask = {"owner": "generator-0", "max_groups": 2, "group_size": GROUP_SIZE, "lease_s": 60.0}
    assert [each.purpose for each in store.lease(**ask, admission_limit=-1)] == ["greedy"]
    assert [each.group_id for each in store.lease(**ask, admission_limit=0)] == [first.group_id]


def test_evaluation_answers_are_kept_like_finished_groups(fresh_store):
    store = open_run(fresh_store, keeps_finished=True)
    store.open_evaluation("e", purpose="greedy", version=0, rows=[4])
    (each,) = store.lease(owner="a", max_groups=1, group_size=GROUP_SIZE, lease_s=60.0, admission_limit=0)
    packed = answer(each, reward=Reward(total=0.5, is_correct=True, detail="42"), data_source="maths")
    assert store.insert([packed, packed]) == [READY, DUPLICATE]
    (kept,) = store.finished(limit=9)
    assert (kept.id, kept.state, kept.payloads) == ("e:4", "evaluated", [packed[1]])
    assert store.counts().outcomes == {}
    (found,) = store.evaluation_answers("e")
    assert (found.row, found.reward, found.is_correct, found.answer, found.data_source) == (4, 0.5, True, "42", "maths")
    assert store.forget(["e:4"]) == 1
    assert (store.finished(limit=9), store.counts().payload_bytes) == ([], 0)
    assert store.insert([packed]) == [DUPLICATE]


def test_with_an_archive_a_group_stays_until_it_is_forgotten(fresh_store):
    store = open_run(fresh_store, keeps_finished=True)
    used, unfit = lease(store, 2)
    fill(store, used)
    fill(store, unfit)
    store.reject(claim(store, 1, 2), group_ids=[unfit.group_id], reason="unfit")
    commit(store, claim(store, 1, 1))
    checkpoint(store, 1)
    first, second = store.finished(limit=9)
    assert (first.id, first.state, first.reason, first.steps) == (unfit.group_id, "rejected", "unfit", [])
    assert (second.id, second.state, second.steps) == (used.group_id, "retired", [1])
    assert second.payloads == [answer(used, index)[1] for index in range(GROUP_SIZE)]
    assert store.insert([answer(used)]) == [DUPLICATE]
    assert store.counts().payload_bytes == sum(map(len, first.payloads + second.payloads))
    assert store.forget([first.id, second.id, "no-such"]) == 2
    assert (store.finished(limit=9), store.counts().payload_bytes) == ([], 0)
    assert store.insert([answer(used)]) == [SUPERSEDED]
    assert store.audit().is_sound
