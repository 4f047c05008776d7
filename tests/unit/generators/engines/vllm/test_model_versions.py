"""A second copy of a model shares no tensor with the first, and takes its place without moving a byte."""

import threading
import time

import pytest
import torch
from torch import nn

from slipstream.broker.errors import WeightTransferError
from slipstream.generators.engines.vllm import weights
from slipstream.generators.engines.vllm.weights import KernelChecks, exchange, second_copy


class Model(nn.Module):
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
    model = Model().requires_grad_(False)
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
    model = Model()
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
