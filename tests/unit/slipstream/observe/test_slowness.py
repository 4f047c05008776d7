"""Causes of slowness, planted in the metrics of a run."""

import pytest

from slipstream.buffer.role_reports import PHASES as KNOWN
from slipstream.configs.base import ConfigError
from slipstream.observe.slowness import PHASES, explain_slowness
from tests.builders import make_run
from tests.recorded_run import make_row

BUSY = {"compute": 0.8, "waiting": 0.05, "rest": 0.15}
WAITS = {"compute": 0.2, "waiting": 0.7, "rest": 0.1}


def make_times(*, learner, generator=None, step_s=0.5):
    shares = {"learner": learner} | ({"generator": generator} if generator else {})
    roles = [{"role": role, "count": 1, "shares": each, "cpu_s": 0.3} for role, each in shares.items()]
    return {"steps": 40, "step_s": step_s, "roles": roles}


def explain(*, learner, generator=None, rows=None, events=None, num_cores=None):
    rows = rows or [make_row(step) for step in range(1, 41)]
    rows[-1] |= {"times": make_times(learner=learner, generator=generator)}
    return explain_slowness(rows, make_run(), events=events or {}, num_cores=num_cores)


def keys(answer):
    return [finding.key for finding in answer.findings]


def test_slow_generators_a_slow_learner_stalls_of_publishing_and_pacing_are_told_apart():
    answer = explain(learner=WAITS, generator={"working": 0.95, "prompts": 0.05})
    causes = "waiting for trajectories; the largest part of the generators' time, 95%, is: engine"
    assert f"70% of 0.5 s, is: {causes}" in answer.headline
    assert keys(answer) == ["generator/working", "learner/compute", "learner/rest"]
    first = answer.findings[0]
    assert first.figures == "95% of the generators' time; the learner waits 70% of its own, 0.35 s of a step"
    assert "generators.count (now 1)" in first.advice
    assert any("generating is the slower side" in fact for fact in answer.facts)
    answer = explain(learner=BUSY, generator={"working": 0.3, "prompts": 0.7})
    assert answer.headline.endswith("80% of 0.5 s, is: forward and backward.")
    # What idle generators do costs nothing.
    assert keys(answer) == ["learner/compute", "learner/rest"]
    assert any("training is the slower side" in fact for fact in answer.facts)
    rows = [make_row(step, **{"weights/sync_s": 4.0, "weights/pause_s": 3.5}) for step in range(1, 41)]
    answer = explain(learner=WAITS, generator={"working": 0.3, "updating": 0.7}, rows=rows)
    assert keys(answer)[:2] == ["generator/updating", "generator/working"]
    assert "(the newest version took 4 s, and 3.5 s of pause)" in answer.findings[0].advice
    assert keys(explain(learner={"publishing": 0.6, "compute": 0.4}))[0] == "learner/publishing"
    answer = explain(learner=WAITS, generator={"working": 0.2, "prompts": 0.8})
    assert keys(answer)[0] == "generator/prompts"
    assert "staleness.max_lag (now" in answer.findings[0].advice
    answer = explain(learner=WAITS)
    assert keys(answer)[0] == "learner/waiting"
    assert answer.headline.endswith("waiting for trajectories.")
    assert "the learner waits 70% of its time for trajectories; no generator has reported its time" in answer.facts


@pytest.mark.parametrize(("num_cores", "is_full"), [(None, False), (2, True), (3, False)])
def test_more_processes_are_advised_only_where_a_core_is_idle(num_cores, is_full):
    answer = explain(learner=BUSY | {"waiting": 0.2}, generator={"working": 0.9}, num_cores=num_cores)
    advice = {finding.key: finding.advice for finding in answer.findings}
    for key, setting in (("learner/compute", "learner.num_ranks"), ("generator/working", "generators.count")):
        assert (setting in advice[key]) != is_full
        assert ("keeps 1.2 of 2 cores busy" in advice[key]) == is_full


def test_the_stages_of_a_weight_update_are_facts():
    stages = {"receive_s": 0.04, "prepare_s": 1.5, "probe_s": 1.0}
    rows = [make_row(step, **{f"weights/{name}": each for name, each in stages.items()}) for step in range(1, 41)]
    assert not any("weight update" in fact for fact in explain(learner=BUSY, rows=rows[:0] or None).facts)
    for row in rows:
        row["weights/pause_s"] = 0.004
    rows[3]["weights/prepare_s"] = 90.0
    stages = "received in 0.04 s, prepared in 1.5 s, probed in 1 s during generation, which paused for 0.004 s"
    assert f"a weight update: {stages} (medians)" in explain(learner=BUSY, rows=rows).facts


def test_steps_that_stand_out_changes_of_pace_and_what_was_generated_in_vain_are_told_with_their_parts():
    rows = [make_row(step) for step in range(1, 41)]
    for row in rows[20:]:
        row["time_s"] += 9.0
    rows[20]["learner/wait_s"] += 9.0
    facts = explain(learner=BUSY, rows=rows, events={21: ["generator-0: died"], 22: ["broker: other"]}).facts
    assert facts[-3:] == [
        "1 of 39 steps took more than 3 times the median of 0.5 s; what they took beyond it is 32% of all time",
        "  step 21: 9.5 s, of which 9.1 s waiting for trajectories",
        "    event: generator-0: died",
    ]
    rows = [make_row(step) for step in range(1, 41)]
    for row in rows[20:]:
        row["time_s"] += 0.5 * (row["step"] - 20)
        row["learner/train_s"] += 0.5
    (fact,) = (fact for fact in explain(learner=BUSY, rows=rows).facts if fact.startswith("the pace"))
    assert fact == (
        "the pace changed: the median of steps 2 to 10 is 0.5 s, of steps 32 to 40 1 s; what grew most is training "
        "(+0.5 s a step)"
    )
    rows = [make_row(1), make_row(2, **{"buffer/waste_fraction": 0.3, "learner/stale_fraction": 0.01})]
    told = [fact for fact in explain(learner=BUSY, rows=rows).facts if "%" in fact and "buffer/" in fact]
    assert told == ["30% of the tokens left the buffer untrained (buffer/waste_fraction)"]


@pytest.mark.parametrize(
    ("times", "rule"),
    [(None, "must hold the shares of the wall time"), ({"steps": "many"}, "as this version of Slipstream writes it")],
)
def test_rows_without_shares_or_with_those_of_another_form_are_refused(times, rule):
    with pytest.raises(ConfigError, match=rule):
        explain_slowness([make_row(1, times=times)], make_run())


def test_steps_that_are_missing_or_come_again_and_rows_without_a_time_or_numbers_are_left_out():
    rows = [make_row(step) for step in (1, 2, 3, 2, 3, 40)]
    assert "no step took more than 3 times the median of 0.5 s" in explain(learner=BUSY, rows=rows).facts
    rows = [make_row(step) for step in range(1, 41)]
    del rows[19]["time_s"]
    rows[-1] |= {"generators/tokens_per_s": "many", "buffer/waste_fraction": None, "learner/train_s": "long"}
    facts = explain(learner=BUSY, rows=rows).facts
    assert "no step took more than 3 times the median of 0.5 s" in facts
    assert not any("tokens per second" in fact for fact in facts)


def test_every_phase_that_may_be_large_has_a_meaning():
    assert {f"learner/{phase}" for phase in KNOWN["learner"]} <= PHASES.keys()
    assert {f"generator/{phase}" for phase in KNOWN["generator"]} - PHASES.keys() == {"generator/rest"}
