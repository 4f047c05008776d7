import pytest
import torch
from torch import Tensor, nn

from slipstream.generators.engines.vllm.verify import cpu_kernels, first_mismatch, first_stale_kernel

PACKING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
PARTS = ("q_proj", "k_proj", "v_proj")


class Packed(nn.Module):
    """Storage of an engine: three projections packed into one, a vocabulary padded to four rows."""

    def __init__(self, sent: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        tensors = dict(sent)
        self.attention = nn.Module()
        self.attention.qkv_proj = nn.Linear(4, 8, bias=False)
        self.attention.qkv_proj.weight.data = torch.cat([tensors[f"attention.{part}.weight"] for part in PARTS])
        self.norm = nn.LayerNorm(4, bias=False)
        self.norm.weight.data = tensors["norm.weight"].clone()
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight.data = torch.cat([tensors["head.weight"], torch.zeros(1, 4)])


@pytest.fixture
def sent() -> list[tuple[str, Tensor]]:
    shapes = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    projections = [(f"attention.{name}.weight", torch.randn(rows, 4)) for name, rows in shapes.items()]
    return [*projections, ("norm.weight", torch.randn(4)), ("head.weight", torch.randn(3, 4))]


def test_a_model_that_holds_all_tensors_has_no_mismatch(sent: list[tuple[str, Tensor]]):
    assert first_mismatch(Packed(sent), sent, packing=PACKING) == ""


@pytest.mark.parametrize("index", range(5))
def test_one_changed_element_is_found_in_any_tensor(index: int, sent: list[tuple[str, Tensor]]):
    model = Packed(sent)
    name, tensor = sent[index]
    other = tensor.clone()
    other.view(-1)[-1] += 1e-3
    assert first_mismatch(model, [*sent[:index], (name, other), *sent[index + 1 :]], packing=PACKING) == name


def test_nan_is_always_a_mismatch(sent: list[tuple[str, Tensor]]):
    sent[3][1][0] = torch.nan
    assert first_mismatch(Packed(sent), sent, packing=PACKING) == "norm.weight"


def test_repacked_tensors_are_not_compared(sent: list[tuple[str, Tensor]]):
    model = Packed(sent)
    model.attention.qkv_proj.weight.data = torch.empty(0)
    model.head.weight.data = torch.empty(0)
    assert first_mismatch(model, sent, packing=PACKING) == ""


def test_a_stale_kernel_is_found(sent: list[tuple[str, Tensor]]):
    model = Packed(sent)
    layers = [model.attention.qkv_proj, model.head]
    for layer in layers:
        layer.cpu_linear = lambda x: x
    model.norm.cpu_linear = nn.functional.linear
    before = cpu_kernels(model)
    for layer in layers:
        layer.cpu_linear = lambda x: x
    assert first_stale_kernel(model, before) == ""
    layers[1].cpu_linear = before["head"]
    assert first_stale_kernel(model, before) == "head"
