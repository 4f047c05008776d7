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
from slipstream.launch.diagnose.machine import Finding
from tests.builders import make_run
from tests.fakes import write_rows

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4, "hidden_size": 8}
VOCABULARY = {"0": 0, "1": 1, "=": 2}
MIB = 2**20
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


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings}


# --- the model -------------------------------------------------------------------------------------------------------
def test_a_whole_model_passes(model: Path) -> None:
    findings = check_model_folder(run_of(model))
    assert [(each.name, each.verdict) for each in findings] == [("model", "ok"), ("weights", "ok"), ("tokenizer", "ok")]
    assert "Qwen2ForCausalLM, 40 parameters" in findings[0].found


def test_weights_that_are_cut_short_fail(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    weights = by_name(check_model_folder(run_of(model)))["weights"]
    assert (weights.verdict, "model.safetensors is damaged or cut short" in weights.found) == ("fail", True)
    file.write_bytes(b"no safetensors")
    assert by_name(check_model_folder(run_of(model)))["weights"].verdict == "fail"
    file.unlink()
    assert "neither model.safetensors nor its index" in by_name(check_model_folder(run_of(model)))["weights"].found
    (model / "pytorch_model.bin").touch()
    assert by_name(check_model_folder(run_of(model)))["weights"].verdict == "warn"


def test_files_and_tensors_that_the_index_names_must_be_there(model: Path) -> None:
    parts = {"a": "model.safetensors", "c": "model.safetensors", "d": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    found = by_name(check_model_folder(run_of(model)))["weights"].found
    assert found == "model.safetensors lacks 1 tensors, such as c; model-2.safetensors is missing"


def test_a_tokenizer_must_fit_the_model(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 2}))
    tokenizer = by_name(check_model_folder(run_of(model)))["tokenizer"]
    assert (tokenizer.verdict, tokenizer.found) == ("fail", "token 2 has no embedding: config.json has vocab_size 2")
    (model / "tokenizer.json").write_text("{")
    assert "is damaged" in by_name(check_model_folder(run_of(model)))["tokenizer"].found
    (model / "tokenizer.json").rename(model / "vocab.json")
    assert by_name(check_model_folder(run_of(model)))["tokenizer"].verdict == "warn"
    (model / "vocab.json").unlink()
    assert by_name(check_model_folder(run_of(model)))["tokenizer"].found.endswith("has no tokenizer")


def test_a_damaged_config_fails_and_a_missing_model_is_an_error(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text("{")
    assert [each.verdict for each in check_model_folder(run_of(model))] == ["fail"]
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_model_folder(run_of(tmp_path / "none"))


def test_what_a_run_makes_by_itself_may_be_missing(tmp_path: Path) -> None:
    prepare = [{"creates": str(tmp_path / made), "module": "maker", "args": []} for made in ("model", "data")]
    data = {"train": str(tmp_path / "data/train.parquet"), "heldout": str(tmp_path / "data/heldout.parquet")}
    run = run_of(tmp_path / "model", prepare=prepare, data=data)
    for findings in (check_model_folder(run), check_data(run)):
        assert [each.verdict for each in findings] == ["skipped"]
        assert "`slipstream prepare`" in findings[0].found


# --- the data --------------------------------------------------------------------------------------------------------
def test_rows_are_counted_and_few_are_a_warning(model: Path, tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.parquet"))
    findings = check_data(run_of(model, data={"train": rows, "heldout": rows}))
    assert [(each.name, each.verdict) for each in findings] == [("data", "ok"), ("chat template", "ok")]
    assert findings[0].found.startswith("10 rows to train on, 10 of ")
    few = run_of(model, data={"train": rows, "heldout": rows}, evaluation={"final_prompts": 100})
    assert (check_data(few)[0].verdict, "evaluation.final_prompts" in check_data(few)[0].found) == ("warn", True)


def test_a_row_without_the_needed_column_is_an_error(model: Path, tmp_path: Path) -> None:
    rows, good = tmp_path / "rows.jsonl", str(write_rows(tmp_path / "rows.parquet"))
    rows.write_text('{"prompt": "1=", "answer": "1"}\n{"answer": "2"}\n')
    with pytest.raises(ConfigError, match="row 1: `prompt` or `question` must be filled"):
        check_data(run_of(model, data={"train": str(rows), "heldout": good}))


def test_messages_need_a_template_that_takes_them(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}\n' * 10)
    run = run_of(model, data={"train": str(rows), "heldout": str(rows)})
    assert by_name(check_data(run))["chat template"].found.endswith("has no template")
    template = model / "chat_template.jinja"
    template.write_text("{{ raise_exception('system messages only') }}")
    assert by_name(check_data(run))["chat template"].found == "it does not take the messages of the first prompt"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert by_name(check_data(run))["chat template"].found == "the first prompt has 2 characters with it"


def test_demonstrations_are_left_to_their_reader(model: Path) -> None:
    run = run_of(model, mode="sft", sft={"train_path": "rows.parquet"})
    assert [each.verdict for each in check_data(run)] == ["skipped"]


# --- the store -------------------------------------------------------------------------------------------------------
def test_a_store_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.launch.diagnose.inputs._STORE_TIMEOUT_S", 0.2)
    away = make_run(buffer={"store": {"kind": "redis", "url": f"unix://{tmp_path}/none.sock"}})
    with pytest.raises(StoreUnavailableError, match="no store answered at unix:"):
        check_store(away, tmp_path, is_live=False)


def test_the_embedded_store_is_asked_only_while_the_run_is_in_progress(tmp_path: Path) -> None:
    (finding,) = check_store(make_run(), tmp_path, is_live=False)
    assert (finding.verdict, "starts with the run, durability standard" in finding.found) == ("ok", True)


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
    finding = by_name(judge_server(WELL | changed, address="redis://host:6379/0", is_durable=True))[name]
    assert (finding.verdict, found in finding.found, bool(finding.fix)) == (verdict, True, verdict != "ok")


def test_a_store_that_keeps_nothing_by_choice_is_in_order() -> None:
    findings = judge_server(WELL | {"aof_enabled": 0}, address="unix:///x", is_durable=False)
    assert by_name(findings)["store persistence"].verdict == "ok"
