"""Published models in their real widths, on fake tensors: dtypes of matrix products, and memory of a layer."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.load import load
from slipstream.learner.training import step_memory
from slipstream.learner.training.step_memory import Allocations, layer_input_bytes, step_bytes
from slipstream.runtime.lora import meta_model
from tests.unit.slipstream.launch.test_plan import PUBLISHED

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "matmul"}


class Products(Allocations):
    """Counts the matrix products by (dtype, sizes that are no token count)."""

    found: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            for factor in [each for each in args if isinstance(each, Tensor) and each.dim() >= 2][-1:]:
                Products.found[factor.dtype, tuple(factor.shape)] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen3-30B-A3B"])
def test_layers_multiply_in_bfloat16_and_keep_their_inputs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "Allocations", Products)
    monkeypatch.setattr(Products, "found", Counter())
    kind, sizes = PUBLISHED[name]
    peaks, inputs = {}, {}
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        short = sizes | {"num_hidden_layers": layers, "architectures": [kind.__name__.replace("Config", "ForCausalLM")]}
        kind(**short).save_pretrained(folder)
        # Sharded and recomputed, as in the presets of these models.
        run = load(["experiment=gsm8k_8gpu", f"model.path={folder}", "learner.engine.gradient_checkpointing=true"])
        model = meta_model(run.model)
        inputs[layers] = layer_input_bytes(run, model)
        peaks[layers] = step_bytes(run, model, on_gpu=True)
    # Only a router, and the head, multiply in float32.
    allowed = {sizes["vocab_size"], sizes.get("num_experts", 0)}
    full = {shape for dtype, shape in Products.found if dtype == torch.float32 and not allowed & {*shape}}
    assert full == set()
    assert sum(count for (dtype, _), count in Products.found.items() if dtype == torch.bfloat16) > 2 * 7 * 3
    inputs_of_layer = inputs[3] - inputs[2]
    # Of an input of bfloat16, and of the chosen experts, int64.
    chosen = inputs_of_layer * 8 * sizes.get("num_experts_per_tok", 0) / (2 * sizes["hidden_size"])
    assert peaks[3] - peaks[2] == pytest.approx(inputs_of_layer + chosen, rel=0.01)
