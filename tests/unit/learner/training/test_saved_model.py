"""Saved models: every tensor is in one file of one rank, and no rank holds more than its files."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.configs.data import LoraConfig, ModelConfig
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.ranks import Ranks
from slipstream.learner.training import saved_model
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.saved_model import FOLDER, copy_model, save_model
from tests.families import make_family
from tests.unit.learner.builders import CPU, make_alone, make_model

FILE_BYTES = 32 * 1024


def load(path, *, dtype="bfloat16", lora=None):
    config = ModelConfig(path=str(path), max_length=64, dtype=dtype, lora=lora)
    return ModelEngine(load_policy(config, device=CPU)), config


def tensors_of(write):
    """Tensors that a write holds in memory."""
    return next((each for each in write.args if isinstance(each, dict)), {})


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_ranks_copy_disjoint_files_of_bounded_size_that_transformers_loads(tmp_path, monkeypatch, num_ranks):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load(make_model(tmp_path))
    whole, largest = dict(engine.gather_parameters()), 0
    total = sum(tensor.nbytes for tensor in whole.values())
    folder, seen = tmp_path / "saved", []
    for rank in reversed(range(num_ranks)):
        writes = copy_model(engine, config=config, ranks=Ranks(rank=rank, size=num_ranks, device=CPU))
        held = [tensor for write in writes.values() for tensor in tensors_of(write).values()]
        largest = max(largest, sum(tensor.nbytes for tensor in held))
        seen += [name for write in writes.values() for name in tensors_of(write)]
        assert (FOLDER in writes) == (rank == 0)
        for name, write in writes.items():
            write(folder / name if name else folder)
    assert sorted(seen) == sorted(whole)
    # Files are dealt out one by one.
    assert largest <= total / num_ranks + FILE_BYTES
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) == set(whole)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.bfloat16
    assert all(tensor.equal(whole[name]) for name, tensor in again.named_parameters())


def test_the_final_model_is_written_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load(make_model(tmp_path), dtype="float32")
    alive, most, original = set(), [0], saved_model._copied
    sizes = {}

    def copy(tensor):
        copied = original(tensor)
        key = copied.data_ptr()
        alive.add(key)
        sizes[key] = copied.nbytes
        weakref.finalize(copied, alive.discard, key)
        most[0] = max(most[0], sum(sizes[each] for each in alive))
        return copied

    monkeypatch.setattr(saved_model, "_copied", copy)
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    whole = dict(engine.gather_parameters())
    assert most[0] <= 2 * FILE_BYTES < sum(tensor.nbytes for tensor in whole.values()) / 2
    files = sorted((tmp_path / "final").glob("*.safetensors"))
    assert len(files) > 4
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == whole.keys()
    assert all(tensor.equal(saved[name]) for name, tensor in whole.items())


def test_a_rank_that_cannot_write_still_gathers_and_then_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load(make_model(tmp_path))
    gathered, original = [], engine.gather_parameters

    def gather(**options):
        for name, tensor in original(**options):
            gathered.append(name)
            yield name, tensor

    engine.gather_parameters = gather
    (tmp_path / "final").write_text("not a folder")
    with pytest.raises(OSError, match="final"):
        save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    assert gathered == [name for name, _ in original()]


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 2**31])
def test_an_adapter_on_a_bfloat16_base_is_merged_without_rounding(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(saved_model, "FILE_BYTES", file_bytes)
    engine, config = load(make_model(tmp_path), lora=LoraConfig(rank=4))
    for _, parameter in engine.model.weights():
        torch.nn.init.normal_(parameter, std=1e-3)
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    files = (tmp_path / "final").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert merged.keys() == engine.model.saved_names.tensors.keys()
    module = engine.model.causal_lm.get_submodule("model.layers.0.self_attn.q_proj")
    product = module.scaling["default"] * (module.lora_B.default.weight.float() @ module.lora_A.default.weight.float())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert merged[name].equal(module.base_layer.weight.float() + product)
    assert not merged[name].bfloat16().float().equal(merged[name])


def test_experts_are_saved_in_the_layout_of_the_hub(tmp_path):
    path = make_family(tmp_path, "qwen3_moe")
    engine, config = load(path, dtype="float32")
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    base, saved = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "final"))
    assert base.keys() == saved.keys()
    assert all(tensor.equal(saved[name]) for name, tensor in base.items())
