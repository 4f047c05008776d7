"""Settings that would make the learner wait for ever are refused with the arithmetic."""

import msgspec
import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import ReuseConfig
from tests.builders import make_run

OF_ONE = {"advantage": {"kind": "reinforce_plus_plus"}}
"""An advantage that a group of one has."""
STEPS_OF_FOUR = {"groups_per_step": 4, "max_steps": 10, "checkpoint": {"every_steps": 5}}


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (
            {"reuse": {"max_uses": 4, "fresh_fraction": 0.5, "samples_per_insert": 1.5}},
            r"samples_per_insert must be >= .* \(4 / 2 = 2\), got 1\.5: pacing admits",
        ),
        (
            {"capacity": {"max_groups": 23}},
            r"capacity\.max_groups must be >= 24 = 20 used groups that wait .* \+ 0 kept for reuse \+ 4 .* got 23",
        ),
        (
            {"capacity": {"max_groups": 100}, "reuse": {"max_uses": 2, "max_groups": 80}},
            r"must be >= 104 = 20 used groups .* \+ 80 kept for reuse \+ 4 .* got 100",
        ),
        ({"mix": {"archive": "there", "fraction": 0.1}}, r"mix\.fraction must leave at least one group .* got 0\.1 of"),
    ],
)
def test_what_cannot_go_on_is_refused(buffer, complaint):
    with pytest.raises(msgspec.ValidationError, match=complaint):
        make_run(buffer=buffer, learner=STEPS_OF_FOUR)


def test_a_fraction_that_uses_cannot_fill_is_refused():
    with pytest.raises(
        ConfigError, match=r"fresh_fraction must be >= 1 / max_uses \(0\.5\), got 0\.25: .* used 4 times"
    ):
        ReuseConfig(max_uses=2, fresh_fraction=0.25)


@pytest.mark.parametrize(
    ("chosen", "generators", "complaint"),
    [
        ({"kind": "zero_signal"}, {"group_size": 1}, r"group_size must be >= 2 for buffer/filter=zero_signal, got 1"),
        ({"kind": "accuracy"}, {"group_size": 1}, r"at least one share .* generators\.group_size=1, got above=0 and"),
        (
            {"kind": "accuracy", "above": 0.51, "below": 0.74},
            {"group_size": 4},
            r"at least one share of right answers in generators\.group_size=4, got above=0\.51 and below=0\.74",
        ),
        ({"kind": "accuracy", "above": 0.5, "below": 0.5}, {}, r"buffer\.filter\.above must be < .*below \(0\.5\)"),
        ({"kind": "zero_signal", "min_spread": 0}, {}, "> 0"),
    ],
)
def test_a_filter_that_lets_nothing_through_is_refused(chosen, generators, complaint):
    with pytest.raises(msgspec.ValidationError, match=complaint):
        make_run(buffer={"filter": chosen}, generators=generators, algorithm=OF_ONE)


def test_one_answer_and_a_greedy_one_can_differ():
    generators = {"group_size": 1, "baseline": "greedy"}
    remax = {"advantage": {"kind": "remax"}}
    run = make_run(buffer={"filter": {"kind": "zero_signal"}}, generators=generators, algorithm=remax)
    assert run.generators.members_per_group == 2


def test_a_generator_must_have_room_for_a_group_with_its_baseline():
    assert make_run(generators={"group_size": 4, "max_concurrency": 4}).generators.members_per_group == 4
    with pytest.raises(msgspec.ValidationError, match=r"max_concurrency must be >= 5, the trajectories of one group"):
        make_run(generators={"group_size": 4, "max_concurrency": 4, "baseline": "greedy"})


def test_what_just_fits_is_accepted():
    reuse = {"max_uses": 2, "fresh_fraction": 0.5, "samples_per_insert": 2.0, "max_groups": 76}
    run = make_run(buffer={"reuse": reuse, "capacity": {"max_groups": 100}}, learner=STEPS_OF_FOUR)
    assert run.claimed_groups_per_step == 4


def test_mixed_groups_take_their_share_of_a_step():
    run = make_run(buffer={"mix": {"archive": "there", "fraction": 0.25}}, learner=STEPS_OF_FOUR)
    assert (run.mixed_groups_per_step, run.claimed_groups_per_step, run.groups_per_version) == (1, 3, 3)
