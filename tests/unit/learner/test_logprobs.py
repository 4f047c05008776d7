import math

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import logprobs as module

token_logprobs_and_entropy = jaxtyped(module.token_logprobs_and_entropy, typechecker=beartype)


def make_inputs(num_tokens: int = 7, vocabulary: int = 5):
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, vocabulary, requires_grad=True)
    return logits, torch.randint(0, vocabulary, (num_tokens,)), torch.rand(num_tokens) + 0.5


def test_values_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = token_logprobs_and_entropy(
        logits, torch.tensor([1]), torch.ones(1), differentiate_entropy=False
    )
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_logits_are_divided_by_each_tokens_temperature():
    logits, targets, temperatures = make_inputs()
    logprobs, _ = token_logprobs_and_entropy(logits, targets, temperatures, differentiate_entropy=False)
    expected = (logits / temperatures[:, None]).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(logprobs, expected)


def test_chunks_change_neither_values_nor_gradients():
    logits, targets, temperatures = make_inputs()
    results = []
    for chunk_elements in (1, 10, 1000):
        logprobs, entropy = token_logprobs_and_entropy(
            logits, targets, temperatures, differentiate_entropy=True, chunk_elements=chunk_elements
        )
        results.append((logprobs, entropy, *torch.autograd.grad((logprobs * 3 + entropy).sum(), logits)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_gradient_is_that_of_the_formula():
    logits, targets, temperatures = make_inputs()
    wide = logits.detach().double().requires_grad_()

    def both(values):
        return token_logprobs_and_entropy(values, targets, temperatures.double(), differentiate_entropy=True)

    assert torch.autograd.gradcheck(both, wide)


def test_half_precision_logits_give_float32():
    logits, targets, temperatures = make_inputs()
    half = logits.detach().bfloat16()
    logprobs, entropy = token_logprobs_and_entropy(half, targets, temperatures, differentiate_entropy=False)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact, _ = token_logprobs_and_entropy(half.float(), targets, temperatures, differentiate_entropy=False)
    assert logprobs.equal(exact)


def test_an_impossible_token_adds_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    _, entropy = token_logprobs_and_entropy(logits, torch.tensor([0]), torch.ones(1), differentiate_entropy=False)
    assert entropy.item() == pytest.approx(math.log(2))


def test_the_entropy_has_a_gradient_only_when_asked():
    logits, targets, temperatures = make_inputs()
    for wanted in (True, False):
        _, entropy = token_logprobs_and_entropy(logits, targets, temperatures, differentiate_entropy=wanted)
        assert entropy.requires_grad == wanted
