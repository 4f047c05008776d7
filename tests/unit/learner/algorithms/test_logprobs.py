import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import logprobs as module

measure_tokens = jaxtyped(module.measure_tokens, typechecker=beartype)
ALL = module.Requested(entropy=True, differentiate_entropy=True, collision=True)


def make_inputs(num_tokens: int = 7, vocabulary: int = 5):
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, vocabulary, requires_grad=True)
    return logits, torch.randint(0, vocabulary, (num_tokens,)), torch.rand(num_tokens) + 0.5


def test_logits_of_policy_and_reference_are_divided_by_each_tokens_temperature_in_float32():
    logits, targets, temperatures = make_inputs()
    measured = measure_tokens(logits, targets, temperatures, requested=module.LOGPROBS)
    expected = (logits / temperatures[:, None]).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(measured["logprobs"], expected)
    half = logits.detach().bfloat16()
    rough, exact = (measure_tokens(x, targets, temperatures, requested=ALL) for x in (half, half.float()))
    assert rough["logprobs"].dtype == rough["entropies"].dtype == torch.float32
    assert rough["logprobs"].equal(exact["logprobs"])
    logits, targets, temperatures = make_inputs()
    measured = measure_tokens(logits, targets, temperatures, requested=module.Requested(), reference_logits=logits + 2)
    assert measured["exact_kl"].abs().max() < 1e-6
    ours, theirs = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 0.0]])
    cool = measure_tokens(ours, torch.tensor([0]), torch.full((1,), 2.0), requested=ALL, reference_logits=theirs)
    warm = measure_tokens(ours / 2, torch.tensor([0]), torch.ones(1), requested=ALL, reference_logits=theirs)
    assert cool["exact_kl"].item() == pytest.approx(warm["exact_kl"].item())


def make_everything(num_tokens: int = 7, vocabulary: int = 5):
    logits, targets, temperatures = make_inputs(num_tokens, vocabulary)
    optional = {
        "candidates": torch.randint(0, vocabulary, (num_tokens, 3)),
        "reference_logits": torch.randn(num_tokens, vocabulary, dtype=torch.float64),
    }
    return logits.detach().double().requires_grad_(), targets, temperatures.double(), optional


def test_every_measure_by_hand_only_if_requested_and_none_without_tokens():
    inputs = *make_inputs(), module.Requested()
    assert set(measure_tokens(*inputs[:3], requested=inputs[3])) == {"logprobs"}
    logits, targets, temperatures, optional = make_everything()
    measured = measure_tokens(logits, targets, temperatures, requested=ALL, **optional)
    assert set(measured) == {"logprobs", "entropies", "collisions", "candidate_logprobs", "exact_kl"}
    logits, targets, temperatures, optional = make_everything(num_tokens=0)
    measured = measure_tokens(logits, targets, temperatures, requested=ALL, **optional)
    assert all(len(value) == 0 for value in measured.values())
    logits = torch.tensor([[0.0, math.log(3.0)]])
    optional = {"candidates": torch.tensor([[1, 0, 1]]), "reference_logits": torch.zeros(1, 2)}
    measured = measure_tokens(logits, torch.tensor([1]), torch.ones(1), requested=ALL, **optional)
    assert measured["logprobs"].item() == pytest.approx(math.log(0.75))
    assert measured["entropies"].item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert measured["collisions"].item() == pytest.approx(0.75**2 + 0.25**2)
    assert measured["candidate_logprobs"].exp().flatten().tolist() == pytest.approx([0.75, 0.25, 0.75])
    assert measured["exact_kl"].item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 90.0, 0.0, float("-inf")]])
    measured = measure_tokens(logits, torch.tensor([0, 1]), torch.ones(2), requested=ALL)
    assert measured["collisions"].tolist() == pytest.approx([0.25, 1.0])
    assert measured["entropies"].tolist() == pytest.approx([math.log(4), 0])
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])
    measured = measure_tokens(logits, torch.tensor([0]), torch.ones(1), requested=module.Requested(top_k=2))
    assert measured["top_tokens"].tolist() == [[2, 1]]
    assert measured["top_logprobs"].exp().flatten().tolist() == pytest.approx([5 / 8, 2 / 8])


@pytest.mark.parametrize("chunk_elements", [10, 1000])
def test_every_measure_has_the_gradient_of_its_formula_but_collisions_and_the_reference_none(chunk_elements):
    logits, targets, temperatures, optional = make_everything()

    def measures(values):
        settings = {"requested": ALL, "chunk_elements": chunk_elements}
        measured = measure_tokens(values, targets, temperatures, **settings, **optional)
        return tuple(value for name, value in measured.items() if name != "collisions")

    assert torch.autograd.gradcheck(measures, logits)
    logits, targets, temperatures, optional = make_everything()
    optional["reference_logits"].requires_grad_()
    measured = measure_tokens(logits, targets, temperatures, requested=ALL, chunk_elements=chunk_elements, **optional)
    assert not measured["collisions"].requires_grad
    (unused,) = torch.autograd.grad(measured["exact_kl"].sum(), optional["reference_logits"], allow_unused=True)
    assert unused is None


