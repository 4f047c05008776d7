import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.broker.errors import WeightTransferError
from slipstream.configs.data import LoraConfig
from slipstream.generators.engines.vllm import verify, weights
from slipstream.generators.engines.vllm.verify import RecordedLoad
from slipstream.generators.engines.vllm.weights import (
    ADAPTER,
    KernelChecks,
    adapter_settings,
    exchange,
    first_adapter_mismatch,
    lora_arguments,
    multiply_by_one_adapter,
    second_copy,
)
from tests.cases import cases

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


@cases(
    "change, name",
    (corrupt("norm.weight"), "norm.weight"),
    (corrupt("head.weight"), "head.weight"),
    (corrupt("experts.weight"), "experts.weight"),
    (keep_old_kernel, "qk.weight"),
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
    for i, name in ((index, "qk.weight"), (index + 1, ""), (index + 8, "qk.weight")):
        assert record.first_mismatch(sent, part=(i, 8)) == name
    model.qk.cpu_linear = kernel
    assert record.first_mismatch(sent, part=(index + 1, 8)) == "qk.weight"
    model.qk.cpu_linear = good
    corrupt("norm.weight")(model)
    found = [record.first_mismatch(sent, part=(index, 8), is_sampled=each) for each in (False, True)]
    assert found == ["norm.weight", ""]


def test_a_tensor_that_was_altered_before_the_loader_got_it_is_found_and_what_could_not_be_compared_is_named():
    model, sent = Model(), make_sent()
    record = load(model, [(name, tensor + 1e-6 if name == "norm.weight" else tensor) for name, tensor in sent])
    assert [record.first_mismatch(sent, part=(i, 8)) for i in range(8)] == ["norm.weight"] * 8, "in every update"
    model, sent = Model(), make_sent()
    record = load(model, [(name, 2 * tensor if name == "q" else tensor) for name, tensor in sent if name != "experts"])
    assert record.first_mismatch(sent) == ""
    # Sent, but no loader got it; and a parameter that nothing was loaded into.
    assert record.uncompared == ["experts", "experts.weight", "q"]


class SharingModel(nn.Module):
    """A tied head, a module with two parents, and an attribute that decoding writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.first = nn.Sequential(nn.Linear(3, 3))
        self.second = nn.Sequential(self.first[0], nn.LayerNorm(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.cache = torch.zeros(4)
        self.empty = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(token_ids)))) * self.scale


TOKENS = torch.arange(5)


@torch.no_grad()
def test_a_copy_is_changed_alone_and_then_takes_the_place_of_the_model():
    model = SharingModel().requires_grad_(False)
    second, before, layers = second_copy(model), model(TOKENS), list(model.modules())
    assert torch.equal(second(TOKENS), before)
    for parameter in second.parameters():
        parameter.mul_(2)
    second.scale.mul_(3)
    # Packed by the load, as vLLM's kernels for the CPU.
    second.head.kernel = object()
    assert torch.equal(model(TOKENS), before)
    changed, pointers = second(TOKENS), [each.data_ptr() for each in second.parameters()]
    for expected, other in ((changed, before), (before, changed)):
        exchange(model, second)
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(second(TOKENS), other)
        assert [id(each) for each in model.modules()] == [id(each) for each in layers], "vLLM refers to its layers"
        assert hasattr(model.head, "kernel") == (expected is changed)
    exchange(model, second)
    assert [each.data_ptr() for each in model.parameters()] == pointers


def test_a_copy_keeps_what_the_model_shares():
    model = SharingModel()
    second = second_copy(model)
    assert second.head.weight is second.embedding.weight
    assert second.second[0] is second.first[0]
    assert second.cache is model.cache
    assert second.scale.data_ptr() != model.scale.data_ptr()
    assert dict(second.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert second.state_dict().keys() == model.state_dict().keys()


def test_kernels_are_compared_by_the_thread_that_decodes(monkeypatch: pytest.MonkeyPatch):
    checks, ran_in = KernelChecks(), []

    def check() -> bool:
        ran_in.append(threading.current_thread())
        return True

    loading = threading.Thread(target=lambda: [checks.run(check) for _ in range(20)])
    loading.start()
    deadline = time.monotonic() + 10
    while len(ran_in) < 20:
        assert time.monotonic() < deadline
        checks.run_waiting()
    loading.join(10)
    assert set(ran_in) == {threading.current_thread()}
    monkeypatch.setattr(weights, "CHECK_TIMEOUT_S", 0.05)
    ahead = [checks.run(check) for _ in range(weights._CHECKS_AHEAD)]
    assert not any(each.done() for each in ahead)
    with pytest.raises(WeightTransferError, match="kernels must be compared within"):
        checks.run(check)


LORA = LoraConfig(rank=3, alpha=4.0)
SCALING = 4 / 3
SLICES = {"q_proj": 6, "k_proj": 2, "o_proj": 4}
"""Layer -> rows of its second matrix; the first two are packed."""


def name_of(layer: str, matrix: str) -> str:
    return f"base_model.model.layers.0.{layer}.lora_{matrix}.weight"


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
    return first_adapter_mismatch(model, list(sent.items()), settings=adapter_settings(LORA))


@pytest.mark.parametrize("layer", SLICES)
@pytest.mark.parametrize("matrix", "AB")
def test_one_changed_element_is_found_in_any_tensor(layer: str, matrix: str):
    shapes = {"A": lambda rows: (3, 4), "B": lambda rows: (rows, 3)}
    sent = {name_of(n, m): torch.randn(shape(rows)) for n, rows in SLICES.items() for m, shape in shapes.items()}
    model = make_model(sent)
    name = name_of(layer, matrix)
    assert mismatch(model, sent) == ""
    assert mismatch(model, sent | {name: torch.nextafter(sent[name], torch.tensor(9.0))}) == name
    del model.lora_manager.modules["layers.0.o_proj"]
    assert mismatch(model, sent) == name_of("o_proj", "A"), "and a layer without a slot"


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (3, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_the_slot_is_the_smallest_that_is_enough(rank: int, slot: int):
    assert lora_arguments(LoraConfig(rank=rank), targets=["o_proj"])["max_lora_rank"] == slot
    assert lora_arguments(None, targets=[]) == {}


@pytest.mark.parametrize("is_prefill", [False, True])
def test_matrix_products_replace_the_kernels_that_copy_the_adapter(monkeypatch: pytest.MonkeyPatch, is_prefill: bool):
    for name in ("_apply_shrink", "_apply_expand"):
        monkeypatch.setattr(PunicaWrapperCPU, name, getattr(PunicaWrapperCPU, name))
    wrapper = PunicaWrapperCPU(8, 8, "cpu")
    wrapper.update_metadata(LoRAMapping((1,) * 5, (1,) * 5, is_prefill=is_prefill), [ADAPTER.lora_int_id], 1, 100)
    inputs, outputs = torch.randn(5, 16), torch.randn(5, 12)
    first = tuple(torch.randn(1, 1, 8, 16) for _ in range(2))
    second = tuple(torch.randn(1, 1, rows, 8) for rows in (8, 4))

    def apply() -> Tensor:
        total = outputs.clone()
        wrapper.add_lora_linear(total, inputs, first, second, 0.5, (8, 4))
        return total

    copied = apply()
    multiply_by_one_adapter()
    assert PunicaWrapperCPU._apply_shrink.__module__ == PunicaWrapperCPU._apply_expand.__module__ == weights.__name__
    products = [inputs @ a[0, 0].T @ b[0, 0].T / 2 for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(apply(), outputs + torch.cat(products, dim=1))
    torch.testing.assert_close(copied, apply())
