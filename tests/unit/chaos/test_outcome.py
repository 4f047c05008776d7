from collections import Counter
from typing import Any

import msgspec
import pytest

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.records import StepEntry
from tests.chaos import outcome
from tests.chaos.delivery_audit import find_delivery_problems
from tests.chaos.outcome import Evidence, Outcome, Sample, Stored, Times, Trained, find_problems
from tests.chaos.watched.journal import Entry, Life

STEPS, GROUPS_PER_STEP, SIZE, NUM_ROWS = 3, 2, 2, 7
EXPECTED = outcome.uninterrupted(num_groups=STEPS * GROUPS_PER_STEP, group_size=SIZE, num_rows=4, seed=0)


def groups_of(step: int) -> list[str]:
    return [str(group) for group in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)]


def samples_of(step: int) -> list[Sample]:
    return [sample for group in groups_of(step) for sample in EXPECTED if sample[0] == group]


def make_audit(**overrides: Any) -> Audit:
    names = [field for field in Audit.__struct_fields__ if field != "problems"]
    return Audit(**(dict.fromkeys(names, 0) | {"accepted": 12, "retired": 12} | overrides))


def make_counts(**overrides: Any) -> StoreCounts:
    """Counts of a run with no group left."""
    empty = {field.name: 0 if field.type is int else {} for field in msgspec.structs.fields(StoreCounts)}
    return StoreCounts(**(empty | {"admitted": 6, "accepted": 12} | overrides))


def make_entry(step: int, group_ids: list[str]) -> StepEntry:
    trajectory_ids = [[f"{group}-0-{index}" for index in range(SIZE)] for group in group_ids]
    return StepEntry(step, 0, fence=step, seed=0, config_hash="", group_ids=group_ids, trajectory_ids=trajectory_ids)


def make_outcome(**overrides: Any) -> Outcome:
    """Outcome of an uninterrupted run of three steps."""
    sound = {
        "audit": make_audit(),
        "counts": make_counts(),
        "ledger": [make_entry(step, groups_of(step)) for step in range(1, STEPS + 1)],
        "lineage": [Trained(step, samples_of(step)) for step in range(1, STEPS + 1)],
        "archived": list(EXPECTED),
        "archive": ArchiveCheck(shards=1, groups=6, trajectories=12),
        "consumed": STEPS * GROUPS_PER_STEP,
    }
    return Outcome(**(sound | overrides))


def problems_of(**overrides: Any) -> list[str]:
    return find_problems(make_outcome(**overrides), steps=STEPS, expected=EXPECTED)


PLACES = ("leased", "returned", "open", "ready", "claimed", "used")


@pytest.mark.parametrize(
    "wrong",
    [
        {"audit": make_audit(retired=11)},
        {"audit": make_audit(retired=11, lost=1)},
        {"audit": make_audit(duplicated=1)},
        {"audit": make_audit(skipped_prompts=1)},
        {"audit": make_audit(problems=["group 3 is used and ready"])},
        *({"counts": make_counts(**{place: 1})} for place in PLACES),
    ],
)
def test_whatever_the_audit_complains_of_and_whatever_is_left_over_is_a_fault(wrong):
    assert problems_of(**wrong)


def test_rejected_groups_and_prompts_that_the_curriculum_skipped_are_accounted_for_without_a_step() -> None:
    more = outcome.uninterrupted(num_groups=STEPS * GROUPS_PER_STEP + 1, group_size=SIZE, num_rows=4, seed=0)
    sound = make_outcome(rejected=sorted(more - EXPECTED))
    assert (sound.num_rejected, find_problems(sound, steps=STEPS, expected=more)) == (1, [])
    skips = make_counts(curriculum={"skipped_too_easy": 1, "skipped_too_hard": 1, "rows": 4})
    assert problems_of(counts=skips, skipped=[3, 5]) == []
    assert problems_of(skipped=[3]) == ["1 prompts have no group, the store counts 0 as skipped: [3]"]
    assert problems_of(counts=skips) == ["0 prompts have no group, the store counts 2 as skipped: []"]


