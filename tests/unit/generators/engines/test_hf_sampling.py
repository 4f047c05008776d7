import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.buffer.trajectory import Sampling
from slipstream.generators.engines.hf_engine import draw_uniforms, sample


def make_sampling(
    temperature: float = 1.0, *, top_p: float = 1.0, top_k: int = -1, seed: int = 0, **others: Any
) -> Sampling:
    return Sampling(temperature, top_p, top_k, 4, seed, **others)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def draw(logits: Tensor, sampling: Sampling, num_draws: int = 4000) -> tuple[Tensor, Tensor]:
    uniforms = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    return sample(logits.repeat(num_draws, 1), [sampling] * num_draws, uniforms)


def test_token_frequencies_match_their_probabilities():
    tokens, logprobs = draw(logits_of(0.5, 0.3, 0.2), make_sampling())
    assert (torch.bincount(tokens, minlength=3) / 4000).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1e-3)
    assert logprobs.exp().tolist() == pytest.approx([[0.5, 0.3, 0.2][token] for token in tokens.tolist()], abs=1e-6)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.7}, {0}),
        ({"min_p": 0.3, "temperature": 0.5}, {0, 1}),
    ],
    ids=str,
)
def test_filters_keep_the_likeliest_tokens(filters: dict, kept: set[int]):
    tokens, logprobs = draw(logits_of(0.5, 0.3, 0.2), make_sampling(**filters))
    assert set(tokens.tolist()) == kept
    # Of the distribution that was sampled from.
    weights = {token: (0.5, 0.3, 0.2)[token] ** (1 / filters.get("temperature", 1.0)) for token in kept}
    expected = [weights[token] / sum(weights.values()) for token in tokens.tolist()]
    assert logprobs.exp().tolist() == pytest.approx(expected, abs=1e-6)


def test_greedy_and_random_rows_mix_in_a_batch():
    logits = logits_of(0.3, 0.5, 0.2).repeat(2, 1)
    tokens, logprobs = sample(logits, [make_sampling(0.0), make_sampling(2.0)], torch.tensor([0.99, 0.99]).double())
    assert tokens.tolist() == [1, 2]
    weights = [0.3**0.5, 0.5**0.5, 0.2**0.5]
    assert logprobs.exp().tolist() == pytest.approx([0.5, weights[2] / sum(weights)], abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits.repeat(2, 1), [make_sampling()] * 2, uniforms)
    assert tokens.tolist() == [1, 2]
    assert logprobs.isfinite().all()


def test_random_numbers_of_a_request_depend_on_its_seed_alone():
    torch.manual_seed(1)
    first = draw_uniforms(make_sampling(seed=3))
    torch.manual_seed(2)
    assert torch.equal(first, draw_uniforms(make_sampling(seed=3)))
    assert not torch.equal(first, draw_uniforms(make_sampling(seed=4)))
