"""Checks of what a run reads: a store that is away or loses data, damaged weights, rows without a column."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.inputs import check_data, check_model_folder, check_store, judge_server
from slipstream.launch.diagnose.machine import Result
from tests.builders import make_run
from tests.fakes import write_rows
from tests.unit.slipstream.launch.diagnose.findings import assert_found, by_name

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4, "hidden_size": 8}
VOCABULARY = {"0": 0, "1": 1, "=": 2}
MIB = 2**20
ADDRESS = "redis://host:6379/0"
WELL = {
    "redis_version": "7.4.6",
    "role": "master",
    "used_memory": 10 * MIB,
    "maxmemory": 1024 * MIB,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = {"model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"a": np.zeros((4, 8), np.float32), "b": np.ones(8, np.float32)}, folder / "model.safetensors")
    return folder


def run_of(model: Path, **overrides: Any) -> RunConfig:
    return make_run(model={"path": str(model)}, **overrides)


def test_a_whole_model_passes_and_a_damaged_config_or_none_does_not(model: Path, tmp_path: Path) -> None:
    findings = check_model_folder(run_of(model))
    assert [(each.name, each.verdict) for each in findings] == [("model", "ok"), ("weights", "ok"), ("tokenizer", "ok")]
    assert "Qwen2ForCausalLM, 40 parameters" in findings[0].found
    (model / "config.json").write_text("{")
    assert [each.verdict for each in check_model_folder(run_of(model))] == ["fail"]
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_model_folder(run_of(tmp_path / "none"))


def test_weights_must_be_whole(model: Path) -> None:
    def weights() -> Result:
        return by_name(check_model_folder(run_of(model)))["weights"]

    parts = {"a": "model.safetensors", "c": "model.safetensors", "d": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert weights().found == "model.safetensors lacks 1 tensors, such as c; model-2.safetensors is missing"
    (model / "model.safetensors.index.json").unlink()
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert_found(weights(), "fail", "model.safetensors is damaged or cut short")
    file.write_bytes(b"no safetensors")
    assert weights().verdict == "fail"
    file.unlink()
    assert "neither model.safetensors nor its index" in weights().found
    (model / "pytorch_model.bin").touch()
    assert weights().verdict == "warn"


def test_a_tokenizer_must_fit_the_model(model: Path) -> None:
    def tokenizer() -> Result:
        return by_name(check_model_folder(run_of(model)))["tokenizer"]

    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 2}))
    assert_found(tokenizer(), "fail", "token 2 has no embedding: config.json has vocab_size 2")
    (model / "tokenizer.json").write_text("{")
    assert "is damaged" in tokenizer().found
    (model / "tokenizer.json").rename(model / "vocab.json")
    assert tokenizer().verdict == "warn"
    (model / "vocab.json").unlink()
    assert tokenizer().found.endswith("has no tokenizer")


def test_what_a_run_makes_by_itself_may_be_missing_and_demonstrations_are_left_to_their_reader(tmp_path: Path) -> None:
    prepare = [{"creates": str(tmp_path / made), "module": "maker", "args": []} for made in ("model", "data")]
    data = {"train": str(tmp_path / "data/train.parquet"), "eval": str(tmp_path / "data/heldout.parquet")}
    run = run_of(tmp_path / "model", prepare=prepare, data=data)
    for (finding,) in (check_model_folder(run), check_data(run)):
        assert_found(finding, "skipped", "`slipstream prepare`")
    (finding,) = check_data(run_of(tmp_path / "model", mode="sft", sft={"train_path": "rows.parquet"}))
    assert finding.verdict == "skipped"


def test_rows_are_counted_few_are_a_warning_and_one_without_the_needed_column_is_an_error(model, tmp_path):
    rows = str(write_rows(tmp_path / "rows.parquet"))
    data = {"train": rows, "eval": rows}
    found, template = check_data(run_of(model, data=data))
    assert (found.verdict, template.name, template.verdict) == ("ok", "chat template", "ok")
    assert found.found.startswith("10 rows to train on, 10 of ")
    few = check_data(run_of(model, data=data, evaluation={"num_final_prompts": 100}))[0]
    assert_found(few, "warn", "evaluation.num_final_prompts")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"row 1: `prompt` or `question` or .* must be filled"):
        check_data(run_of(model, data=data | {"train": str(tmp_path / "rows.jsonl")}))


def test_messages_need_a_template_that_takes_them(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}\n' * 10)
    run = run_of(model, data={"train": str(rows), "eval": str(rows)})
    assert by_name(check_data(run))["chat template"].found.endswith("has no template")
    for template, found in (
        ("{{ raise_exception('system only') }}", "it does not take the messages of the first prompt"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "the first prompt has 2 characters with it"),
    ):
        (model / "chat_template.jinja").write_text(template)
        assert by_name(check_data(run))["chat template"].found == found


def test_a_store_must_answer_and_the_embedded_one_only_while_its_run_is_in_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.launch.diagnose.inputs._STORE_TIMEOUT_S", 0.2)
    away = make_run(buffer={"store": {"kind": "redis", "url": f"unix://{tmp_path}/none.sock"}})
    with pytest.raises(StoreUnavailableError, match="no store answered at unix:"):
        check_store(away, tmp_path, is_live=False)
    (finding,) = check_store(make_run(), tmp_path, is_live=False)
    assert_found(finding, "ok", "starts with the run, durability standard")


@pytest.mark.parametrize(
    ("changed", "name", "verdict", "found"),
    [
        ({}, "store", "ok", "Redis 7.4.6 at redis://host:6379/0"),
        ({}, "store memory", "ok", "10 MiB of 1,024 MiB, policy noeviction"),
        ({}, "store persistence", "ok", "append-only file"),
        ({"role": "slave"}, "store", "fail", "is a replica"),
        ({"used_memory": 900 * MIB}, "store memory", "warn", "900 MiB of 1,024 MiB"),
        ({"used_memory": 1020 * MIB}, "store memory", "fail", "1,020 MiB of 1,024 MiB"),
        ({"maxmemory": 0, "total_system_memory": 100 * MIB, "used_memory": 90 * MIB}, "store memory", "warn", "of 100"),
        ({"aof_enabled": 0}, "store persistence", "warn", "no append-only file"),
        ({"aof_last_write_status": "err"}, "store persistence", "fail", "the last write to its disk failed"),
    ],
)
def test_a_server_is_judged_by_what_it_tells(changed: dict[str, Any], name: str, verdict: str, found: str) -> None:
    assert_found(by_name(judge_server(WELL | changed, address=ADDRESS, is_durable=True))[name], verdict, found)
    kept_nowhere = judge_server(WELL | {"aof_enabled": 0}, address=ADDRESS, is_durable=False)
    assert by_name(kept_nowhere)["store persistence"].verdict == "ok", "by choice"
