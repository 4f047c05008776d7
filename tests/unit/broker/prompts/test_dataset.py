import datetime
import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from slipstream.broker import dataset as dataset_module
from slipstream.broker import lease_scheduler
from slipstream.broker.dataset import Dataset, open_datasets, read_heldout, read_train, with_epochs
from slipstream.broker.messages import Row
from slipstream.buffer.codec import decode, encode, unpack
from slipstream.buffer.records import Lease, image_names
from slipstream.buffer.sampling import FileShare
from slipstream.buffer.trajectory import Media
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig
from slipstream.generators.errors import PromptError
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.launch.preflight import make_inputs
from slipstream.runtime.images import PLACEHOLDER, VisionModel, image_id
from slipstream.runtime.model_files import read_chat_template
from tests.builders import make_packed, make_prompt, make_run
from tests.cases import cases
from tests.pictures import IMAGE, make_picture, make_picture_row, make_vision_model
from tests.tiny_model import make_tiny_model, make_tokenizer

ROW: dict[str, Any] = {
    "data_source": "digits/reverse",
    "prompt": "48213=",
    "reward_model": {"style": "rule", "ground_truth": "31284"},
    "extra_info": {"index": 17, "split": "train"},
}
TRUTHS: list[Any] = ["31284", 31284, 0.5, True, False, 0, "", ["a", "b"], {"tests": [{"in": "1", "out": "2"}]}, []]
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
BRIEF = {"role": "system", "content": "Be brief."}
TEMPLATE = "{% for message in messages %}{{ message.content + message.content }}{% endfor %}{{ ending }}"


def write(folder: Path, rows: list[dict[str, Any]], suffix: str = "parquet", *, name: str = "train") -> Path:
    path = folder / f"{name}.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "csv":
        pa_csv.write_csv(pa.Table.from_pylist(rows), path)
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Dataset(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_rows_are_read_as_they_were_written_each_under_its_own_uid_and_one_json_list_as_its_lines(tmp_path) -> None:
    without = {key: value for key, value in ROW.items() if key != "extra_info"}
    dataset = Dataset(write(tmp_path, [ROW, without]))
    row = {"prompt": "48213=", "ground_truth": "31284", "data_source": "digits/reverse"}
    first, second = Row(uid="train/00000", extra_info=ROW["extra_info"], **row), Row(uid="train/00001", **row)
    assert (len(dataset), list(dataset), dataset.row(1)) == (2, [first, second], second)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="rows 0 to 1"):
            dataset.row(index)
    rows = [ROW, ROW | {"ability": "maths"}]
    lines = list(Dataset(write(tmp_path, rows, "jsonl")))
    (tmp_path / "train.json").write_text(json.dumps(rows, indent=2))
    assert list(Dataset(tmp_path / "train.json")) == lines


def test_a_missing_file_or_column_or_a_file_of_another_kind_or_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    assert "no such file" in refusal(path)
    path.write_text("{}")
    assert "cannot be read" in refusal(path)
    pq.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), path)
    assert "at least one prompt" in refusal(path)
    for column in ("prompt", "reward_model"):
        message = refusal(write(tmp_path, [{key: value for key, value in ROW.items() if key != column}]))
        assert f"the column `{column}` or" in message
        assert "extra_info" in message


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@cases(
    "column, value",
    ("data_source", 3),
    ("agent_name", 3),
    ("prompt", 3),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", ["a", "b"]),
    ("prompt", [{"role": "user"}]),
    ("prompt", [{"role": "user", "content": 3}]),
    ("reward_model", "31284"),
    ("reward_model", {"style": "rule"}),
    ("extra_info", "seventeen"),
)
def test_a_value_of_another_type_is_refused_with_its_row(tmp_path: Path, suffix: str, column: str, value: Any) -> None:
    rows = [ROW | {column: value}] if suffix == "parquet" else [ROW, ROW | {column: value}]
    number = len(rows) - 1
    message = refusal(write(tmp_path, rows, suffix))
    assert f"row {number}: `{column}` must " in message
    assert ", got " in message


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@cases(
    "broken, name",
    ({"prompt": None}, "prompt"),
    ({"reward_model": {"style": "rule", "ground_truth": None}}, "ground_truth"),
    ({"reward_model": None}, "reward_model"),
)
def test_a_row_without_a_value_is_named(tmp_path: Path, suffix: str, broken: dict[str, Any], name: str) -> None:
    message = refusal(write(tmp_path, [ROW, ROW | broken], suffix))
    assert "row 1: " in message
    assert f"`{name}`" in message


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("truth", TRUTHS)
def test_a_truth_is_any_json_value(tmp_path: Path, suffix: str, truth: Any) -> None:
    rows = [ROW | {"reward_model": {"ground_truth": truth}}]
    path = write(tmp_path, rows, suffix)
    found = Dataset(path).row(0).ground_truth
    assert (type(found), found) == (type(truth), truth)


