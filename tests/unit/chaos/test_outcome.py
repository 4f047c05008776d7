from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import save_file

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import ArchiveCheck
from slipstream.buffer.records import StepEntry
from slipstream.learner.engines.optimizer import STATE_FILE
from tests.builders import make_trajectory
from tests.chaos import outcome
from tests.chaos.outcome import Outcome, Sample, Trained, find_problems

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


def test_a_lineage_comes_back_as_it_was_written_and_the_attempt_that_won_makes_no_other_sample(tmp_path: Path) -> None:
    trained = [Trained(1, [("0", "train/00003", 0), ("0", "train/00003", 1)]), Trained(2, [("1", "train/00001", 0)])]
    save_file(outcome.pack_lineage(trained), tmp_path / STATE_FILE.format(0))
    assert outcome.read_lineage(tmp_path) == trained
    first, again = make_trajectory("4", attempt=0), make_trajectory("4", attempt=3)
    assert outcome.samples_of([[first]]) == outcome.samples_of([[again]]) == [("4", "test/4", 0)]