def soft_cap(logits):
    return torch.tanh(logits / 2) * 2


def make_deferred(*, finish=None, dtype=torch.float64):
    """States, weight, and bias of 7 tokens in place of the logits of `make_everything`."""
    logits, targets, temperatures, optional = make_everything()
    states, weight = torch.randn(7, 3, dtype=torch.float64), torch.randn(logits.shape[1], 3, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (states, weight, torch.randn(5, dtype=torch.float64))]
    return leaves, lambda *leaves: module.DeferredLogits(*leaves, finish, dtype), targets, temperatures, optional


@pytest.mark.parametrize("finish", [None, soft_cap])
@pytest.mark.parametrize("chunk_elements", [1, 10, 1000])
def test_deferred_logits_change_no_measure_and_no_gradient(finish, chunk_elements):
    leaves, defer, targets, temperatures, optional = make_deferred(finish=finish)
    requested = module.Requested(entropy=True, differentiate_entropy=True, collision=True, top_k=2)
    optional["reference_logits"] = defer(*(leaf.detach().flip(0) for leaf in leaves))
    plain = torch.nn.functional.linear(*leaves)
    results = []
    for logits, elements in ((finish(plain) if finish else plain, 1000), (defer(*leaves), chunk_elements)):
        settings = {"requested": requested, "chunk_elements": elements}
        measured = measure_tokens(logits, targets, temperatures, **settings, **optional)
        trained = {name for name, column in measured.items() if column.requires_grad}
        assert trained == {"logprobs", "entropies", "candidate_logprobs", "exact_kl"}
        total = sum((i + 1) * column.sum() for i, column in enumerate(measured.values()))
        results.append((*measured.values(), *torch.autograd.grad(total, leaves)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_an_untrained_projection_gets_no_gradient_and_bfloat16_products_are_those_of_autocast():
    (states, weight, bias), defer, targets, temperatures, _ = make_deferred()
    logits = defer(states, weight.detach(), bias.detach())
    measured = measure_tokens(logits, targets, temperatures, requested=module.LOGPROBS, chunk_elements=10)
    measured["logprobs"].sum().backward()
    assert [leaf.grad is not None for leaf in (states, weight, bias)] == [True, False, False]
    torch.manual_seed(0)
    states, weight = torch.randn(64, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets, temperatures = torch.randint(0, 50, (64,)), torch.ones(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = torch.nn.functional.linear(states, weight)
    deferred = module.DeferredLogits(states, weight, dtype=torch.bfloat16)
    results = []
    for logits, elements in ((plain, 10**6), (deferred, 50)):
        measured = measure_tokens(logits, targets, temperatures, requested=module.LOGPROBS, chunk_elements=elements)
        results.append((measured["logprobs"], *torch.autograd.grad(measured["logprobs"].sum(), (states, weight))))
    assert results[0][0].equal(results[1][0])
    assert results[1][2].dtype == torch.float32
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 0.01


@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_entropy_has_a_gradient_only_when_asked(is_deferred):
    leaves, defer, targets, temperatures, _ = make_deferred()
    logits = defer(*leaves) if is_deferred else torch.nn.functional.linear(*leaves)
    for differentiate in (False, True):
        requested = module.Requested(entropy=True, differentiate_entropy=differentiate)
        measured = measure_tokens(logits, targets, temperatures, requested=requested, chunk_elements=10)
        assert measured["logprobs"].requires_grad
        assert measured["entropies"].requires_grad == differentiate


def test_only_one_chunk_is_alive_and_the_backward_pass_leaves_numbers_without_gradient_out(monkeypatch):
    leaves, defer, targets, temperatures, _ = make_deferred()
    calls = []
    real = module._measure

    def record(logits, *rest):
        calls.append((len(logits), sorted(found := real(logits, *rest))))
        return found

    monkeypatch.setattr(module, "_measure", record)
    requested = module.Requested(entropy=True, collision=True, top_k=2)
    measured = module.measure_tokens(defer(*leaves), targets, temperatures, requested=requested, chunk_elements=10)
    measured["logprobs"].sum().backward()
    every = ["collisions", "entropies", "logprobs", "top_logprobs", "top_tokens"]
    assert calls == [(length, names) for names in (every, ["logprobs"]) for length in (2, 2, 2, 1)]
