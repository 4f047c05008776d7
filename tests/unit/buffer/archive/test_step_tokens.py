"""Per-token numbers of a step: round trip, deletion, and tolerated damage."""

from pathlib import Path

import numpy as np
import pytest

from slipstream.buffer.archive.step_tokens import StepTokens, drop_steps, keep_newest, read_steps, write_step

TWO = StepTokens(
    ["0-0-0", "0-0-1"],
    lengths=[4, 5],
    positions=[np.array([2, 3]), np.array([1, 4])],
    columns={
        "log_ratio": np.array([0.5, -0.25, 0.0, -2.0], np.float32),
        "entropy": np.array([1.5, 0.0, 2.0, 0.125], np.float32),
    },
)
"""Two trajectories; the second has a token that is not trained on between two that are."""


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        write_step(folder, step, TWO)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_number_comes_back_at_its_token_and_none_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "token_stats", 12)
    assert names(tmp_path / "token_stats") == ["step-00000012.parquet"]
    assert read_steps(tmp_path / "token_stats", {"0-0-0": 12, "0-0-1": 12}) == {
        "0-0-0": {"learner_log_ratio": [None, None, 0.5, -0.25], "learner_entropy": [None, None, 1.5, 0.0]},
        "0-0-1": {
            "learner_log_ratio": [None, 0.0, None, None, -2.0],
            "learner_entropy": [None, 2.0, None, None, 0.125],
        },
    }


def test_a_trajectory_is_looked_up_only_in_its_last_step_and_not_in_a_damaged_or_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 5, 8)
    (tmp_path / "step-00000008.parquet").write_bytes(b"PAR1 and no more")
    nothing = np.empty(0, np.float32)
    write_step(tmp_path, 1, StepTokens([], [], [], {"log_ratio": nothing, "entropy": nothing}))
    last = {"0-0-0": 5, "0-0-1": 8, "9-0-0": 5, "2-0-0": None, "3-0-0": 1, "4-0-0": 7}
    assert list(read_steps(tmp_path, last)) == ["0-0-0"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_number_that_is_not_finite_is_none(tmp_path: Path, value: float) -> None:
    columns = {name: np.array([value, *column[1:]], np.float32) for name, column in TWO.columns.items()}
    write_step(tmp_path, 1, TWO._replace(columns=columns))
    assert read_steps(tmp_path, {"0-0-0": 1})["0-0-0"]["learner_log_ratio"] == [None, None, None, -0.25]


def test_the_oldest_files_make_room_for_the_newest_and_undone_steps_are_deleted(tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 12, 13)
    drop_steps(tmp_path, after=10)
    drop_steps(tmp_path / "none", after=1)
    size = (tmp_path / "step-00000010.parquet").stat().st_size
    assert write_step(tmp_path, 11, TWO) == size
    keep_newest(tmp_path, max_bytes=2.5 * size)
    assert names(tmp_path) == ["step-00000010.parquet", "step-00000011.parquet"]
    keep_newest(tmp_path, max_bytes=0.5 * size)
    assert names(tmp_path) == []