def test_nothing_may_be_refused_but_what_was_offered_for_it() -> None:
    counts = make_counts(refused={"unknown_group": 2})
    assert problems_of(counts=counts, allowed_refusals=["unknown_group"]) == []
    assert problems_of(counts=counts) == ["nothing may be refused, got 2 x unknown_group"]
    assert problems_of(consumed=8) == ["6 groups were trained on, the store counts 8"]


def test_a_step_that_the_ledger_or_the_weights_lack_and_a_sample_seen_twice_are_found() -> None:
    sound = make_outcome()
    assert "the ledger" in problems_of(ledger=sound.ledger[:-1])[0]
    problems = problems_of(lineage=sound.lineage[:-1])
    assert any(problem.startswith("the lineage") for problem in problems)
    assert sum(problem.startswith("never trained on") for problem in problems) == GROUPS_PER_STEP * SIZE
    first, second, third = sound.lineage
    second = Trained(2, [first.samples[0], *second.samples[1:]])
    problems = problems_of(lineage=[first, second, third])
    assert any(problem.startswith("trained on 2 times, in an uninterrupted run 1") for problem in problems)


def test_another_order_than_committed_and_what_the_archive_lacks_or_has_twice_are_found() -> None:
    trained, samples = make_outcome().lineage, list(EXPECTED)
    trained[0] = Trained(1, list(reversed(trained[0].samples)))
    (problem,) = problems_of(lineage=trained)
    assert problem.startswith("step 1 was committed with")
    assert problems_of(archived=samples[1:]) == [f"never archived: {samples[0]}"]
    assert problems_of(archived=[*samples, samples[0]])[0].startswith("archived 2 times")
    assert problems_of(archive=ArchiveCheck(1, groups=6, trajectories=12, problems=["shard 1 is cut"]))


def test_an_uninterrupted_run_is_sound_and_trains_on_each_prompt_once_per_epoch() -> None:
    assert (set(EXPECTED.values()), problems_of()) == ({1}, [])
    samples = outcome.uninterrupted(num_groups=3 * NUM_ROWS, group_size=SIZE, num_rows=NUM_ROWS, seed=5)
    assert set(samples.values()) == {1}
    prompts = Counter((uid, index) for _, uid, index in samples)
    assert prompts == {(f"train/{row:05d}", index): 3 for row in range(NUM_ROWS) for index in range(SIZE)}


TIMES = Times(lease_s=2.5, peer_timeout_s=1.5)
OWNER = "generator-0/a"


def entry(at: float, kind: str, **facts: Any) -> Entry:
    return {"t": at, "k": kind} | facts


def put(at: float, name: str, *, content: str = "", **facts: Any) -> Entry:
    lease = name.rpartition("-")[0]
    sound = {"lease": lease, "purpose": "train", "content": content or f"content of {name}", "state": "ready"}
    return entry(at, "put", id=name, **(sound | {"spoiled": False} | facts))


def prompts(at: float, lease: str, members: int) -> Entry:
    return entry(at, "prompts", leases=[[lease, members]])


def rolled_back(at: float, *, fence: int, version: int = 0) -> Entry:
    found = {"found_step": 0, "found_version": version, "found_fence": fence}
    return entry(at, "rolled_back", step=0, version=0, fence=fence, **found)


def offered(what: str, name: str, answer: Entry) -> list[Entry]:
    group = name.partition("-")[0]
    return [entry(2.5, "offered", what=what, id=name, group=group, content="another"), answer]


def nacked(at: float, name: str, reason: str) -> Entry:
    return entry(at, "nacked", id=name, fatal=True, reason=reason)


def again(at: float, kind: str, result: str, **facts: Any) -> list[Entry]:
    """The learner repeats something of its step."""
    return [entry(at, kind, step=1, fence=2), entry(at + 0.1, result, step=1, fence=2, **facts)]


