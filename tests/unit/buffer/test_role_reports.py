"""The breakdown of a step's wall time."""

from typing import Any

import msgspec
import pytest

from slipstream.buffer.role_reports import describe_times, make_step_times, time_counters
from slipstream.runtime.clock import Growth

ROLES: dict[str, dict[str, Any]] = {
    "learner": {"role": "learner", "cpu_s": 1.0, "time/waiting": 6.0, "time/compute": 3.0, "time/rest": 1.0},
    "a": {"role": "generator", "cpu_s": 2.0, "time/starting": 50.0, "time/working": 8.0, "time/prompts": 2.0},
    "b": {"role": "generator", "cpu_s": 3.0, "time/working": 10.0, "time/prompts": "many"},
    "broker": {"role": "broker", "cpu_s": 0.5, "store_cpu_s": 0.25, "time/waiting": 9.5, "time/routing": 0.5},
    "launcher": {"role": "launcher", "cpu_s": 9.0},
}


def test_shares_are_those_of_a_role_and_processor_seconds_those_of_a_step() -> None:
    times = make_step_times(time_counters(ROLES), steps=20)
    assert (times.steps, times.step_s) == (20, 0.5)
    found = {each.role: each for each in times.roles}
    assert list(found) == ["learner", "generator", "broker", "store"]
    assert found["learner"].shares["waiting"] == 0.6
    assert sum(found["learner"].shares.values()) == pytest.approx(1.0)
    # Excludes 50 s of loading.
    assert (found["generator"].count, found["generator"].shares["working"]) == (2, 0.9)
    assert [each.cpu_s for each in times.roles] == [0.05, 0.25, 0.025, 0.0125]
    assert found["store"].shares == {"busy": 0.025}


def test_time_before_the_training_and_before_a_restart_is_counted_rightly() -> None:
    growth = Growth(time_counters(ROLES))
    later = {"role": "generator", "time/working": 11.0, "time/prompts": 1.0}
    growth.update(time_counters({"b": later}))
    growth.update(time_counters({"b": later | {"time/working": 0.5}}))
    assert growth.each == {("generator", "b", "time/working"): 1.5, ("generator", "b", "time/prompts"): 1.0}


@pytest.mark.parametrize(
    ("prompts", "side"), [(2.0, "generating is the slower side"), (90.0, "training is the slower side")]
)
def test_the_table_says_which_side_waits_for_which(prompts: float, side: str) -> None:
    roles = ROLES | {"a": ROLES["a"] | {"time/prompts": prompts}}
    lines = describe_times(msgspec.to_builtins(make_step_times(time_counters(roles), steps=20)))
    assert lines[0] == "where the wall time went: 20 steps of 0.5 s"
    assert lines[2].split(maxsplit=3) == [
        "learner", "0.050", "s", "60% waiting for trajectories, 30% forward and backward, 10% rest",
    ]  # fmt: skip
    assert lines[3].startswith("2 generators")
    assert lines[-1].startswith("the learner waits 60% of its time for trajectories, the generators")
    assert lines[-1].endswith(side)
    assert len(lines) <= 15
    assert (describe_times(None), make_step_times({}, steps=0).roles) == ([], []), "without a step"
