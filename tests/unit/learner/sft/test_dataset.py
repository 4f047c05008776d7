from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.buffer.archive.columns import tabulate
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig, SftConfig
from slipstream.learner.sft.dataset import read_heldout, read_train
from tests.builders import make_trajectory
from tests.tiny_model import make_tokenizer
from tests.unit.learner.builders import make_model, make_run
from tests.unit.learner.sft.test_demonstration import TEMPLATE

ROWS = [{"prompt": "12=", "response": "21"}, {"prompt": "345=", "response": "543"}]


def make_file(folder: Path, rows, name="train.parquet") -> str:
    path = folder / name
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    return str(path)


def sft_run(folder: Path, rows=ROWS, *, max_length=64, template: str | None = None, **settings):
    model = make_model(folder)
    if template is not None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(model)
        if not template:
            (model / "chat_template.jinja").unlink(missing_ok=True)
    sft = SftConfig(train_path=make_file(folder, rows), **settings)
    run = make_run(model, mode="sft", sft=sft)
    return msgspec.structs.replace(run, model=ModelConfig(path=str(model), max_length=max_length))


def texts(file):
    return [make_tokenizer().decode(demonstration.token_ids) for demonstration in file.demonstrations]


def trained(file):
    tokenizer = make_tokenizer()
    return [tokenizer.decode(d.token_ids[d.model_mask]) for d in file.demonstrations]


def refusal(folder, rows=ROWS, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        read_train(sft_run(folder, rows, **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_prompts_and_responses_of_text(tmp_path):
    file = read_train(sft_run(tmp_path))
    assert texts(file) == ["12=21<eos>", "345=543<eos>"]
    assert trained(file) == ["21<eos>", "543<eos>"]


def test_columns_may_have_other_names_and_lie_in_records(tmp_path):
    rows = [{"question": "12=", "reward_model": {"style": "rule", "ground_truth": "21"}}]
    file = read_train(sft_run(tmp_path, rows, prompt="question", response="reward_model.ground_truth"))
    assert texts(file) == ["12=21<eos>"]


def test_messages_go_through_the_chat_template(tmp_path):
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    file = read_train(sft_run(tmp_path, [{"messages": messages}], template=TEMPLATE))
    assert texts(file) == ["user=1+2<eos>+assistant=3<eos>+"]
    assert trained(file) == ["3<eos>"]


def test_only_the_response_to_a_prompt_of_messages_is_trained(tmp_path):
    prompt = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    file = read_train(sft_run(tmp_path, [{"prompt": prompt, "response": "4"}], template=TEMPLATE))
    assert trained(file) == ["4<eos>"]


def test_token_ids_need_no_tokenizer(tmp_path):
    run = sft_run(tmp_path, [{"token_ids": [4, 5, 6], "model_mask": [False, True, True]}])
    (Path(run.model.path) / "tokenizer.json").unlink()
    (demonstration,) = read_train(run).demonstrations
    assert demonstration.token_ids.tolist() == [4, 5, 6]
    assert demonstration.trained.tolist() == [1, 2]


def test_exported_trajectories_train_their_model_written_tokens(tmp_path):
    best = StoredTrajectory(make_trajectory(), "retired", "", [1])
    (demonstration,) = read_train(sft_run(tmp_path, tabulate([best]))).demonstrations
    assert demonstration.token_ids.tolist() == list(range(12))
    assert demonstration.trained.tolist() == list(range(6, 12))


def test_a_held_out_file_is_read_from_its_beginning(tmp_path):
    path = make_file(tmp_path, ROWS * 3, "heldout.parquet")
    assert len(read_heldout(sft_run(tmp_path, heldout_path=path)).demonstrations) == 6
    assert len(read_heldout(sft_run(tmp_path, heldout_path=path, heldout_rows=4)).demonstrations) == 4
    assert read_heldout(sft_run(tmp_path)).demonstrations == []


UNFIT = [
    *ROWS,
    {"prompt": "1=", "response": ""},
    {"prompt": "1=", "response": None},
    {"prompt": "1" * 64, "response": "1"},
]


def test_unfit_rows_are_refused_by_default(tmp_path):
    assert "row 2: the response must not be empty" in refusal(tmp_path, UNFIT)
    assert "row 1: it must hold at most model.max_length (6) tokens, got 8" in refusal(tmp_path, max_length=6)


def test_unfit_rows_can_be_skipped_and_are_counted(tmp_path):
    file = read_train(sft_run(tmp_path, UNFIT, unfit="skip"))
    assert (len(file.demonstrations), file.num_empty, file.num_too_long) == (2, 2, 1)


def test_a_file_of_nothing_but_unfit_rows_is_refused(tmp_path):
    assert "got none: 2 rows with nothing to learn and 1 longer" in refusal(tmp_path, UNFIT[2:], unfit="skip")
    assert "must hold at least one demonstration" in refusal(tmp_path, pa.Table.from_pylist(ROWS).slice(0, 0))


def test_missing_columns_are_named_with_the_existing_ones(tmp_path):
    assert "must have the column `response`, got only prompt, answer" in refusal(
        tmp_path, [{"prompt": "1", "answer": "2"}]
    )
    assert "must have the column `prompt`, got only token_ids" in refusal(tmp_path, [{"token_ids": [4, 5]}])
    assert "`record.missing`" in refusal(tmp_path, [{"prompt": "1", "record": {"a": "2"}}], response="record.missing")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": 1, "response": "2"}, "`prompt` must hold text or lists of messages, got int64"),
        ({"prompt": "1", "response": 2}, "`response` must hold text, got int64"),
        ({"messages": "1"}, "`messages` must hold lists of records with `role` and `content`"),
        ({"messages": [{"from": "user", "value": "1"}]}, "`messages` must hold lists of records"),
        ({"token_ids": ["4"], "model_mask": [True]}, "`token_ids` must hold lists of integers"),
        ({"token_ids": [4], "model_mask": [0.5]}, "`model_mask` must hold lists of booleans"),
        (
            {"token_ids": [4, 5], "model_mask": [True]},
            "row 0: token_ids and model_mask must be filled lists of one length",
        ),
        ({"token_ids": [4, 5000], "model_mask": [False, True]}, "row 0: token ids must lie between 0 and 40"),
        ({"token_ids": [-1, 5], "model_mask": [False, True]}, "row 0: token ids must lie between 0 and 40"),
    ],
)
def test_columns_of_the_wrong_kind_are_named(tmp_path, row, what):
    assert what in refusal(tmp_path, [row])


def test_a_row_without_a_prompt_is_named(tmp_path):
    assert "row 1: `prompt` must be filled" in refusal(tmp_path, [ROWS[0], {"prompt": None, "response": "2"}])


def test_messages_need_a_chat_template(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    assert "lists of messages need a chat template" in refusal(tmp_path, rows, template="")


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    run = sft_run(tmp_path)
    Path(run.sft.train_path).write_text("no parquet")
    with pytest.raises(
        ConfigError, match=r"train\.parquet must be a Parquet file of demonstrations, but cannot be read"
    ):
        read_train(run)
    Path(run.sft.train_path).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read_train(run)


def test_a_file_that_is_damaged_in_its_middle_is_named(tmp_path):
    run = sft_run(tmp_path)
    path = Path(run.sft.train_path)
    path.write_bytes(path.read_bytes()[:4] + bytes(40) + path.read_bytes()[44:])
    with pytest.raises(ConfigError, match=r"^\S*train\.parquet must be a .* cannot be read from row 0 on: "):
        read_train(run)
