"""The comparison of vLLM's LoRA slot with what was sent, on a slot laid out as vLLM lays it out."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slipstream.configs.data import LoraConfig
from slipstream.generators.engines.vllm.adapter import ADAPTER, describe, first_adapter_mismatch, lora_arguments

LORA = LoraConfig(rank=3, alpha=4.0)
SCALING = 4 / 3
SLICES = {"q_proj": 6, "k_proj": 2, "o_proj": 4}
"""Layer -> rows of its second matrix; the first two are packed."""


def name_of(layer: str, matrix: str) -> str:
    return f"base_model.model.layers.0.{layer}.lora_{matrix}.weight"


@pytest.fixture
def sent() -> dict[str, Tensor]:
    shapes = {"A": lambda rows: (3, 4), "B": lambda rows: (rows, 3)}
    return {name_of(n, m): torch.randn(shape(rows)) for n, rows in SLICES.items() for m, shape in shapes.items()}


def make_model(sent: dict[str, Tensor]) -> SimpleNamespace:
    """A slot for rank 8 that holds the tensors, scaled as vLLM does it."""

    def layer(*parts: str) -> SimpleNamespace:
        first, second = torch.zeros(len(parts), 2, 1, 8, 4), [torch.zeros(2, 1, SLICES[part], 8) for part in parts]
        for i, part in enumerate(parts):
            first[i][1, 0, :3] = sent[name_of(part, "A")]
            second[i][1, 0, :, :3] = sent[name_of(part, "B")] * SCALING
        return SimpleNamespace(lora_a_stacked=list(first), lora_b_stacked=second)

    manager = SimpleNamespace(
        modules={"layers.0.qk_proj": layer("q_proj", "k_proj"), "layers.0.o_proj": layer("o_proj")},
        packed_modules={"layers.0.qk_proj": ["layers.0.q_proj", "layers.0.k_proj"]},
        lora_index_to_id=[None, ADAPTER.lora_int_id],
    )
    return SimpleNamespace(lora_manager=manager)


def mismatch(model: SimpleNamespace, sent: dict[str, Tensor]) -> str:
    return first_adapter_mismatch(model, list(sent.items()), settings=describe(LORA))


@pytest.mark.parametrize("layer", SLICES)
@pytest.mark.parametrize("matrix", "AB")
def test_one_changed_element_is_found_in_any_tensor(layer: str, matrix: str, sent: dict[str, Tensor]):
    model = make_model(sent)
    name = name_of(layer, matrix)
    assert mismatch(model, sent) == ""
    assert mismatch(model, sent | {name: torch.nextafter(sent[name], torch.tensor(9.0))}) == name


def test_a_layer_without_a_slot_is_found(sent: dict[str, Tensor]):
    model = make_model(sent)
    del model.lora_manager.modules["layers.0.o_proj"]
    assert mismatch(model, sent) == name_of("o_proj", "A")


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (3, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_the_slot_is_the_smallest_that_is_enough(rank: int, slot: int):
    assert lora_arguments(LoraConfig(rank=rank), targets=["o_proj"])["max_lora_rank"] == slot
    assert lora_arguments(None, targets=[]) == {}
