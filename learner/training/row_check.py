"""check_rows: verify during training that a sample depends neither on its row neighbors nor on its last token."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.errors import DivergenceError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.critic import ValueModel
from slipstream.learner.training.model import Policy
from slipstream.learner.training.rounding import LIMIT, MARGIN, difference, rounded

CHECK_EVERY_STEPS = 20
"""Steps between two calls of `check_rows`."""


_END_TOKENS = 8
ALONE_LAYOUT = Layout("one_at_a_time", 1)

Probed = Policy | ValueModel
"""Model that computes microbatches."""


@torch.no_grad()
def check_rows(
    model: Probed, samples: Sequence[Sample], *, layout: Layout, ranks: Ranks, device: torch.device, step: int
) -> None:
    """Verify that a sample depends neither on its row neighbors nor on its last token, on three samples of a step.

    Costs three forward passes over the shortest samples, in training precision. Collective: all ranks must pass the
    same samples. Raises DivergenceError.
    """
    samples = [sample for sample in samples if len(sample.trained)]
    if not samples:
        return
    chosen = _short_row(samples)
    vocab_size, subject = model.vocab_size, chosen[-1]
    beside = [with_others(each, _end_of(each), vocab_size=vocab_size) for each in chosen]
    last = with_others(subject, subject.trained[-1:] - 1, vocab_size=vocab_size)
    # A row must fit the longest sample of the step.
    rows = dataclasses.replace(layout, row_tokens=max(layout.row_tokens, *(each.num_inputs for each in samples)))
    before = numbers(model, chosen, rows, device=device)
    for what, other, part in (
        ("the samples beside it", [*beside[:-1], subject], subject.indices),
        ("its last token", [*chosen[:-1], last], before_last(subject, model)),
    ):
        found = difference(numbers(model, other, rows, device=device), before, parts=[part] if len(part) else [])
        excess = excess_of(found, model, chosen, ranks=ranks, device=device)
        if excess > 1:
            raise DivergenceError(
                f"{type(model.backbone).__name__} must compute a sample independently of {what}, got a change by "
                f"{excess:.2g} times what rounding explains in step {step}, with layout {layout.kind}: resume with "
                "learner.packing=false, or train another model."
            )


def _short_row(samples: Sequence[Sample]) -> list[Sample]:
    """The shortest sample, preceded by a sample of another group and a sibling from its own group if available."""
    ordered = sorted(samples, key=lambda sample: sample.num_inputs)
    subject = ordered[0]
    sibling = [each for each in ordered[1:] if each.group_id == subject.group_id][:1]
    other = [each for each in ordered if each.group_id != subject.group_id][:1]
    # A reward model's sample trains a single token, but earlier tokens must not change either.
    trained = np.arange(max(1, _end_of(subject)[0]), subject.trained[-1] + 1)
    return numbered([*other, *sibling, dataclasses.replace(subject, trained=trained)])


def _end_of(sample: Sample) -> np.ndarray:
    """Positions of the response, extended to at least the last `_END_TOKENS` inputs, but not into images."""
    start = min(int(sample.trained[0]), max(0, sample.num_inputs - _END_TOKENS))
    if sample.images:
        # A shared prompt ends before these positions and must contain complete images.
        start = max(start, int(np.flatnonzero(sample.images.is_image)[-1]) + 1)
    return np.arange(start, len(sample.token_ids))


# --- samples and their numbers ---------------------------------------------------------------------------------------
def numbers(model: Probed, samples: Sequence[Sample], layout: Layout, *, device: torch.device) -> Tensor:
    """Probe outputs of the samples, float32[N, K], in sample order."""
    parts, indices = [], []
    for microbatch in collate(samples, layout=layout):
        parts.append(model.probe(microbatch.to(device)).float().cpu())
        indices.append(microbatch.indices)
    return torch.cat(parts)[torch.cat(indices).argsort()]


def excess_of(found: float, model: Probed, samples: Sequence[Sample], *, ranks: Ranks, device: torch.device) -> float:
    """Largest difference on any rank, relative to the difference that rounding explains. Collective."""
    worst, explained = float(ranks.max(torch.tensor([found]))[0]), LIMIT
    if LIMIT < worst < torch.inf:
        expected, parts = numbers(model, samples, ALONE_LAYOUT, device=device), [sample.indices for sample in samples]
        with rounded(model.backbone, model.compute_dtype):
            moved = difference(numbers(model, samples, ALONE_LAYOUT, device=device), expected, parts=parts)
        explained = max(LIMIT, MARGIN * float(ranks.max(torch.tensor([moved]))[0]))
    return worst / explained


def with_others(sample: Sample, places: np.ndarray, *, vocab_size: int) -> Sample:
    """The sample with different tokens at these positions."""
    token_ids = sample.token_ids.astype(np.int64)
    token_ids[places] = (token_ids[places] + 1 + places % 7) % vocab_size
    return dataclasses.replace(sample, token_ids=token_ids)


def before_last(sample: Sample, model: Probed) -> np.ndarray:
    """Indices of probe outputs that must not depend on the last token."""
    # Its log-probability depends on it, but the hidden state that predicts it doesn't.
    end = sample.num_inputs if model.has_trunk else sample.num_inputs - 1
    return sample.indices[sample.trained < end]


def numbered(samples: Sequence[Sample]) -> list[Sample]:
    """Assign consecutive `first_index` values to the samples."""
    ends = np.cumsum([len(sample.trained) for sample in samples])
    return [
        dataclasses.replace(sample, first_index=int(end) - len(sample.trained))
        for sample, end in zip(samples, ends, strict=True)
    ]