def test_rows_of_a_json_file_may_differ_in_their_truths_and_columns_and_csv_holds_text(tmp_path: Path) -> None:
    rows = [ROW | {"reward_model": {"ground_truth": truth}, f"column_{n}": n} for n, truth in enumerate(TRUTHS)]
    found = list(Dataset(write(tmp_path, rows, "jsonl")))
    assert [row.ground_truth for row in found] == TRUTHS
    assert [row.extra_info[f"column_{n}"] for n, row in enumerate(found)] == list(range(len(TRUTHS)))
    assert "column_1" not in found[0].extra_info
    (tmp_path / "train.csv").write_text('question,answer\n"first\nsecond",007\nNA,\n')
    found = [(row.prompt, row.ground_truth) for row in Dataset(tmp_path / "train.csv")]
    assert found == [("first\nsecond", "007"), ("NA", "")]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_every_column_and_the_parts_of_a_message_reach_agent_and_reward(tmp_path: Path, suffix: str) -> None:
    # Parquet gives every part the fields of all parts: templates ask `'video' in part`.
    parts = [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "What is this?"}]
    prompt = [{"role": "user", "content": parts}]
    kept = {
        "tools_kwargs": {"search": {"create_kwargs": {"topk": 3}}},
        "interaction_kwargs": {"name": "corrective", "max_turns": 4},
        "videos": ["a.mp4"],
    }
    own = {"index": 17, "ability": "kept"}
    truth = {"style": "rule", "ground_truth": "1", "rubric": "be brief"}
    row = ROW | kept | {"prompt": prompt, "agent_name": "tools", "ability": "maths"}
    found = Dataset(write(tmp_path, [row | {"extra_info": own, "reward_model": truth}], suffix)).row(0)
    assert (found.prompt, found.agent_name) == (prompt, "tools")
    assert found.extra_info == own | kept | {"reward_model": {"rubric": "be brief"}}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_question_and_answer_are_a_row_too(tmp_path: Path, suffix: str) -> None:
    rows: list[Any] = [{"question": "1+1?", "answer": "2", "level": None}]
    rows += [{"question": "1+2?", "answer": "3", "level": 4}]
    found = list(Dataset(write(tmp_path, rows, suffix)))
    kept = {"answer": "2"}
    assert found[0] == Row(uid="train/00000", prompt="1+1?", ground_truth="2", data_source="train", extra_info=kept)
    assert found[1].extra_info == {"level": 4, "answer": "3"}
    named = Dataset(write(tmp_path, [{**row, "data_source": "sums"} for row in rows], suffix))
    assert named.row(0).data_source == "sums"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "csv"])
