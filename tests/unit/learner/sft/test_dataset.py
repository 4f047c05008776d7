import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from slipstream.buffer.archive.shards import tabulate
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig, SftConfig
from slipstream.learner.sft.conversation import Piece, chat_pieces
from slipstream.learner.sft.dataset import read_heldout, read_train
from tests.builders import make_trajectory
from tests.cases import cases
from tests.tiny_model import make_tokenizer
from tests.unit.learner.builders import make_model, make_run

TEMPLATE = "{% for m in messages %}{{ m.role }}={{ m.content }}<eos>+{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant={% endif %}"
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else 'x' }} {% endfor %}"
HEADERS = (
    "{% for m in messages %}{{ '<pad>' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
ROWS = [{"prompt": "12=", "response": "21"}, {"prompt": "345=", "response": "543"}]


def chat_tokenizer(template=TEMPLATE):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def make_file(folder: Path, rows, name="train.parquet") -> str:
    path = folder / name
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    return str(path)


def sft_run(folder: Path, rows=ROWS, *, max_length=64, template: str | None = None, variables=None, data=None, **sft):
    model = make_model(folder)
    if template is not None:
        chat_tokenizer(template or None).save_pretrained(model)
        if not template:
            (model / "chat_template.jinja").unlink(missing_ok=True)
    run = make_run(model, mode="sft", sft=SftConfig(**({"train_path": make_file(folder, rows)} | sft)))
    model = ModelConfig(dtype="float32", path=str(model), max_length=max_length, chat_template_kwargs=variables or {})
    return msgspec.structs.replace(run, model=model, data=msgspec.structs.replace(run.data, **(data or {})))


RECORD = {"question": "12=", "reward_model": {"style": "rule", "ground_truth": "21"}}
COLUMNS = {"data": {"columns": {"prompt": "question", "response": "reward_model.ground_truth"}}}
MISSING = {"data": {"columns": {"response": "record.missing"}}}
ANSWERED = conversation(("user", "1+2"), ("assistant", "3"))
PROMPT = conversation(("user", "1"), ("assistant", "2"), ("user", "3"))


@cases(
    "rows, settings, texts, trained",
    (ROWS, {}, ["12=21<eos>", "345=543<eos>"], ["21<eos>", "543<eos>"]),
    ([ROWS[0] | {"response": "21<eos>"}], {}, ["12=21<eos>"], ["21<eos>"]),
    ([RECORD], COLUMNS, ["12=21<eos>"], ["21<eos>"]),
    ([{"messages": ANSWERED}], {"template": TEMPLATE}, ["user=1+2<eos>+assistant=3<eos>+"], ["3<eos>"]),
    (
        [{"prompt": PROMPT, "response": "4"}],
        {"template": TEMPLATE},
        ["user=1<eos>+assistant=2<eos>+user=3<eos>+assistant=4<eos>+"],
        ["4<eos>"],
    ),
)
def test_responses_are_trained_whatever_form_the_rows_have(tmp_path, rows, settings, texts, trained):
    tokenizer, found = make_tokenizer(), read_train(sft_run(tmp_path, rows, **settings)).demonstrations
    assert [tokenizer.decode(each.token_ids) for each in found] == texts
    assert [tokenizer.decode(each.token_ids[each.model_mask]) for each in found] == trained


SHOWING = "{% if tools %}{{ tools | length }}{{ tools[0].name }}{% endif %}{{ level }}={% for m in messages %}"
SHOWING += "{{ m.content }}<eos>{% endfor %}"
SCHEMAS = [{"name": "7"}, {"name": "8", "parameters": {"a": {"type": "9"}}}]


@pytest.mark.parametrize("form", ["messages", "prompt"])
@cases(
    "columns, start",
    ({"tools": SCHEMAS}, "275="),
    ({"tools": '[{"name": "7"}]'}, "175="),
    ({"tools": None}, "5="),
    ({"tools": []}, "5="),
    ({"chat_template_kwargs": {"level": "6"}}, "6="),
    ({"chat_template_kwargs": '{"level": "6"}'}, "6="),
)
def test_rows_show_their_tools_and_set_variables_of_the_template(tmp_path, form, columns, start):
    row = {"messages": ANSWERED} if form == "messages" else {"prompt": ANSWERED[:1], "response": "3"}
    run = sft_run(tmp_path, [row | columns], template=SHOWING, variables={"level": "5"})
    (found,) = read_train(run).demonstrations
    assert make_tokenizer().decode(found.token_ids) == f"{start}1+2<eos>3<eos>"


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
    for settings, expected in (({"eval_path": path}, 6), ({"eval_path": path, "eval_rows": 4}, 4), ({}, 0)):
        assert len(read_heldout(sft_run(tmp_path, **settings)).demonstrations) == expected


UNFIT = [*ROWS, *({"prompt": "1=", "response": none} for none in ("", None)), {"prompt": "1" * 64, "response": "1"}]
SKIP = {"data": {"on_too_long": "skip"}}
SHOWN = {"template": SHOWING}
PAIRS = {"objective": "pairs", "template": "{% for m in messages %}{{ m.content }}={% endfor %}"}
TEXT = {"prompt": "1=", "chosen": "2", "rejected": "3"}


def test_unfit_rows_are_skipped_and_counted_on_request(tmp_path):
    file = read_train(sft_run(tmp_path, UNFIT, **SKIP))
    assert (len(file.demonstrations), file.num_empty, file.num_too_long) == (2, 2, 1)


@cases(
    "rows, complaint, settings",
    (UNFIT, "row 2: the response must not be empty", {}),
    (ROWS, "row 1: it must hold at most model.max_length (6) tokens, got 8", {"max_length": 6}),
    (UNFIT[2:], "got none: 2 rows with nothing to learn and 1 longer", SKIP),
    (pa.Table.from_pylist(ROWS).slice(0, 0), "must hold at least one demonstration", {}),
    ([ROWS[0], {"prompt": None, "response": "2"}], "row 1: `prompt` must be filled", {}),
    ([{"prompt": "1", "reply": "2"}], "must have the column `response`, got only prompt, reply", {}),
    ([{"token_ids": [4, 5]}], "must have the column `prompt`, got only token_ids", {}),
    ([{"prompt": "1", "record": {"a": "2"}}], "`record.missing`", MISSING),
    ([{"prompt": 1, "response": "2"}], "`prompt` must hold text or lists of messages, got int64", {}),
    ([{"prompt": "1", "response": 2}], "`response` must hold text, got int64", {}),
    ([{"messages": "1"}], "`messages` must hold lists of records with `role` and `content`", {}),
    ([{"messages": [{"from": "user", "text": "1"}]}], "`messages` must hold lists of records", {}),
    ([{"token_ids": ["4"], "model_mask": [True]}], "`token_ids` must hold lists of integers", {}),
    ([{"token_ids": [4], "model_mask": [0.5]}], "`model_mask` must hold lists of booleans", {}),
    ([{"token_ids": [4, 5], "model_mask": [True]}], "row 0: token_ids and model_mask must be filled lists", {}),
    ([{"token_ids": [4, 5000], "model_mask": [False, True]}], "row 0: token ids must lie between 0 and 40", {}),
    ([{"token_ids": [-1, 5], "model_mask": [False, True]}], "row 0: token ids must lie between 0 and 40", {}),
    ([{"messages": ANSWERED}], "lists of messages need a chat template", {"template": ""}),
    ([{"messages": ANSWERED, "tools": "add"}], "row 0: `tools` must hold a list of schemas, .*, got 'add'", SHOWN),
    ([{"messages": ANSWERED, "tools": "{}"}], "row 0: `tools` must hold a list of schemas, .*, got '{}'", SHOWN),
    (
        [{"messages": ANSWERED, "chat_template_kwargs": [1]}],
        "row 0: `chat_template_kwargs` must hold a record, or its JSON text", SHOWN,
    ),
    (
        [{"messages": ANSWERED, "chat_template_kwargs": {"tokenize": True}}],
        "row 0: chat_template_kwargs must hold variables of the templ", SHOWN,
    ),
    ([{"messages": ANSWERED}], "never mentions 'lvl'", SHOWN | {"variables": {"lvl": "5"}}),
    (
        [TEXT], "model.chat_template_kwargs must be empty for pairs",
        SHOWN | {"variables": {"level": "5"}, "objective": "pairs"},
    ),
    ([TEXT | {"chosen": ""}], "row 0: the response must not be empty", PAIRS),
    ([{"prompt": "1=", "chosen": "2"}], "must have the column `rejected`", PAIRS),
)  # fmt: skip
def test_rows_settings_and_columns_that_do_not_fit_are_named(tmp_path, rows, complaint, settings):
    with pytest.raises(ConfigError) as caught:
        read_train(sft_run(tmp_path, rows, **settings))
    parts = complaint.split(".*")
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


SHAREGPT = [{"from": "human", "value": "1+2"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "jsonl.gz", "csv"])
@cases(
    "row, text",
    ({"prompt": "12=", "response": "21"}, "12=21<eos>"),
    ({"question": "12=", "answer": "21", "other": "no"}, "12=21<eos>"),
    ({"instruction": "1", "input": "2=", "output": "21"}, "12=21<eos>"),
    ({"conversations": SHAREGPT}, "user=1+2<eos>+assistant=3<eos>+"),
    ({"messages": ANSWERED}, "user=1+2<eos>+assistant=3<eos>+"),
)
def test_common_columns_are_read_from_every_format(tmp_path, suffix, row, text):
    if suffix == "csv" and len(row) == 1:
        pytest.skip("CSV holds no lists")
    template = {"template": TEMPLATE} if len(row) == 1 else {}
    path, lines = tmp_path / f"mine.{suffix}", "\n".join(json.dumps(each) for each in [row, {**row, "index": 1}, row])
    table = pa.Table.from_pylist([row] * 3)
    if suffix == "csv":
        pa_csv.write_csv(table, path)
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        text_of = {"jsonl": lines, "jsonl.gz": lines, "json": f"[{lines.replace(chr(10), ',')}]"}[suffix].encode()
        path.write_bytes(gzip.compress(text_of) if suffix.endswith("gz") else text_of)
    run = sft_run(tmp_path, train_path=str(path), data={"max_rows": 2}, **template)
    found = read_train(run).demonstrations
    # The tokenizer has no line breaks.
    assert [make_tokenizer().decode(each.token_ids) for each in found] == [text, text]


@cases(
    "line, words",
    ("[1]", "mine.jsonl: row 1 must be a JSON record, got b'\\[1\\]'"),
    ('{"prompt": [1], "response": "2"}', "column `prompt` must hold values of one type"),
)
def test_json_rows_that_do_not_fit_are_named(tmp_path, line, words):
    (tmp_path / "mine.jsonl").write_text(f'{{"prompt": "1", "response": "2"}}\n{line}')
    with pytest.raises(ConfigError, match=words):
        read_train(sft_run(tmp_path, train_path=str(tmp_path / "mine.jsonl")))


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    run = sft_run(tmp_path)
    path = Path(run.sft.train_path)
    path.write_bytes(path.read_bytes()[:4] + bytes(40) + path.read_bytes()[44:])
    with pytest.raises(ConfigError, match=r"^\S*train\.parquet must be a .* cannot be read from row 0 on: "):
        read_train(run)
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"train\.parquet must be a file of demonstrations, .*, but cannot be read: "):
        read_train(run)
    path.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read_train(run)


