"""Made prompts: right answers, no overlap, the same for the same seed."""

from pathlib import Path

import pytest

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.scripts.make_digits_data import addition, main, make_files, make_problems, reverse


def make(folder: Path, *, task: str = "reverse", seed: int = 0) -> tuple[Dataset, Dataset]:
    make_files(folder, task=task, digits=4, train_rows=30, heldout_rows=20, seed=seed)
    return Dataset(folder / "train.parquet"), Dataset(folder / "heldout.parquet")


def test_a_number_is_reversed_with_its_zeros_and_a_sum_has_two_numbers_of_two_digits() -> None:
    assert reverse(48213, 5) == ("48213=", "31284")
    assert reverse(70, 5) == ("00070=", "07000")
    assert [addition(n) for n in (0, 8099, 90 * 27 + 38)] == [("10+10=", "20"), ("99+99=", "198"), ("37+48=", "85")]


@pytest.mark.parametrize("task", ["reverse", "addition"])
def test_every_prompt_occurs_once_in_both_files_and_the_seed_determines_them(tmp_path: Path, task: str) -> None:
    train, heldout = make(tmp_path, task=task)
    prompts = [str(row.prompt) for data in (train, heldout) for row in data]
    assert (len(train), len(heldout), len(set(prompts))) == (30, 20, 50)
    row, rows = heldout.row(3), list(train)
    assert (row.data_source, row.extra_info) == (f"digits/{task}", {"index": 3, "split": "heldout"})
    again, other = (list(make(tmp_path, task=task, seed=seed)[0]) for seed in (0, 1))
    assert again == rows != other


def test_nothing_but_the_two_files_is_left(tmp_path: Path) -> None:
    main(["--train-rows=3", "--heldout-rows=2", f"--out={tmp_path}/deep/down"])
    assert sorted(path.name for path in (tmp_path / "deep/down").iterdir()) == ["heldout.parquet", "train.parquet"]
    row = Dataset(tmp_path / "deep/down/heldout.parquet").row(1)
    assert str(row.prompt)[:-1][::-1] == row.ground_truth


def test_more_problems_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be <= 100, got 101: there are no more different problems of reverse"):
        make_problems("reverse", digits=2, count=101, seed=0)