def make_generator() -> list[Entry]:
    return [
        entry(1.0, "hello", incarnation="a"),
        entry(1.1, "welcome", broker="b"),
        entry(1.2, "pong", version=0, state="ready", leases=[]),
        entry(1.3, "asked"),
        prompts(1.4, "0-0", 2),
        put(2.0, "0-0-0"),
        put(2.1, "0-0-1"),
        entry(2.2, "acked", ids=["0-0-0", "0-0-1"]),
    ]


def make_learner() -> list[Entry]:
    return [
        entry(0.1, "rolling_back", step=0, version=0),
        rolled_back(0.2, fence=1),
        entry(0.3, "version", version=0),
        entry(3.0, "claimed", step=1, fence=2, groups=["0"]),
        entry(3.1, "committing", step=1, fence=2, groups=["0"]),
        entry(3.2, "committed", step=1, fence=2),
        entry(3.3, "pointing", step=1, name="step-1", fence=2),
        entry(3.4, "pointed", step=1, name="step-1", fence=2),
    ]


STORED = [
    Stored("0-0-0", ("0", "train/0", 0), "content of 0-0-0", "x", "retired"),
    Stored("0-0-1", ("0", "train/0", 1), "content of 0-0-1", "y", "retired"),
]


def leased(at: float, name: str, *, to: str = OWNER, members: tuple[int, ...] = (0, 1)) -> Entry:
    return entry(at, "leased", owner=to, leases=[name], members=[members], since=at - 0.01)


BROKER = [leased(1.35, "0-0")]


def problems(
    *,
    generator: list[Entry] | None = None,
    more: list[Entry] | None = None,
    learner: list[Entry] | None = None,
    broker: list[Entry] | None = None,
    harness: list[Entry] | None = None,
    stored: list[Stored] | None = None,
    lives: list[Life] | None = None,
    skipped: tuple[int, ...] = (),
) -> list[str]:
    """Problems of a sound run with something replaced; `more` is appended to the generator's journal."""
    trained = Trained(1, [each.sample for each in STORED], ["0-0-0", "0-0-1"], [each.content for each in STORED])
    all_lives = [
        Life("harness", 1, [entry(0.0, "act", name="none"), *(harness or []), entry(30.0, "end")]),
        Life("broker", 2, BROKER + (broker or [])),
        Life("learner", 3, make_learner() + (learner or [])),
        Life("generator-0", 4, (generator or make_generator()) + (more or [])),
        *(lives or []),
    ]
    stored = STORED if stored is None else stored
    evidence = Evidence(all_lives, stored=stored, lineage=[trained], times=TIMES, max_lag=2, skipped=skipped)
    return find_delivery_problems(evidence)


def test_what_was_acknowledged_and_is_nowhere_is_found():
    assert problems() == []
    more = [put(4.0, "1-0-0"), entry(4.1, "acked", ids=["1-0-0"])]
    (problem,) = problems(more=more)
    assert problem == "1-0-0 was acknowledged to generator-0 and is not stored: nothing is in its place"


@pytest.mark.parametrize(("sent_at", "is_lost"), [(3.5, False), (5.0, True)])
def test_what_is_not_stored_was_superseded_only_by_something_sent_before(sent_at: float, is_lost: bool):
    other = Life("generator-1", 5, [
        entry(1.0, "hello", incarnation="c"), put(sent_at, "1-1-0"), entry(6.0, "acked", ids=["1-1-0"])
    ])  # fmt: skip
    more = [put(3.0, "1-0-0"), entry(4.0, "acked", ids=["1-0-0"])]
    stored = [*STORED, Stored("1-1-0", ("1", "train/1", 0), "content of 1-1-0", "z", "retired")]
    found = problems(more=more, lives=[other], stored=stored)
    assert [problem[:5] for problem in found] == ["1-0-0"] * is_lost


