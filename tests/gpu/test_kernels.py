"""Kernels of long sequences and large vocabularies, against plain ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from slipstream.learner.algorithms.logprobs import DeferredLogits, Requested, measure_tokens
from slipstream.learner.batching.microbatch import Spans
from slipstream.learner.training.attention import SINGLE_RANK, PackedRows, packed_attention
from slipstream.learner.training.step_memory import Allocations
from tests.gpu.device import DEVICE, IS_SMALL

HALF = torch.float32 if IS_SMALL else torch.bfloat16
GIB = 2**30


@contextmanager
def measured_peak(peaks: list[float]) -> Iterator[None]:
    """Append the largest allocation within, GiB."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        peaks.append((torch.cuda.max_memory_allocated() - before) / GIB)
    else:
        with Allocations() as allocations:
            yield
        peaks.append(allocations.peak / GIB)


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    found, expected = found.detach(), expected.detach()
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_deferred_logits_are_the_plain_ones_in_a_fraction_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    tokens, vocabulary, width = (64, 512, 16) if IS_SMALL else (8192, 151_936, 1536)
    torch.manual_seed(0)
    states = torch.randn(tokens, width, device=DEVICE, dtype=HALF)
    weight = torch.randn(vocabulary, width, device=DEVICE) / width**0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    peaks: list[float] = []

    def step(is_deferred: bool) -> tuple[Tensor, Tensor, Tensor]:
        own = states.clone().requires_grad_(), weight.clone().requires_grad_()
        with measured_peak(peaks):
            logits = DeferredLogits(*own, dtype=HALF) if is_deferred else linear(own[0], own[1].to(HALF))
            measured = measure_tokens(
                logits,
                targets,
                torch.ones(tokens, device=DEVICE),
                requested=Requested(entropy=True),
                chunk_elements=(16 if IS_SMALL else 110) * vocabulary if is_deferred else tokens * vocabulary,
            )
            measured["logprobs"].mean().backward()
        assert own[0].grad is not None
        assert own[1].grad is not None
        return measured["logprobs"].detach(), own[0].grad, own[1].grad

    plain, deferred = step(False), step(True)
    with capsys.disabled():
        print(f"\nlog-prob head at {tokens} x {vocabulary}: plain {peaks[0]:.2f} GiB, deferred {peaks[1]:.2f} GiB")
    assert float((plain[0] - deferred[0]).abs().mean()) < 0.005
    assert max(error(found, expected) for found, expected in zip(deferred[1:], plain[1:], strict=True)) < 0.02
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("length", [24, 40] if IS_SMALL else [1536, 8192, 32_768])
@pytest.mark.parametrize("window", [None, 512])
def test_attention_of_packed_rows_is_that_of_each_sequence(length: int, window: int | None) -> None:
    heads, shared, width = (4, 2, 8) if IS_SMALL else (12, 2, 128)
    window = window if window is None or not IS_SMALL else 7
    response = length // 4
    # A prompt with two responses, and a sequence of its own.
    spans = Spans([length - response, response, response, length], [0, 0, 0, 3])
    torch.manual_seed(0)
    states = [
        torch.randn(1, count, sum(spans.lengths), width, device=DEVICE, dtype=HALF, requires_grad=True)
        for count in (heads, shared, shared)
    ]
    found, _ = packed_attention(
        torch.nn.Module(), *states, None, sliding_window=window, packed_rows=PackedRows(spans, SINGLE_RANK)
    )
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), states)
    prompt, one, two, alone = torch.arange(sum(spans.lengths), device=DEVICE).split(spans.lengths)
    expected = torch.zeros_like(found, dtype=torch.float32)
    sums = [torch.zeros_like(state, dtype=torch.float32) for state in states]
    for index, own in ((torch.cat([prompt, one]), None), (torch.cat([prompt, two]), two), (alone, None)):
        # What both sequences have in common counts once, as it is computed.
        kept = len(index) if own is None else len(own)
        parts = [state.detach()[:, :, index].float().requires_grad_() for state in states]
        mask = None
        if window:
            mask = torch.ones(len(index), len(index), dtype=torch.bool, device=DEVICE).tril().triu(1 - window)
        # Repeated, because no fused kernel takes a mask with fewer heads of keys, and scores of 32k tokens fill a GPU.
        whole = [part.repeat_interleave(heads // part.shape[1], 1) for part in parts]
        out = scaled_dot_product_attention(*whole, attn_mask=mask, is_causal=mask is None)
        taken = out[:, :, -kept:].transpose(1, 2)
        expected[:, index[-kept:]] = taken.detach()
        for total, part in zip(
            sums, torch.autograd.grad((taken * weights[:, index[-kept:]].float()).sum(), parts), strict=True
        ):
            total.index_add_(2, index, part)
        del parts, whole, out, taken, mask
    assert error(found, expected) < 0.01
    assert max(error(one, other) for one, other in zip(gradients, sums, strict=True)) < 0.02
