import pytest
import torch
from torch import Tensor, nn

from slipstream.generators.engines.vllm.verify import cpu_kernels, first_mismatch, first_stale_kernel

PACKING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
PARTS = ("q_proj", "k_proj", "v_proj")


class Packed(nn.Module):
    """As an engine holds an attention and a head: three projections in one, and a vocabulary padded to four rows."""

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


def test_a_model_that_holds_all_of_it_is_alike(sent: list[tuple[str, Tensor]]):
    assert first_mismatch(Packed(sent), sent, packing=PACKING) == ""


@pytest.mark.parametrize("place", range(5))
def test_one_element_that_differs_is_found_in_any_of_them(place: int, sent: list[tuple[str, Tensor]]):
    model = Packed(sent)
    name, tensor = sent[place]
    other = tensor.clone()
    other.view(-1)[-1] += 1e-3
    assert first_mismatch(model, [*sent[:place], (name, other), *sent[place + 1 :]], packing=PACKING) == name


def test_a_value_that_is_no_number_is_never_alike(sent: list[tuple[str, Tensor]]):
    sent[3][1][0] = torch.nan
    assert first_mismatch(Packed(sent), sent, packing=PACKING) == "norm.weight"


def test_what_is_stored_in_another_form_is_passed_over(sent: list[tuple[str, Tensor]]):
    model = Packed(sent)
    model.attention.qkv_proj.weight.data = torch.empty(0)
    model.head.weight.data = torch.empty(0)
    assert first_mismatch(model, sent, packing=PACKING) == ""


def test_a_kernel_that_was_not_made_anew_is_found(sent: list[tuple[str, Tensor]]):
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
