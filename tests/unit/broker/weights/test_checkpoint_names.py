"""Published names, shapes and bytes are those of a checkpoint on the hub."""

import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, WeightConverter

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights import checkpoint_names
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from tests.families import FAMILIES, make_family, make_family_module
from tests.tiny_model import make_tiny_module

KINDS = ("gemma2", "mixtral", "deepseek_v3", "qwen3_next")
"""Families with a tied head, different names, buffers, and experts next to other layers; they cover all others."""
PUBLISHED = [
    name if name in KINDS else pytest.param(name, marks=pytest.mark.long)
    for name, (layout, _) in FAMILIES.items()
    if layout
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_is_published_as_its_checkpoint_and_loaded_from_it(tmp_path, name):
    module, other = make_family_module(name, seed=1), make_family_module(name, seed=2)
    make_family(tmp_path, name, seed=1)
    with torch.device("meta"):
        names = CheckpointNames(make_family_module(name))
    saved, sent = load_file(tmp_path / name / "model.safetensors"), dict(names.convert(module.state_dict().items()))
    assert list(sent) == [tensor for tensor, _, _ in names.metadata(torch.float32)]
    assert sent.keys() == saved.keys()
    assert all(tensor.equal(saved[tensor_name]) for tensor_name, tensor in sent.items())
    names.load_into(other, sent)
    assert all(tensor.equal(other.state_dict()[held]) for held, tensor in module.state_dict().items())


def test_a_tied_tensor_is_published_once():
    names = CheckpointNames(make_tiny_module(is_tied=True))
    assert names.tied == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert "lm_head.weight" not in names.tensors


def test_routing_biases_travel_in_float32():
    dtypes = {
        name: dtype for name, _, dtype in CheckpointNames(make_family_module("glm4_moe")).metadata(torch.bfloat16)
    }
    full = [name for name, dtype in dtypes.items() if dtype == torch.float32]
    assert full == ["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_only_one_layer_is_converted_at_a_time():
    module = make_family_module("qwen3_moe")
    copies = list[weakref.ref[torch.Tensor]]()
    most = 0
    for name, tensor in CheckpointNames(module).convert(module.state_dict().items()):
        if ".experts." in name:
            copies.append(weakref.ref(tensor))
        most = max(most, sum(copy() is not None for copy in copies))
    # Four experts, gate and up.
    assert (len(copies), most) == (2 * 4 * 3, 8)


def fuse(monkeypatch, *operations):
    """Let checkpoints of Llama hold query, key and value as one tensor."""
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    conversion = WeightConverter("self_attn.qkv_proj.weight", parts, operations=list(operations))
    monkeypatch.setattr(checkpoint_names, "get_model_conversion_mapping", lambda *_, **__: [conversion])


def test_tensors_that_are_one_in_the_checkpoint_wait_for_each_other(monkeypatch):
    fuse(monkeypatch, Chunk(dim=0))
    module, other = make_family_module("llama", seed=1), make_family_module("llama", seed=2)
    held = module.state_dict()
    names = CheckpointNames(module)
    sent = dict(names.convert(reversed(held.items())))
    parts = [held[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert sent["model.layers.1.self_attn.qkv_proj.weight"].equal(torch.cat(parts))
    assert not any("q_proj" in name for name in sent)
    names.load_into(other, sent)
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in held.items())


def test_a_quantized_checkpoint_is_refused_by_name():
    module = make_family_module("gpt_oss")
    module.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(WeightTransferError, match=r"GptOssForCausalLM .* must be unquantized, .* got mxfp4"):
        CheckpointNames(module)


class Lossy(Chunk):
    """A conversion that reverts to the first tensor only."""

    @property
    def reverse_op(self):
        reverse = super().reverse_op
        convert = reverse.convert
        reverse.convert = lambda tensors, **rest: convert(dict(list(tensors.items())[:1]), **rest)
        return reverse


def test_a_layout_that_cannot_be_undone_is_refused_by_name(monkeypatch):
    fuse(monkeypatch, Lossy(dim=0))
    with pytest.raises(WeightTransferError, match="LlamaForCausalLM cannot be published: its layout"):
        CheckpointNames(make_family_module("llama"))