def test_another_content_a_skipped_prompt_that_was_handed_out_and_a_needless_lapse_are_found():
    found = problems(stored=[STORED[0], STORED[1]._replace(content="something else")])
    assert "0-0-1 was acknowledged to generator-0, and stored with another content" in found
    assert any(problem.startswith("step 1 trained on 0-0-1") for problem in found)
    assert problems(skipped=(1,)) == []
    (problem,) = problems(broker=[leased(1.36, "1-0")], skipped=(1,))
    assert problem == f"1-0 was handed out to {OWNER}, though no group of it is stored: it was skipped"
    struck = [entry(17.0, "down", role="store"), entry(18.0, "up", role="store")]
    lapse = [entry(20.0, "lapsed", leases=[["0-0", OWNER]])]
    assert (problems(broker=lapse, harness=struck), len(problems(broker=lapse))) == ([], 1)


ORDER = entry(4.1, "order", order="Update 9 9", member=OWNER)
ROLLING_BACK = entry(5.0, "rolling_back", step=0, version=0)
SECOND = Life("generator-0", 6, [entry(5.0, "hello", incarnation="z"), entry(5.2, "welcome", broker="b")])
SECOND_LEARNER = Life("learner", 7, [
    entry(4.0, "rolling_back", step=0, version=0), rolled_back(4.1, fence=9)
])  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"more": [entry(4.0, "acked", ids=["7-0-0"])]}, "which never sent it"),
        ({"more": [put(4.0, "1-0-0")]}, "was never answered"),
        ({"more": [put(4.0, "1-0-0", spoiled=True), entry(4.1, "acked", ids=["1-0-0"])]}, "arrived damaged"),
        ({"more": [put(4.0, "1-0-0"), nacked(4.1, "1-0-0", "store_full")]}, "was refused for good: store_full"),
        ({"more": offered("conflict", "0-0-0", entry(2.6, "acked", ids=["0-0-0"]))}, "with another content was ack"),
        ({"more": offered("unknown", "999-0-0", entry(2.6, "acked", ids=["999-0-0"]))}, "that does not exist"),
        ({"more": offered("same", "0-0-0", nacked(2.6, "0-0-0", "unknown_group"))}, "acknowledged, got unknown_group"),
        ({"more": [entry(4.0, "overdue", id="0-0-0")]}, "overdue"),
        ({"harness": [entry(4.0, "overadmitted", admitted=9, limit=8)]}, "overadmitted"),
        ({"broker": [leased(2.1, "0-1", to="generator-1/c")]}, "still held 0-0"),
        ({"broker": [leased(4.0, "0-1", to="generator-1/c")]}, "[0, 1] had been acknowledged"),
        ({"broker": [leased(2.1, "0-1", to="generator-1/c", members=())]}, "for the members ()"),
        ({"learner": [ROLLING_BACK, rolled_back(5.1, fence=9, version=1)]}, "left [0, 1, 9]"),
        ({"broker": [entry(20.0, "lapsed", leases=[["0-0", OWNER]])]}, "was there all the time"),
        ({"broker": [entry(20.0, "lapsed", leases=[["0-0", OWNER]])], "lives": [SECOND]}, "had been welcomed"),
        (
            {"broker": [entry(6.0, "departed", owner=OWNER, reason="silent for 1.5 s")],
             "more": [entry(5.0, "unknown_here"), entry(5.5, "welcome", broker="b")]},
            "after its return",
        ),
        ({"more": [prompts(4.0, "5-0", 2), entry(4.1, "bye", reason="")]}, "5-0 neither answered nor returned"),
        ({"more": [ORDER]}, "which no learner gave"),
        (
            {"learner": [entry(4.0, "ordered", order="Update 9 9", members=["generator-1/b"])], "more": [ORDER]},
            "which no learner gave",
        ),
        ({"learner": [entry(4.0, "heard", answer="UpdateApplied 1 1 generator-0/a")]}, "never said"),
        (
            {"learner": [entry(4.0, "version", version=3)],
             "more": [entry(5.0, "asked"), prompts(5.1, "9-0", 1), put(5.2, "9-0-0"), nacked(5.3, "9-0-0", "x")]},
            "prompts with weights of version 0, 3 was committed",
        ),
        ({"more": [put(4.0, "0-0-0", state="updating")]}, "while it was updating"),
        ({"stored": [STORED[0], STORED[1]._replace(tokens="x")]}, "have the same tokens"),
        ({"learner": [entry(4.0, "claimed", step=2, fence=2, groups=["1"])]}, "claims have the fence 2"),
        ({"learner": again(5.0, "recommitting", "recommitted"), "lives": [SECOND_LEARNER]}, "after a roll back"),
        ({"learner": again(5.0, "recommitting", "recommit_refused", error="stale")}, "though nothing came between"),
        ({"learner": again(5.0, "pointing", "pointed"), "lives": [SECOND_LEARNER]}, "that was replaced was accepted"),
        (
            {"learner": again(8.0, "renewing", "renewed"), "broker": [entry(7.0, "claims_lapsed", steps=[1])],
             "harness": [entry(3.0, "stop", role="learner"), entry(7.5, "continue", role="learner")]},
            "was renewed after it had lapsed",
        ),
        ({"broker": [entry(20.0, "claims_lapsed", steps=[1])]}, "their learner was there all the time"),
    ],
)  # fmt: skip
def test_each_kind_of_violation_is_found(wrong: dict[str, Any], words: str):
    found = problems(**wrong)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(("leased_at", "is_found"), [(3.5, False), (5.05, True)])