@cases(
    "row, prompt, truth, columns",
    ({"prompt": "1+1?", "ground_truth": "2"}, "1+1?", "2", {}),
    ({"problem": "1+1?", "solution": "It is 2.", "answer": "2"}, "1+1?", "2", {}),
    ({"prompt": "1+1?", "solution": "2"}, "1+1?", "2", {}),
    ({"instruction": "Add.", "input": "1+1", "output": "2"}, "Add.\n\n1+1", "2", {}),
    ({"instruction": "1+1?", "input": "", "output": "2"}, "1+1?", "2", {}),
    ({"prompt": "no", "query": "1+1?", "gold": "2"}, "1+1?", "2", {"prompt": "query", "ground_truth": "gold"}),
    ({"messages": [USER], "answer": "2"}, [USER], "2", {}),
    ({"messages": [USER, ANSWER]}, [USER], "2", {}),
    ({"messages": [USER, ANSWER], "answer": "two"}, [USER], "two", {}),
    ({"conversations": SHAREGPT}, [BRIEF, USER], "2", {}),
    ({"dialog": {"turns": SHAREGPT[:2]}, "answer": "2"}, [BRIEF, USER], "2", {"prompt": "dialog.turns"}),
)
def test_common_columns_and_named_ones_are_read_from_every_format(tmp_path, suffix, row, prompt, truth, columns):
    if suffix == "csv" and not all(isinstance(value, str) for value in row.values()):
        pytest.skip("CSV holds no lists")
    dataset = Dataset(write(tmp_path, [row, row], suffix), columns=columns)
    found = dataset.row(1)
    assert (found.uid, found.prompt, found.ground_truth, found.data_source) == ("train/00001", prompt, truth, "train")
    dataset.files[0].keep_short(lambda prompts: [0 if each == prompt else 9 for each in prompts], most=1, drops=False)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@cases(
    "row, columns, words",
    ({"query": "1?", "answer": "2"}, {}, r"`prompt` or `question` or .*name the column .* data\.columns\.prompt="),
    ({"prompt": "1+1?", "gold": "2"}, {}, r"`answer` or .*data\.columns\.ground_truth=NAME"),
    ({"prompt": "1+1?", "answer": "2"}, {"prompt": "query"}, r"`query`.*prompt, answer: name the column"),
    ({"prompt": [USER, ANSWER], "answer": "2"}, {}, r"row 0: `prompt` must end with a turn .*remove that message"),
    ({"messages": [ANSWER]}, {}, r"row 0: `messages` must be text or a list of chat messages, and not be empty"),
)
def test_a_row_that_cannot_be_a_prompt_is_refused_with_the_remedy(tmp_path, suffix, row, columns, words) -> None:
    path = write(tmp_path, [row], suffix)
    with pytest.raises(ConfigError, match=words):
        Dataset(path, columns=columns)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_a_row_limit_applies_to_each_training_file_and_skips_the_check_of_the_rest(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": question, "answer": "1"} for question in ("a", "b", "", "")]
    paths = [str(write(tmp_path, rows, suffix, name=name)) for name in ("first", "second")]
    run = make_run(data={"train": paths, "max_rows": 2})
    assert [row.prompt for row in read_train(run)] == ["a", "b", "a", "b"]


@cases(
    "settings, max_steps",
    ({"learner": {"epochs": 3, "prompts_per_step": 4}}, 6),
    ({"learner": {"epochs": 3, "prompts_per_step": 4}, "data": {"max_rows": 2}}, 3),
    ({"learner": {"epochs": 1, "prompts_per_step": 9}}, 1),
    ({"learner": {"epochs": 3, "prompts_per_step": 4}, "replay_mix": {"archive": "a", "fraction": 0.5}}, 12),
    ({"learner": {"prompts_per_step": 4}}, 4),
    ({"learner": {"epochs": 3}, "mode": "evaluate"}, 4),
)
def test_passes_over_all_training_files_give_the_number_of_steps(tmp_path, settings, max_steps) -> None:
    data = {"train": [str(write(tmp_path, [ROW] * 4, name=name)) for name in ("first", "second")]}
    run = make_run(**settings | {"data": data | settings.get("data", {})})
    assert with_epochs(run).learner.max_steps == max_steps


def test_recorded_steps_must_lie_within_the_steps_that_the_passes_give(tmp_path: Path) -> None:
    data, learner = {"train": str(write(tmp_path, [ROW] * 4))}, {"epochs": 300, "prompts_per_step": 4}
    for steps in ([299, 300], [300, 301]):
        run = make_run(data=data, learner=learner, profile={"steps": steps})
        with pytest.raises(ConfigError, match=r"learner.max_steps \(300\)") if steps[1] > 300 else nullcontext():
            assert with_epochs(run).learner.max_steps == 300


def test_nulls_dates_bytes_and_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    truths: list[Any] = [{"a": 1}, {"b": [{"c": 2}, {"d": 3}]}]
    rows = [ROW | {"reward_model": {"ground_truth": truth}, "extra_info": truth} for truth in truths]
    found = list(Dataset(write(tmp_path, rows)))
    assert [row.ground_truth for row in found] == truths
    assert [row.extra_info for row in found] == truths
    row = ROW | {"reward_model": {"ground_truth": {"unit": None}}, "comment": None}
    written = Dataset(write(tmp_path, [row], "jsonl")).row(0)
    assert written.ground_truth == {"unit": None}
    assert "comment" not in written.extra_info
    day = datetime.date(2026, 1, 2)
    assert Dataset(write(tmp_path, [ROW | {"made": day}])).row(0).extra_info["made"] == "2026-01-02"
    assert "column `made` must hold texts" in refusal(write(tmp_path, [ROW | {"made": {"on": day}}]))
    row = ROW | {"sounds": [{"bytes": b"RIFF"}], "reward_model": {"ground_truth": {"a": [True], "b": 2.5}}}
    found = Dataset(write(tmp_path, [row])).row(0)
    assert found.extra_info["sounds"] == row["sounds"]
    assert decode(encode(found), Row) == found


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"question": "q", "answer": 1' + "0" * 30 + "}", "not json"])
def test_a_line_that_is_no_record_is_refused_with_its_row(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{line}\n")
    assert "row 1: it must be a JSON record, got" in refusal(path)


def open_with(folder: Path, prompts: list[Any], **data: Any) -> tuple[Dataset, dict[str, Dataset]]:
    make_tokenizer().save_pretrained(folder / "model")
    paths = {}
    for name in ("train", "eval"):
        (folder / name).mkdir(exist_ok=True)
        paths[name] = str(write(folder / name, [ROW | {"prompt": prompt} for prompt in prompts]))
    return open_datasets(make_run(model={"path": str(folder / "model")}, data=paths | {"max_prompt_tokens": 8} | data))


@pytest.mark.parametrize("kind", [str, list])
def test_prompts_over_the_limit_are_refused_with_their_number_or_dropped_and_logged(kind: type, tmp_path: Path) -> None:
    user = [{"role": "user", "content": "1" * length} for length in (3, 20, 6, 30)]
    prompts = [[message] for message in user] if kind is list else [message["content"] for message in user]
    refused = r"at most data.max_prompt_tokens \(8\) tokens, but 2 of 4 are longer, up to 3\d"
    with pytest.raises(ConfigError, match=refused):
        open_with(tmp_path, prompts)
    with capture_logs() as events:
        train, heldout = open_with(tmp_path, prompts, on_too_long="skip")
    assert [row.uid for row in train] == ["train/00000", "train/00002"]
    assert {name: len(dataset) for name, dataset in heldout.items()} == {"sampled": 2, "greedy": 2}
    found = [(Path(each["file"]).parent.name, each["left_out"], each["kept"]) for each in events if "left_out" in each]
    assert found == [("train", 2, 2), ("eval", 2, 2)]
    with pytest.raises(ConfigError, match=r"2 of 2 are longer, up to 3. tokens in row 1"):
        open_with(tmp_path, prompts[1::2], on_too_long="skip")


def test_a_row_that_fits_into_no_message_is_refused_with_its_size(tmp_path: Path) -> None:
    rows = [ROW] * 40 + [ROW | {"extra_info": {"index": 1, "split": "x" * 3000}}] + [ROW] * 9
    paths = dict.fromkeys(("train", "eval"), str(write(tmp_path, rows)))
    run = make_run(model={"path": str(tmp_path / "none")}, data=paths, broker={"max_message_bytes": 4096})
    expected = r"must take at most half of broker.max_message_bytes \(4096\), got 3\d\d\d bytes in row 40: "
    with pytest.raises(ConfigError, match=f"train.parquet {expected}"):
        open_datasets(run)
    # Prompts that cannot be measured here, without the model, are left to the generators.
    unmeasured = make_run(model={"path": str(tmp_path / "none")}, data=paths | {"max_prompt_tokens": 4})
    assert len(open_datasets(unmeasured)[0]) == 50


def test_a_shortage_of_heldout_prompts_is_described(tmp_path: Path) -> None:
    path = str(write(tmp_path, [ROW] * 4))
    run = make_run(data={"eval": path}, evaluation={"num_prompts": 2, "num_final_prompts": 6})
    heldout = read_heldout(run)
    assert heldout["sampled"] is heldout["greedy"]
    (shortage,) = dataset_module.describe_shortages(run, heldout)
    assert shortage.startswith(f"{path} holds 4 prompts")
    assert "ask for 8: 1 are evaluated during training, 3 before and after it" in shortage
    enough = make_run(evaluation={"num_prompts": 2, "num_final_prompts": 2})
    assert dataset_module.describe_shortages(enough, heldout) == []


def test_held_out_sets_have_files_of_their_own(tmp_path: Path) -> None:
    paths = write_two(tmp_path)
    named = zip(("gsm8k", "math", "easy"), [*paths, paths[0]], strict=True)
    sets = [{"name": name, "path": path} for name, path in named]
    heldout = read_heldout(make_run(data={"eval": sets}))
    assert {name: len(dataset) for name, dataset in heldout.items()} == {"gsm8k": 3, "math": 2, "easy": 3}
    assert [heldout[name].row(1).uid for name in ("gsm8k", "math")] == ["gsm8k/train/00001", "math/train/00001"]


@pytest.mark.parametrize("content", ["1" * 5, "1" * 6])
def test_a_template_of_ones_own_is_used_by_whoever_measures_and_renders(content: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    make_tokenizer().save_pretrained(tmp_path / "model")
    template = {"chat_template": str(tmp_path / "mine.jinja"), "chat_template_kwargs": {"ending": "="}}
    model = ModelConfig(max_length=64, dtype="float32", path=str(tmp_path / "model"), **template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    tokenizer = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=99, template_variables=model.chat_template_kwargs)
    token_ids, _ = encoder.encode(make_prompt(messages))
    assert tokenizer.decode(token_ids) == f"{content}{content}="
    assert dataset_module.count_tokens([messages], model) == [len(token_ids)] == [2 * len(content) + 1]


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = ModelConfig(max_length=64, dtype="float32", path="none", chat_template=str(tmp_path / "mine.jinja"))
    for content in (None, b"  \n", b"\xff\xfe"):
        if content:
            (tmp_path / "mine.jinja").write_bytes(content)
        with pytest.raises(ConfigError, match=r"model.chat_template must be a file .*mine.jinja"):
            read_chat_template(model)


def write_two(folder: Path) -> list[str]:
    paths = []
    for name, count in (("gsm8k", 3), ("math", 2)):
        (folder / name).mkdir()
        rows = [{"question": f"{name} {n}", "answer": n} for n in range(count)]
        paths.append(str(write(folder / name, rows, "jsonl")))
    return paths


def test_several_files_are_numbered_one_after_the_other_and_share_by_rows_or_weights_without_rows_left_out(tmp_path):
    paths = write_two(tmp_path)
    dataset = Dataset(*paths)
    uids = ["gsm8k/train/00000", "gsm8k/train/00001", "gsm8k/train/00002", "math/train/00000", "math/train/00001"]
    assert [row.uid for row in dataset] == [dataset.row(index).uid for index in range(len(dataset))] == uids
    assert dataset.row(3).data_source == "math/train"
    with pytest.raises(IndexError, match="rows 0 to 4"):
        dataset.row(5)
    assert Dataset(paths[0]).row_count == 3
    assert dataset.row_count == [FileShare(3, 3.0), FileShare(2, 2.0)]
    weighted = [{"path": path, "weight": weight} for path, weight in zip(paths, (1, 9), strict=True)]
    run = make_run(data={"train": weighted})
    assert read_train(run).row_count == [FileShare(3, 1.0), FileShare(2, 9.0)]
    dataset.files[0].keep_short(
        lambda prompts: [9 if prompt == "gsm8k 1" else 1 for prompt in prompts], most=3, drops=True
    )
    assert dataset.row_count == [FileShare(2, 2.0), FileShare(2, 2.0)]
    assert [row.prompt for row in dataset] == ["gsm8k 0", "gsm8k 2", "math 0", "math 1"]


FIRST, SECOND = make_picture(), make_picture(24, 8)
IMAGE_TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}="
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


def open_run(folder: Path, model: Path, rows: list[dict[str, Any]], **data: Any) -> Dataset:
    paths = {name: str(write(folder, rows, name=name)) for name in ("train", "eval")}
    return open_datasets(make_run(model={"path": str(model), "max_length": 128}, data=paths | data))[0]


def test_the_forms_of_the_field_give_the_same_row(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(FIRST)
    text = [{"bytes": FIRST, "path": None}], [FIRST], ["images/a.png"], [{"path": "images/a.png"}], "images/a.png"
    for images in text:
        row = Dataset(write(tmp_path, [make_picture_row(images, prompt="1<image>=")])).row(0)  # type: ignore[arg-type]
        assert (row.prompt, row.images, row.extra_info) == (f"1{PLACEHOLDER}=", [FIRST], {})
    chat = [{"role": "user", "content": "<image>What<image>"}]
    row = Dataset(write(tmp_path, [make_picture_row([FIRST, SECOND], prompt=chat)])).row(0)
    image = {"type": "image"}
    assert row.prompt == [{"role": "user", "content": [image, {"type": "text", "text": "What"}, image]}]
    assert row.images == [FIRST, SECOND]
    parts = [{"type": "image", "image": "images/a.png"}, {"type": "text", "text": "What"}]
    named = {"prompt": [{"role": "user", "content": parts}], "answer": "12"}
    for suffix in ("parquet", "jsonl"):
        row = Dataset(write(tmp_path, [named], suffix)).row(0)
        assert row.prompt == [{"role": "user", "content": [image, {"type": "text", "text": "What"}]}]
        assert row.images == [FIRST]


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    good = make_picture_row([{"bytes": FIRST}])
    bad = {
        "readable PNG": make_picture_row([{"bytes": b"\x89PNG"}]),
        r"a place \(<image>\) for each of 2 images, got 1": make_picture_row([{"bytes": FIRST}, {"bytes": SECOND}]),
        "got 0": make_picture_row([{"bytes": FIRST}], prompt="1="),
        "must be below the folder": make_picture_row([{"path": "../a.png"}]),
    }
    for reason, row in bad.items():
        with pytest.raises(ConfigError, match=f"row 1: .*{reason}"):
            open_run(tmp_path, model, [good, row])
    text = make_tiny_model(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"a text-only model \(qwen2\)"):
        open_run(tmp_path, text, [good])
    data = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "eval")}
    run = make_run(model={"path": str(text)}, data=data, mode="evaluate")
    with pytest.raises(ConfigError, match="a text-only model"):
        make_inputs(run)
    assert len(open_run(tmp_path, model, [good])) == 1


def test_images_count_in_the_length_of_a_prompt_and_the_size_of_a_row(tmp_path: Path, model: Path) -> None:
    rows = [make_picture_row([{"bytes": FIRST}]), make_picture_row([{"bytes": make_picture(64, 64)}])]
    with pytest.raises(ConfigError, match="1 of 2 are longer, up to 67 tokens in row 1"):
        open_run(tmp_path, model, rows)
    kept = open_run(tmp_path, model, rows, on_too_long="skip")
    assert [row.uid for row in kept] == ["train/00000"]
    assert len(open_run(tmp_path, model, rows, max_prompt_tokens=67)) == 2
    (tmp_path / "a.png").write_bytes(make_picture(64, 64))
    rows = [make_picture_row(["a.png"])]
    dataset = open_run(tmp_path, model, rows, max_prompt_tokens=100)
    with pytest.raises(ConfigError, match="row 0"):
        dataset.files[0].check_row_sizes(max_message_bytes=16_000)


def test_prompts_are_encoded_as_the_model_reads_them_and_a_damaged_image_costs_its_prompt_alone(tmp_path, model):
    dataset = open_run(tmp_path, model, [make_picture_row([{"bytes": FIRST}], prompt="1<image>=")])
    lease = Lease("0-0", "0", "train", 0, 0, 0, [0, 1])
    prompt = lease_scheduler.make_prompt(lease, dataset.row(0))
    assert decode(encode(prompt), type(prompt)) == prompt
    tokenizer = load_tokenizer(make_run(model={"path": str(model)}).model)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=10, vision=VisionModel(str(model)))
    token_ids, (image,) = encoder.encode(prompt)
    assert token_ids == [3, 14, IMAGE, IMAGE, 16, 13]
    assert (image.first_token, image.num_tokens, image.data) == (2, 2, FIRST)
    tokenizer.chat_template = IMAGE_TEMPLATE
    chat = make_picture_row([{"bytes": FIRST}], prompt=[{"role": "user", "content": "<image>1"}])
    asked = lease_scheduler.make_prompt(lease, open_run(tmp_path, model, [chat]).row(0))
    assert encoder.encode(asked)[0] == [14, IMAGE, IMAGE, 16, 3, 13]
    damaged = make_prompt(PLACEHOLDER, images=[make_picture(64, 64)[:-500]])
    with pytest.raises(PromptError, match="prompt test/0: an image must be complete"):
        encoder.encode(damaged)


def test_an_answer_carries_the_name_of_its_image_and_not_its_bytes() -> None:
    data = make_picture(400, 400)
    media = [Media("image", "train/00000/0", image_id(data), 1, 4)]
    packed = [make_packed(index=index, group_size=8, media=media) for index in (0, 1)]
    assert all(len(payload) < 1500 < len(data) for _, payload in packed)
    assert image_names(payload for _, payload in packed) == {image_id(data)}
    assert unpack(packed[0][1]).media == media
