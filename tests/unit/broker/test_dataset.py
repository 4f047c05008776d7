"""The dataset reads rows as they were written and refuses invalid files with one sentence."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.broker.dataset import Dataset, Row, describe_shortage, open_datasets
from slipstream.configs.base import ConfigError
from slipstream.generators.tokenization import PromptEncoder
from tests.builders import make_prompt, make_run
from tests.tiny_model import make_tokenizer

ROW: dict[str, Any] = {
    "data_source": "digits/reverse",
    "prompt": "48213=",
    "reward_model": {"style": "rule", "ground_truth": "31284"},
    "extra_info": {"index": 17, "split": "train"},
}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Dataset(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Dataset(write(tmp_path, [ROW])).row(0) == Row(
        uid="train/00000",
        prompt="48213=",
        ground_truth="31284",
        data_source="digits/reverse",
        extra_info={"index": 17, "split": "train"},
    )


def test_a_prompt_may_be_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert Dataset(write(tmp_path, [ROW | {"prompt": messages}])).row(0).prompt == messages


def test_extra_info_may_be_absent(tmp_path: Path) -> None:
    without = {key: value for key, value in ROW.items() if key != "extra_info"}
    assert Dataset(write(tmp_path, [without])).row(0).extra_info == {}


def test_iteration_yields_every_row_under_its_own_uid(tmp_path: Path) -> None:
    dataset = Dataset(write(tmp_path, [ROW, ROW, ROW]))
    assert len(dataset) == 3
    assert [row.uid for row in dataset] == ["train/00000", "train/00001", "train/00002"]


@pytest.mark.parametrize("index", [-1, 1])
def test_a_row_outside_the_file_is_an_index_error(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match="rows 0 to 0"):
        Dataset(write(tmp_path, [ROW])).row(index)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.parquet")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("{}")
    assert "cannot be read" in refusal(tmp_path / "train.parquet")


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named_beside_the_existing_ones(tmp_path: Path, column: str) -> None:
    message = refusal(write(tmp_path, [{key: value for key, value in ROW.items() if key != column}]))
    assert f"the column `{column}`" in message
    assert "extra_info" in message


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("data_source", 3),
        ("prompt", 3),
        ("prompt", ["a", "b"]),
        ("prompt", [{"role": "user"}]),
        ("reward_model", "31284"),
        ("reward_model", {"style": "rule"}),
        ("reward_model", {"ground_truth": 31284}),
        ("extra_info", "seventeen"),
    ],
)
def test_a_column_of_another_type_is_refused(tmp_path: Path, column: str, value: Any) -> None:
    assert f"column `{column}` must be" in refusal(write(tmp_path, [ROW | {column: value}]))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), path)
    assert "at least one prompt" in refusal(path)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ({"prompt": None}, "prompt"),
        ({"data_source": None}, "data_source"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model.ground_truth"),
        ({"reward_model": None}, "reward_model.ground_truth"),
    ],
)
def test_a_row_without_a_value_is_named(tmp_path: Path, broken: dict[str, Any], name: str) -> None:
    message = refusal(write(tmp_path, [ROW, ROW | broken]))
    assert f"`{name}`, but row 1" in message


def test_the_dataset_loads_without_torch() -> None:
    program = "import slipstream.broker.dataset, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def open_with(folder: Path, prompts: list[Any], **data: Any) -> tuple[Dataset, Dataset]:
    make_tokenizer().save_pretrained(folder / "model")
    paths = {}
    for name in ("train", "heldout"):
        (folder / name).mkdir(exist_ok=True)
        paths[f"{name}_path"] = str(write(folder / name, [ROW | {"prompt": prompt} for prompt in prompts]))
    return open_datasets(make_run(model={"path": str(folder / "model")}, data=paths | {"max_prompt_tokens": 8} | data))


@pytest.mark.parametrize("kind", [str, list])
def test_prompts_over_the_limit_are_refused_with_their_number_or_dropped(kind: type, tmp_path: Path) -> None:
    user = [{"role": "user", "content": "1" * length} for length in (3, 20, 6, 30)]
    prompts = [[message] for message in user] if kind is list else [message["content"] for message in user]
    with pytest.raises(
        ConfigError, match=r"at most data.max_prompt_tokens \(8\) tokens, but 2 of 4 are longer, up to 3\d"
    ):
        open_with(tmp_path, prompts)
    train, heldout = open_with(tmp_path, prompts, too_long="drop")
    assert [row.uid for row in train] == ["train/00000", "train/00002"]
    assert len(heldout) == 2


def test_a_file_of_which_nothing_would_be_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 2 are longer, up to 10 tokens in row 1"):
        open_with(tmp_path, ["1" * 9, "1" * 10], too_long="drop")


def test_a_row_that_fits_into_no_message_is_refused_with_its_size(tmp_path: Path) -> None:
    rows = [ROW] * 40 + [ROW | {"extra_info": {"index": 1, "split": "x" * 3000}}] + [ROW] * 9
    paths = dict.fromkeys(("train_path", "heldout_path"), str(write(tmp_path, rows)))
    run = make_run(model={"path": str(tmp_path / "none")}, data=paths, broker={"max_message_bytes": 4096})
    expected = (
        r"train.parquet must take at most half of broker.max_message_bytes \(4096\), got 3\d\d\d bytes in row 40: "
    )
    with pytest.raises(ConfigError, match=expected):
        open_datasets(run)
    assert len(open_datasets(make_run(model={"path": str(tmp_path / "none")}, data=paths))[0]) == 50


@pytest.mark.parametrize("most", [8, 9, 10])
def test_the_file_is_measured_as_generators_encode_it(most: int, tmp_path: Path) -> None:
    encoder = PromptEncoder(make_tokenizer(), max_prompt_tokens=99)
    prompt = [{"role": "user", "content": "1+2+3+4"}]
    length = len(encoder.encode(make_prompt(prompt)))
    if length > most:
        with pytest.raises(ConfigError, match=f"up to {length} tokens"):
            open_with(tmp_path, [prompt], max_prompt_tokens=most)
    else:
        assert len(open_with(tmp_path, [prompt], max_prompt_tokens=most)[0]) == 1


def test_a_shortage_of_heldout_prompts_is_described() -> None:
    run = make_run(evaluation={"monitor_prompts": 2, "final_prompts": 6})
    assert describe_shortage(run, num_heldout=8) == ""
    assert "ask for 8: 1 are evaluated during training, 3 before and after it" in describe_shortage(run, num_heldout=4)


def test_prompts_that_nobody_can_measure_here_are_left_to_the_generators(tmp_path: Path) -> None:
    path = write(tmp_path, [ROW | {"prompt": "1" * 99}])
    data = {"train_path": str(path), "heldout_path": str(path), "max_prompt_tokens": 8}
    assert len(open_datasets(make_run(model={"path": str(tmp_path / "elsewhere")}, data=data))[0]) == 1