@cases(
    "template, ends, trained",
    # GLM: the header of the next turn ends a turn.
    (HEADERS, [0, 1], ["3<pad>", "5<eos>"]),
    (HEADERS, [1], ["3", "5<eos>"]),
    # Gemma, Phi 3: text follows the end token, which the tokenizer does not name.
    ("{% for m in messages %}{{ m.content }}<pad>=<eos>{% endfor %}", [0, 1], ["3<pad>", "5<pad>"]),
)
def test_each_turn_is_trained_up_to_the_first_end_token_of_the_model(tmp_path, template, ends, trained):
    rows = [{"messages": [*ANSWERED, *conversation(("user", "4"), ("assistant", "5"))]}]
    run = sft_run(tmp_path, rows, template=template)
    for name in ("generation_config.json", "config.json"):
        file = Path(run.model.path) / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    (found,) = read_train(run).demonstrations
    tokenizer, starts = make_tokenizer(), np.diff(found.model_mask.astype(int), prepend=0) == 1
    parts = np.split(found.token_ids, np.flatnonzero(starts))[1:]
    masks = np.split(found.model_mask, np.flatnonzero(starts))[1:]
    assert [tokenizer.decode(part[mask]) for part, mask in zip(parts, masks, strict=True)] == trained
    (Path(run.model.path) / "generation_config.json").unlink()
    assert read_train(run).demonstrations[0].model_mask.tolist() == found.model_mask.tolist()


