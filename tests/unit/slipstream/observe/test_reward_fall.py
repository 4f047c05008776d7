"""Falls of the reward, with their companions planted in the metrics of a run."""

import random

import pytest

from slipstream.buffer.records import StepEntry
from slipstream.observe.reward_fall import explain_reward, largest_fall
from tests.builders import make_run

STEPS = 80
FALLS_AT = 51


def noisy(step, *, key):
    return random.Random(f"{key}{step}").gauss(0, 1)


def make_row(step, **after):
    """A step of a run whose reward is about 0.8, and about 0.5 from step 51 on; `after`: other values from then on."""
    level = 0.8 if step < FALLS_AT else 0.5
    usual = {"lag/mean": 1.0, "learner/idle_fraction": 0.05, "learner/ess": 0.95, "learner/grad_norm": 1.0}
    values = usual | (after if step >= FALLS_AT else {})
    row = {key: value * (1 + 0.02 * noisy(step, key=key)) for key, value in values.items()}
    return {"step": step, "learner/reward_mean": level + 0.02 * noisy(step, key="reward")} | row


def explain(*, entries=(), events=None, change=lambda row: {}, **after):
    rows = [make_row(step, **after) for step in range(1, STEPS + 1)]
    rows = [row | change(row) for row in rows]
    return explain_reward(rows, make_run(), entries=entries, events=events or {})


def by_key(answer):
    return {finding.key: finding for finding in answer.findings}


def test_a_fall_is_told_with_its_figures_and_what_changed_with_it_first_changes_first():
    answer = explain()
    assert answer.headline.startswith("The reward fell from 0.8")
    assert answer.headline.endswith(", from step 51 on.")
    assert answer.findings == []
    assert answer.note == "No watched metric changed with it."
    answer = explain(**{"lag/mean": 6.0})
    assert list(by_key(answer)) == ["lag/mean"]
    found = answer.findings[0]
    assert found.figures.startswith("rose from 1")
    assert "from step 51 on" in found.figures
    assert "max_lag (now" in found.advice
    (same,) = (fact for fact in answer.facts if fact.startswith("much the same"))
    assert "learner/idle_fraction (0.05" in same
    assert "do not tell which" in answer.note
    found = by_key(explain(**{"learner/idle_fraction": 0.7}))["learner/idle_fraction"]
    assert "healthy is <= 0.5" in found.figures
    assert "the policy loss clips most of the data" in found.advice
    assert explain(**{"lag/mean": 0.2}).findings == [], "a change for the better is no sign"

    def change(row):
        since = {"learner/grad_norm": (51, 30.0), "learner/ess": (53, 0.2)}
        return {key: value for key, (step, value) in since.items() if row["step"] >= step}

    answer = explain(change=change)
    assert [finding.key for finding in answer.findings] == ["learner/grad_norm", "learner/ess"]
    assert "from step 51 on" in answer.findings[0].figures
    assert "from step 53 on" in answer.findings[1].figures


def mixed(*, easy, hard, easy_reward=1.0):
    """Metrics of two tasks; one without trajectories is left out."""
    found = {}
    for name, count, reward in (("easy", easy, easy_reward), ("hard", hard, 0.2)):
        if count:
            found |= {f"learner/by_source/{name}/trajectories": count, f"learner/by_source/{name}/reward_mean": reward}
    return found


@pytest.mark.parametrize(
    ("before", "after", "split"),
    [
        ({"easy": 75, "hard": 25}, {"easy": 25, "hard": 75}, "-0.4: -0.4 another mix of tasks, +0"),
        ({"easy": 50, "hard": 50}, {"easy": 50, "hard": 50, "easy_reward": 0.4}, "-0.3: +0 another mix of tasks, -0.3"),
        ({"easy": 100, "hard": 0}, {"easy": 50, "hard": 50}, "-0.4: -0.4 another mix of tasks, +0"),
    ],
    ids=["another mix", "within tasks", "a new task"],
)
def test_a_fall_by_other_data_is_split_into_mix_and_rewards(before, after, split):
    answer = explain(change=lambda row: mixed(**(before if row["step"] < FALLS_AT else after)))
    assert answer.facts[0] == f"of a change of {split} rewards within them"
    if before["easy"] == 75:
        assert set(answer.facts[1:3]) == {
            "  easy: 75% to 25% of the answers, reward 1 to 1",
            "  hard: 25% to 75% of the answers, reward 0.2 to 0.2",
        }
        assert answer.note == ""


def test_answers_that_are_cut_parts_that_fall_other_settings_events_and_held_out_rewards_are_told():
    def change(row):
        late = row["step"] >= FALLS_AT
        names = {"stop_length": 0.6 if late else 0.01, "part_format": 0.1 if late else 0.9}
        return {f"learner/by_source/math/{name}": value for name, value in names.items()}

    answer = explain(change=change)
    assert "max_tokens (now" in by_key(answer)["learner/by_source/math/stop_length"].advice
    assert "part of the reward that fell: learner/by_source/math/part_format, 0.9 to 0.1" in answer.facts
    entries = [StepEntry(step, step, step, 0, "aaaa" if step < 51 else "bbbb", [], []) for step in range(1, STEPS + 1)]
    events = {1: ["long before"], 51: ["learner: restarted"]}
    change = lambda row: {"eval/reward_greedy": 0.9 - 0.005 * row["step"]} if row["step"] % 5 == 0 else {}  # noqa: E731
    facts = explain(entries=entries, events=events, change=change).facts
    assert "from step 51 on the run had other settings (aaaa to bbbb)" in facts
    assert "event in step 51: learner: restarted" in facts
    assert not any("long before" in fact for fact in facts)
    assert any(fact.startswith("eval/reward_greedy, of the same prompts before and after: 0.") for fact in facts)


@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_noise_and_a_rise_are_no_fall(slope):
    rows = [{"step": step, "learner/reward_mean": slope * step + 0.1 * noisy(step, key="x")} for step in range(1, 201)]
    answer = explain_reward(rows, make_run())
    assert answer.headline.startswith("The reward did not fall beyond its noise")
    assert answer.findings == []


def test_only_rises_and_few_steps_give_no_answer_and_windows_of_a_fall_do_not_overlap():
    rows = [{"step": step, "learner/reward_mean": 0.01 * step} for step in range(1, 41)]
    assert explain_reward(rows, make_run()).facts == ["no 5 steps have a lower mean than 5 steps before them"]
    rows = [{"step": step, "learner/reward_mean": 0.5 if step < 12 else float("nan")} for step in range(1, 40)]
    assert explain_reward(rows, make_run()).headline.startswith("11 steps have a reward")
    assert explain_reward(rows[10:], make_run()).headline.startswith("1 step has a reward")
    values = [0.0] * 20 + [1.0] * 20 + [0.2] * 20 + [0.6] * 20
    windows = largest_fall(values)
    assert (windows.before, windows.after, windows.width) == (20, 40, 10)
