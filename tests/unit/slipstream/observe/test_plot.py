"""The curve of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.base import ConfigError
from slipstream.observe.plot import draw, plot_run, running_mean


def make_row(step: int) -> dict[str, Any]:
    row = {
        "step": step,
        "version": step,
        "time_s": 1.5 * step,
        "learner/reward_mean": 0.5,
        "lag/mean": 1.5,
        "lag/max": 3,
        "learner/tokens_per_s": 3000.0,
        "generators/tokens_per_s": 3500.0,
    }
    return row | ({"eval/accuracy_sampled": 0.4, "eval/accuracy_greedy": 0.5} if step % 10 == 0 else {})


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_becomes_a_picture_beside_its_metrics(tmp_path: Path) -> None:
    picture = plot_run(write(tmp_path, [make_row(step) for step in range(1, 31)]))
    assert picture == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_every_held_out_set_has_a_curve() -> None:
    rows = [make_row(10) | {"eval/accuracy_aime": 0.1}, make_row(20) | {"eval/accuracy_aime": 0.2}]
    labels = [str(line.get_label()) for line in draw(rows, title="a run").axes[0].get_lines()]
    assert labels == ["sampled, 0.400 at the end", "greedy, 0.500 at the end", "aime, 0.200 at the end"]


def test_only_evaluated_steps_carry_accuracy() -> None:
    accuracy = draw([make_row(step) for step in range(1, 31)], title="a run").axes[0]
    assert [list(line.get_xdata()) for line in accuracy.get_lines()] == [[10, 20, 30], [10, 20, 30]]


def test_every_lag_has_its_line_of_mismatch_from_fresh_to_stale() -> None:
    buckets = {f"learner/by_lag/{bucket}/mismatch_k3": 0.01 for bucket in ("16+", "0", "2-3", "8-15")}
    mismatch = draw([make_row(1) | buckets, make_row(2)], title="a run").axes[4]
    assert [line.get_label() for line in mismatch.get_lines()] == ["0", "2-3", "8-15", "16+"]
    assert [list(line.get_xdata()) for line in mismatch.get_lines()] == [[1]] * 4


def test_a_run_that_was_never_evaluated_is_drawn_too(tmp_path: Path) -> None:
    assert plot_run(write(tmp_path, [make_row(1)])).is_file()


@pytest.mark.parametrize("content", [None, ""])
def test_a_folder_without_steps_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl must"):
        plot_run(tmp_path)


def test_the_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]
