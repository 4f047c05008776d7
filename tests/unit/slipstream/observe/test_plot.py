"""The curve of a run."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.observe.plot import draw, plot_run, running_mean
from tests.recorded_run import append_rows, make_row

EVALUATED = {"eval/accuracy_sampled": 0.4, "eval/accuracy_greedy": 0.5}


@pytest.mark.parametrize("num_steps", [1, 30])
def test_a_run_becomes_a_picture_beside_its_metrics_even_if_never_evaluated(tmp_path, num_steps):
    append_rows(tmp_path, *map(make_row, range(1, num_steps + 1)))
    assert plot_run(tmp_path) == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_every_held_out_set_and_every_lag_has_its_curve_and_a_running_mean_looks_back_only():
    rows = [make_row(step) | (EVALUATED if step % 10 == 0 else {}) for step in range(1, 31)]
    rows[9]["eval/accuracy_aime"], rows[29]["eval/accuracy_aime"] = 0.1, 0.2
    lines = draw(rows, title="a run").axes[0].get_lines()
    labels = [str(line.get_label()) for line in lines]
    assert labels == ["sampled, last 0.400", "greedy, last 0.500", "aime, last 0.200"]
    assert [list(line.get_xdata()) for line in lines] == [[10, 20, 30], [10, 20, 30], [10, 30]]
    buckets = {f"learner/by_lag/{bucket}/mismatch_k3": 0.01 for bucket in ("16+", "0", "2-3", "8-15")}
    mismatch = draw([{"step": 1, "time_s": 1.0} | buckets, {"step": 2, "time_s": 2.0}], title="a run").axes[2]
    assert [line.get_label() for line in mismatch.get_lines()] == ["0", "2-3", "8-15", "16+"]
    assert [list(line.get_xdata()) for line in mismatch.get_lines()] == [[1]] * 4
    assert running_mean([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]


ANSWERS = {"learner/by_source/sums/length_mean": 4.0, "learner/by_source/sums/trajectories": 30.0}
ANSWERS |= {"learner/by_source/words/length_mean": 8.0, "learner/by_source/words/trajectories": 10.0}


@pytest.mark.parametrize(
    ("values", "titles"),
    [
        ({}, ["Reward by step", "Reward by time", "Entropy", "Lag", "Mismatch", "Tokens per second"]),
        (EVALUATED, ["Held-out", "Held-out", "Reward by step", "Entropy", "Lag", "Mismatch", "Tokens per second"]),
        (
            {"eval/accuracy_greedy": 0.0, "eval/reward_greedy": 0.2, "lag/max": 0} | ANSWERS,
            ["Reward by step", "Reward by time", "Entropy", "Length of answers", "Mismatch", "Tokens per second"],
        ),
    ],
)
def test_the_panels_are_those_that_the_run_measured_and_accuracies_that_stay_0_get_none(values, titles):
    rows = [{key: value for key, value in make_row(step).items() if "eval" not in key} | values for step in (1, 2)]
    axes = draw(rows, title="a run").axes
    shown = [panel.get_title() for panel in axes]
    assert [title[: len(start)] for title, start in zip(shown, titles, strict=True)] == titles
    reward = next(panel for panel in axes if panel.get_title().startswith("Reward"))
    assert len(reward.get_lines()) == 2 + ("eval/reward_greedy" in values), "held-out next to training"
    if ANSWERS.items() <= values.items():
        assert list(axes[3].get_lines()[0].get_ydata()) == [5.0, 5.0]


def test_a_folder_without_steps_is_refused(tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl must"):
            plot_run(tmp_path)
        (tmp_path / "metrics.jsonl").write_text("")
