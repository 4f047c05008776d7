import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.generators.engines.weight_layout import load_into
from tests.tiny_model import make_tiny_module


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in module.named_parameters()]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_module_becomes_the_other_one(is_tied: bool):
    module, other = make_tiny_module(seed=0, is_tied=is_tied), make_tiny_module(seed=1, is_tied=is_tied)
    load_into(module, tensors_of(other))
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_a_tied_head_may_be_sent_too():
    module, other = make_tiny_module(seed=0, is_tied=True), make_tiny_module(seed=1, is_tied=True)
    load_into(module, [*tensors_of(other), ("lm_head.weight", other.lm_head.weight.detach())])
    assert torch.equal(module.lm_head.weight, other.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensors: tensors[1:], "must be sent, model.embed_tokens.weight and 0 more"),
        (lambda tensors: [*tensors, ("model.extra", torch.zeros(1))], "model.extra does not"),
        (lambda tensors: [("lm_head.weight", torch.zeros(2, 2)), *tensors], r"shape \[41, 64\], got \[2, 2\]"),
    ],
)
def test_a_set_that_does_not_fit_changes_nothing(spoil, words: str):
    module = make_tiny_module(seed=0)
    before = tensors_of(module)
    with pytest.raises(WeightTransferError, match=words):
        load_into(module, spoil(tensors_of(make_tiny_module(seed=1))))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, tensors_of(module), strict=True))


def test_a_tied_head_that_was_not_updated_is_refused():
    module, other = make_tiny_module(seed=0, is_tied=True), make_tiny_module(seed=1, is_tied=True)
    old_head = module.lm_head.weight.detach().clone()
    with pytest.raises(WeightTransferError, match=r"model.embed_tokens.weight and lm_head.weight are one tensor"):
        load_into(module, [*tensors_of(other), ("lm_head.weight", old_head)])
    assert torch.equal(module.lm_head.weight, old_head)
