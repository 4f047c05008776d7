"""The fingerprint of a checkpoint tells models apart without loading them, and one model is itself everywhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.base import ConfigError
from slipstream.runtime.model_files import ModelFingerprint, check_same_model, fingerprint
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def print_of(folder: Path) -> ModelFingerprint:
    found = fingerprint(str(folder))
    assert found is not None
    return found


def refusal(copy: Path, original: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_same_model(str(copy), fingerprint(str(original)))
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_fingerprint_covers_config_shapes_and_tokenizer(original):
    found = print_of(original)
    assert (found.architectures, found.vocab_size, found.hidden_size) == (["Qwen2ForCausalLM"], 41, 64)
    assert found.tie_word_embeddings is False
    # Two blocks of 12 (with three biases), embedding, final norm; the output head is left out.
    assert found.num_tensors == 2 * 12 + 2
    assert found.tokenizer_files.keys() >= {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 64),
        ("num_key_value_heads", 2),
        ("tie_word_embeddings", True),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(copy, original, field, value):
    change_config(copy, **{field: value})
    sentence = refusal(copy, original)
    assert f"with {field} {value} here and {getattr(print_of(original), field)} at the broker" in sentence
    assert "copy the broker's folder" in sentence
    assert repr(str(copy)) in sentence


def test_missing_tensors_other_shapes_and_another_tokenizer_are_detected(copy, original):
    change_tensors(copy, lambda tensors: tensors.pop("model.norm.weight"))
    assert "num_tensors 25 here and 26" in refusal(copy, original)
    change_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "num_parameters" in refusal(copy, original)
    change_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8, 8)}))
    assert "with shapes " in refusal(copy, original)
    (copy / "model.safetensors").write_bytes((original / "model.safetensors").read_bytes())
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace('"a"', '"A"'))
    assert "with tokenizer.json of hash" in refusal(copy, original)


def test_other_weights_of_the_same_shapes_are_the_same_model_also_without_the_output_head_of_a_tied_one(copy, original):
    change_tensors(copy, lambda tensors: tensors["model.norm.weight"].add_(1))
    check_same_model(str(copy), print_of(original))
    change_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    check_same_model(str(copy), print_of(original))


def test_weights_in_several_files_are_the_same_as_in_one(copy, original):
    tensors = load_file(copy / "model.safetensors")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    placed = {}
    for number, half in enumerate(halves):
        save_file(half, copy / f"part-{number}.safetensors")
        placed |= dict.fromkeys(half, f"part-{number}.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert print_of(copy) == print_of(original)


CONTENTS = {
    "config.json": [b"", b"\xff" * 64, b"[]", b'{"vocab_size": "many"}'],
    "model.safetensors": [
        None,
        b"",
        b"\xff" * 64,
        (9).to_bytes(8, "little") + b'{"a": [1]}',
        b"\x02" + b"\0" * 7 + b"[]",
    ],
    "tokenizer.json": [None],
}


@pytest.mark.parametrize(("name", "content"), [(name, each) for name in CONTENTS for each in CONTENTS[name]])
def test_what_one_side_lacks_or_cannot_read_is_not_compared(copy, original, name, content):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    found = fingerprint(str(copy))
    assert (found is None) == (name == "config.json")
    assert name != "model.safetensors" or found.shapes is None
    check_same_model(str(copy), print_of(original))
    check_same_model(str(original), found)


@pytest.mark.parametrize("path", ["Qwen/not-in-any-cache", "no such//thing", ""])
def test_a_name_outside_the_cache_has_no_fingerprint_and_the_hub_is_not_asked(path):
    assert fingerprint(path) is None
    check_same_model(path, None)


def test_a_name_of_the_hub_is_found_in_its_cache_and_of_a_multimodal_config_the_language_model_counts(
    original, copy, tmp_path, monkeypatch
):
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "abc"
    shutil.copytree(original, snapshot)
    (tmp_path / "models--owner--tiny" / "refs").mkdir()
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint("owner/tiny") == print_of(original)
    change_config(copy, vocab_size=None, text_config={"vocab_size": 7})
    assert print_of(copy).vocab_size == 7
