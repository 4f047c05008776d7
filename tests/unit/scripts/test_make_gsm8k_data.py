"""GSM8K: problems become chat prompts with a number to compare with."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.broker.prompts.dataset import Dataset
from slipstream.configs.base import ConfigError
from slipstream.scripts.make_gsm8k_data import INSTRUCTION, final_answer, main, read_source

PROBLEM = {"question": "Two eggs cost 4. How much do 500 cost? ", "answer": "4 / 2 = 2\n500 * 2 = 1,000\n#### 1,000"}


def write_lines(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(PROBLEM) + "\n")


def test_the_final_answer_follows_the_mark() -> None:
    assert final_answer(PROBLEM["answer"]) == "1000"


def test_an_answer_without_a_mark_is_refused() -> None:
    with pytest.raises(ConfigError, match="must end in `#### number`, got `about five`"):
        final_answer("about five")


def test_lines_become_chat_prompts(tmp_path: Path) -> None:
    write_lines(tmp_path)
    main([f"--source={tmp_path}", f"--out={tmp_path}/out"])
    row = Dataset(tmp_path / "out/heldout.parquet").row(0)
    assert row.prompt == [{"role": "user", "content": f"Two eggs cost 4. How much do 500 cost? {INSTRUCTION}"}]
    assert row.ground_truth == "1000"


def test_parquet_files_of_the_hub_are_read(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    pq.write_table(pa.Table.from_pylist([PROBLEM]), tmp_path / "main/train-00000-of-00001.parquet")
    assert read_source(tmp_path, split="train") == [PROBLEM]


def test_a_folder_without_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold train\*\.parquet or train\.jsonl, but has neither"):
        read_source(tmp_path, split="train")


def test_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"q": "?"}\n')
    with pytest.raises(ConfigError, match="must have the columns `question` and `answer`"):
        read_source(tmp_path, split="train")
