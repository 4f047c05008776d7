"""A load is compared with the tensors that were sent, through vLLM's own reload of a model in layers."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.broker.errors import WeightTransferError
from slipstream.generators.engines.vllm import verify
from slipstream.generators.engines.vllm.verify import RecordedLoad

Tensors = list[tuple[str, Tensor]]


class Repacks(QuantizeMethodBase):
    """As on a CPU: a kernel of its own holds the weight, and nothing remains of the parameter."""

    def create_weights(self, *_: object, **__: object) -> None:
        raise NotImplementedError

    def apply(self, *_: object, **__: object) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda row, weight, bias: nn.functional.linear(row, packed, bias)
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def load_rows(param: nn.Parameter, tensor: Tensor, first: int = 0) -> None:
    param.data[first : first + len(tensor)].copy_(tensor)


class Model(nn.Module):
    """Queries and keys packed into one repacked layer, a norm, a padded head, experts that are copied in transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 6, bias=False)
        self.qk.weight.weight_loader = load_rows
        self.qk.quant_method = Repacks()
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight.weight_loader = load_rows
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.zeros(2, 3, 4))
        self.requires_grad_(False)
        record_metadata_for_reloading(self)
        self.qk.quant_method.process_weights_after_loading(self.qk)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "experts":
                self.experts.weight.copy_(tensor.permute(0, 2, 1).contiguous())
            elif name in ("q", "k"):
                self.qk.weight.weight_loader(self.qk.weight, tensor, 0 if name == "q" else 4)
            elif name in ("norm.weight", "head.weight"):
                parameter = self.get_parameter(name)
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def make_sent(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 4), "k": (2, 4), "norm.weight": (4,), "head.weight": (3, 4), "experts": (2, 4, 3)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def load(model: Model, tensors: Tensors) -> RecordedLoad:
    initialize_layerwise_reload(model)
    record = RecordedLoad(model)
    with record:
        model.load_weights(tensors)
    finalize_layerwise_reload(model, None)
    return record


def test_a_model_that_holds_all_tensors_has_no_mismatch_and_nothing_is_left_uncompared():
    model = Model()
    for seed in range(3):
        sent = make_sent(seed)
        record = load(model, sent)
        assert record.first_mismatch(sent) == ""
        assert record.uncompared == []
        assert model.norm.weight.equal(dict(sent)["norm.weight"])
        # vLLM alone loses what is copied straight into a parameter.
        assert model.experts.weight.equal(dict(sent)["experts"].permute(0, 2, 1))


def corrupt(parameter: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.get_parameter(parameter).view(-1)[5 % model.get_parameter(parameter).numel()] += 1e-6

    return change


def keep_old_kernel(model: Model) -> None:
    load(model, make_sent(1))
    kernel = model.qk.cpu_linear
    load(model, make_sent(0))
    model.qk.cpu_linear = kernel


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (corrupt("norm.weight"), "norm.weight"),
        (corrupt("head.weight"), "head.weight"),
        (corrupt("experts.weight"), "experts.weight"),
        (keep_old_kernel, "qk.weight"),
    ],
)
def test_one_changed_element_is_found_in_any_parameter(change: Callable[[Model], None], name: str):
    model, sent = Model(), make_sent()
    record = load(model, sent)
    kept = [call.arguments["param"] for calls in record._calls.values() for _, call in calls.kept]
    assert [parameter.is_meta for parameter in kept] == [True] * 5, "a record keeps no second copy of the model"
    change(model)
    assert record.first_mismatch(sent) == name


@pytest.mark.parametrize(("num_rows", "name"), [(0, ""), (1, "qk.weight")])
def test_only_a_layer_without_rows_of_the_vocabulary_may_keep_its_kernel(num_rows: int, name: str):
    model, sent = Model(), make_sent()
    # As a worker's part of the vocabulary, which vLLM does not load again if it is only padding.
    model.qk.shard_indices = SimpleNamespace(num_org_elements=num_rows)
    kernel = model.qk.cpu_linear
    record = load(model, sent)
    model.qk.cpu_linear = kernel
    assert record.first_mismatch(sent) == name


def test_a_check_that_the_decoding_thread_never_runs_ends_the_load(monkeypatch: pytest.MonkeyPatch):
    model, sent = Model(), make_sent()
    record = load(model, sent)
    monkeypatch.setattr(verify, "CHECK_TIMEOUT_S", 0.05)
    with pytest.raises(WeightTransferError, match="kernels must be compared within"):
        record.first_mismatch(sent, run=lambda _: Future())


def test_a_part_of_the_kernels_is_compared_and_all_must_be_new():
    """And the other parameters are compared every time, unless requests wait."""
    model, sent = Model(), make_sent()
    load(model, make_sent(1))
    kernel, index = model.qk.cpu_linear, list(dict(model.named_modules())).index("qk")
    record = load(model, sent)
    good = model.qk.cpu_linear
    model.qk.cpu_linear = lambda *arguments: good(*arguments) + 1e-6
    assert [record.first_mismatch(sent, part=(i, 8)) for i in (index, index + 1, index + 8)] == [
        "qk.weight",
        "",
        "qk.weight",
    ]
    model.qk.cpu_linear = kernel
    assert record.first_mismatch(sent, part=(index + 1, 8)) == "qk.weight"
    model.qk.cpu_linear = good
    corrupt("norm.weight")(model)
    found = [record.first_mismatch(sent, part=(index, 8), is_sampled=each) for each in (False, True)]
    assert found == ["norm.weight", ""]


def test_a_tensor_that_was_altered_before_the_loader_got_it_is_found_in_every_update():
    model, sent = Model(), make_sent()
    record = load(model, [(name, tensor + 1e-6 if name == "norm.weight" else tensor) for name, tensor in sent])
    assert [record.first_mismatch(sent, part=(i, 8)) for i in range(8)] == ["norm.weight"] * 8


def test_what_could_not_be_compared_is_named():
    model, sent = Model(), make_sent()
    record = load(model, [(name, 2 * tensor if name == "q" else tensor) for name, tensor in sent if name != "experts"])
    assert record.first_mismatch(sent) == ""
    # Sent, but no loader got it; and a parameter that nothing was loaded into.
    assert record.uncompared == ["experts", "experts.weight", "q"]
