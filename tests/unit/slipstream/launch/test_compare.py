"""Replays side by side: the picture and the table, from the metrics of finished runs."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.configs.base import ConfigError
from slipstream.launch.compare import Replay, compare_replays, draw, tabulate, write_picture

SUMMARY = {"accuracy_before": 0.3, "accuracy_sampled": 0.75, "accuracy_greedy": 0.8, "train_seconds": 12.5}


@pytest.fixture
def replays(tmp_path: Path) -> list[Replay]:
    return [write_run(tmp_path / str(number), slope=number) for number in (1, 2)]


def write_run(folder: Path, *, slope: float) -> Replay:
    folder.mkdir()
    rows = [
        {"step": step, "learner/loss": -slope * step, "learner/entropy": 1.0, "learner/grad_norm": 2.0}
        | ({"eval/accuracy_sampled": step / 10} if step % 2 == 0 else {})
        for step in range(1, 5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return Replay(f"algorithm/policy_loss={folder.name}", str(folder))


def test_every_replay_has_a_curve_in_every_panel_with_data(replays: list[Replay]) -> None:
    figure = draw(replays, title="compared")
    curves = {axes.get_title(loc="center") or axes.get_title(loc="left"): axes.get_lines() for axes in figure.axes}
    by_label = {line.get_label(): line for line in curves["Held-out accuracy, sampled"]}
    assert list(by_label) == [replay.label for replay in replays]
    for line in by_label.values():
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([2, 4], [0.2, 0.4])
    losses = [line for line in curves["Loss"] if line.get_label() in by_label]
    assert [line.get_ydata()[-1] for line in losses] == [-2.5, -5.0], "a running mean"


def test_the_picture_is_written(replays: list[Replay], tmp_path: Path) -> None:
    target = write_picture(replays, tmp_path / "compared.png", title="compared")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_line_per_replay(replays: list[Replay]) -> None:
    console = Console(width=200, record=True)
    console.print(tabulate(replays))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["algorithm/policy_loss=1", "0.300", "0.750", "0.800", "12.500", "4", "-4.0000", "2.000"]
    assert lines[2][-2:] == ["-8.0000", "2.000"]


@pytest.mark.parametrize("settings", [["seed=1"], []])
def test_a_comparison_needs_two_replays(settings: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--replay must be given 2 to 4 times"):
        compare_replays(tmp_path, settings, shared=[], out=tmp_path / "new")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out must not exist yet"):
        compare_replays(tmp_path, ["seed=1", "seed=2"], shared=[], out=tmp_path)
