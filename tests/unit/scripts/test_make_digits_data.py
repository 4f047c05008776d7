"""Made prompts: right answers, no overlap, the same for the same seed."""

from pathlib import Path

import pytest

from slipstream.broker.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.scripts.make_digits_data import addition, main, make_files, make_problems, reverse


def make(folder: Path, *, task: str = "reverse", seed: int = 0) -> tuple[Dataset, Dataset]:
    make_files(folder, task=task, digits=4, train_rows=30, heldout_rows=20, seed=seed)
    return Dataset(folder / "train.parquet"), Dataset(folder / "heldout.parquet")


def test_a_number_is_reversed_with_its_zeros() -> None:
    assert reverse(48213, 5) == ("48213=", "31284")
    assert reverse(70, 5) == ("00070=", "07000")


def test_a_sum_has_two_numbers_of_two_digits() -> None:
    assert addition(0) == ("10+10=", "20")
    assert addition(8099) == ("99+99=", "198")
    assert addition(90 * 27 + 38) == ("37+48=", "85")


@pytest.mark.parametrize("task", ["reverse", "addition"])
def test_every_prompt_occurs_once_in_both_files_together(tmp_path: Path, task: str) -> None:
    train, heldout = make(tmp_path, task=task)
    prompts = [str(row.prompt) for data in (train, heldout) for row in data]
    assert (len(train), len(heldout), len(set(prompts))) == (30, 20, 50)


def test_rows_are_in_the_form_the_broker_reads(tmp_path: Path) -> None:
    row = make(tmp_path)[1].row(3)
    assert row.data_source == "digits/reverse"
    assert row.extra_info == {"index": 3, "split": "heldout"}
    assert str(row.prompt)[:-1][::-1] == row.ground_truth


def test_the_seed_determines_the_result(tmp_path: Path) -> None:
    first, again, other = (list(make(tmp_path, seed=seed)[0]) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_more_problems_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be <= 100, the number of reverse problems, got 101"):
        make_problems("reverse", digits=2, count=101, seed=0)


def test_nothing_but_the_two_files_is_left(tmp_path: Path) -> None:
    main(["--train-rows=3", "--heldout-rows=2", f"--out={tmp_path}/deep/down"])
    assert sorted(path.name for path in (tmp_path / "deep/down").iterdir()) == ["heldout.parquet", "train.parquet"]