def test_prompts_that_arrive_late_count_from_their_lease(leased_at: float, is_found: bool):
    more = [entry(3.4, "asked"), entry(5.0, "asked"), prompts(5.1, "9-0", 1), put(5.2, "9-0-0")]
    found = problems(
        learner=[entry(4.0, "version", version=3)],
        broker=[leased(leased_at, "9-0", to="generator-0/a")],
        more=[*more, nacked(5.3, "9-0-0", "x")],
    )
    assert any("prompts with weights of version 0" in problem for problem in found) == is_found, found


@pytest.mark.parametrize(("returned_at", "is_found"), [(1.8, False), (2.1, True)])
def test_a_liar_that_names_its_own_lease_has_returned_it_though_it_does_so_again_later(returned_at, is_found):
    more = [entry(returned_at, "lied", leases=["0-0"]), entry(6.0, "returned", leases=["0-0"])]
    found = problems(more=more, broker=[leased(1.9, "0-1", to="generator-1/c")])
    assert [problem[:3] for problem in found] == ["0-1"] * is_found


@pytest.mark.parametrize(
    ("state", "verified", "is_found"),
    [("unsynced", False, True), ("unsynced", True, False), ("updating", True, True), ("ready", True, False)],
)
def test_answers_leave_under_verified_weights_which_a_failed_transfer_does_not_take_away(state, verified, is_found):
    generator = [
        {**each, "state": state, "verified": verified} if each["k"] == "put" else each for each in make_generator()
    ]
    assert ["left generator-0" in problem for problem in problems(generator=generator)][:1] == [True] * is_found


@pytest.mark.parametrize(("received_at", "is_found"), [(4.0, True), (4.9, False), (5.2, False)])
def test_prompts_that_nobody_could_read_any_more_are_taken_back_by_the_bye(received_at, is_found):
    more = [prompts(received_at, "5-0", 2), entry(5.0, "left"), entry(6.0, "bye", reason="")]
    assert ["neither answered" in problem for problem in problems(more=more)] == [True] * is_found


@pytest.mark.parametrize(("acked_at", "is_found"), [(4.5, True), (6.0, False)])
def test_an_offered_copy_of_what_arrived_damaged_may_be_acknowledged(acked_at, is_found):
    offer = entry(5.0, "offered", what="again", id="0-0-1", group="0", content="content of 0-0-1")
    spoiled = [put(4.0, "0-0-1", spoiled=True), offer, entry(acked_at, "acked", ids=["0-0-1"])]
    generator = [*make_generator()[:5], put(2.0, "0-0-0"), entry(2.2, "acked", ids=["0-0-0"]), *spoiled]
    found = problems(generator=sorted(generator, key=lambda each: each["t"]))
    assert ["arrived damaged" in problem for problem in found] == [True] * is_found
