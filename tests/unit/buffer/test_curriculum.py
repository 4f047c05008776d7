"""Success rates with hand-computed values, and the look-ahead at the next prompts."""

import msgspec
import pytest

from slipstream.buffer.sampling import look_ahead
from slipstream.configs.base import ConfigError
from slipstream.configs.data import CurriculumConfig
from slipstream.configs.load import load
from tests.builders import make_run
from tests.memory_store.rules import GroupRewards, SuccessRate

HALF = CurriculumConfig(low=0.25, high=0.75, decay=0.5, min_answers=4)


def group(correct: int, answered: int = 4) -> GroupRewards:
    return GroupRewards(answered, correct, 0.0, 1.0)


def rate_after(*groups: GroupRewards, curriculum: CurriculumConfig = HALF) -> SuccessRate:
    rate = SuccessRate()
    for each in groups:
        rate = rate.after(each, curriculum)
    return rate


def test_later_and_larger_groups_weigh_more():
    assert rate_after(group(1), group(3)) == SuccessRate(8, 4 * 0.5 + 4, 1 * 0.5 + 3)
    assert rate_after(group(4, 4), group(0, 2)) == SuccessRate(6, 4 * 0.5 + 2, 4 * 0.5)
    newest = msgspec.structs.replace(HALF, decay=0.0)
    assert rate_after(group(4), group(1), curriculum=newest) == SuccessRate(8, 4, 1)
    alike = msgspec.structs.replace(HALF, decay=1.0)
    assert rate_after(group(4), group(1), curriculum=alike) == SuccessRate(8, 8, 5)


@pytest.mark.parametrize(
    ("right", "flaw"), [(0, "too_hard"), (1, ""), (2, ""), (3, ""), (4, "too_easy")]
)  # 1/4 and 3/4 are the bounds
def test_the_bounds_belong_to_the_band(right: int, flaw: str):
    assert rate_after(group(right)).flaw(HALF) == flaw


def test_a_row_with_too_few_answers_has_no_flaw():
    assert SuccessRate().flaw(HALF) == ""
    assert rate_after(group(0, 3)).flaw(HALF) == ""
    assert rate_after(group(0, 3), group(0, 1)).flaw(HALF) == "too_hard"


def test_the_look_ahead_is_a_function_of_seed_and_ordinal():
    seen = look_ahead(0, 100, curriculum=HALF, seed=1, may_skip=True)
    later = look_ahead(40, 100, curriculum=HALF, seed=1, may_skip=True)
    drawn = seen.explored[:1600]
    assert drawn[40:] == later.explored[: 1600 - 40]
    assert drawn != look_ahead(0, 100, curriculum=HALF, seed=2, may_skip=True).explored[:1600]
    assert 0.07 < sum(drawn) / len(drawn) < 0.13, "the share is explore"
    assert seen.explored[1600:] == [True] * 100, "the last are leased whatever their rows"


@pytest.mark.parametrize(("explore", "expected"), [(0.0, [False] * 16 + [True]), (1.0, [True] * 17)])
def test_nothing_or_everything_is_explored(explore: float, expected: list[bool]):
    curriculum = CurriculumConfig(explore=explore)
    assert look_ahead(5, 1, curriculum=curriculum, seed=0, may_skip=True).explored == expected
    assert look_ahead(5, 1, curriculum=curriculum, seed=0, may_skip=False).explored == [True]
    assert look_ahead(5, 0, curriculum=curriculum, seed=0, may_skip=True).explored == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.5, "high": 0.5}, r"data\.curriculum\.low must be < high \(0\.5\), got 0\.5: "),
        ({"low": 0.9, "high": 0.1}, r"data\.curriculum\.low must be < high \(0\.1\), got 0\.9: "),
        ({"low": -0.1}, r">= 0.* `\$\.data\.curriculum\.low`"),
        ({"high": 1.5}, r"<= 1.* `\$\.data\.curriculum\.high`"),
        ({"explore": 2}, r"<= 1.* `\$\.data\.curriculum\.explore`"),
        ({"decay": -1}, r">= 0.* `\$\.data\.curriculum\.decay`"),
        ({"min_answers": 0}, r">= 1.* `\$\.data\.curriculum\.min_answers`"),
    ],
)
def test_bounds_that_cannot_work_are_refused(settings: dict, message: str):
    with pytest.raises(msgspec.ValidationError, match=message):
        make_run(data={"curriculum": settings})


def test_a_bound_out_of_range_is_named_in_one_sentence():
    with pytest.raises(ConfigError, match=r"^data\.curriculum\.explore must be a number <= 1\.0, got 2\.$"):
        load(["data.curriculum.explore=2"])


def test_a_curriculum_is_off_by_default_and_on_with_any_of_its_settings():
    assert make_run().data.curriculum is None
    assert load(["data.curriculum.low=0.2"]).data.curriculum == CurriculumConfig(low=0.2)