def test_a_conversation_has_pieces_unless_its_assistant_says_nothing_and_calls_nothing():
    for turns in ([("user", "1")], [("user", "1"), ("assistant", "")], []):
        assert chat_pieces(conversation(*turns), tokenizer=chat_tokenizer()) == []
    template = "{% for m in messages %}{{ m.content or m.calls }}<eos>{% endfor %}"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "calls": "2"}]
    assert chat_pieces(messages, tokenizer=chat_tokenizer(template)) == [Piece("1<eos>", False), Piece("2<eos>", True)]


@cases(
    "template, complaint",
    (FORGETFUL, "provide the columns token_ids and model_mask"),
    ("{{ raise_exception('roles must alternate') }}", "must fit the chat template: roles must alternate"),
)
def test_a_template_that_rewrites_the_beginning_or_does_not_know_the_messages_is_refused(template, complaint):
    messages = [*ANSWERED, *conversation(("user", "3"), ("assistant", "4"))]
    with pytest.raises(ConfigError, match=complaint):
        chat_pieces(messages, tokenizer=chat_tokenizer(template))


WHOLE = {side: conversation(("user", "1"), ("assistant", text)) for side, text in (("chosen", "2"), ("rejected", "3"))}


@cases(
    "row, expected",
    (TEXT, ["1=2<eos>", "1=3<eos>"]),
    (TEXT | {"prompt": conversation(("user", "1"))}, ["1=2=", "1=3="]),
    ({"prompt": "1", "chosen": WHOLE["chosen"][1:], "rejected": WHOLE["rejected"][1:]}, ["1=2=", "1=3="]),
    (WHOLE, ["1=2=", "1=3="]),
)
def test_pairs_are_texts_or_messages(tmp_path, row, expected):
    (pair,) = read_train(sft_run(tmp_path, [row], **PAIRS)).demonstrations
    assert [make_tokenizer().decode(side) for side in (pair.chosen, pair.rejected)] == expected
