"""LayoutChooser: the densest layout in which every model computes of packed samples what it computes of each alone.

A mask that a model does not obey changes numbers without an error: windows are ignored, recurrent states leak from one
sample into the next. So nothing is assumed of a model: it is tried, on prompts of the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import structlog
import torch
from torch import Tensor

from slipstream.configs.run import RunConfig
from slipstream.learner.batching.collate import Layout, LayoutKind, collate
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.errors import ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.attention import PACKED
from slipstream.learner.training.critic import ValueModel
from slipstream.learner.training.model import Policy
from slipstream.learner.training.sequence_parallel import ALONE

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference of a sample between packed and alone, nats, by the data type in which both are computed.

Rounding alone makes 1e-6 in float32 and about 0.02 in bfloat16, a leak 0.3 and more.
"""

_SHORTEST_PROBE = 64
_RESPONSE_TOKENS = 16
_MIN_ROW_TOKENS = 64
_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")

log = structlog.get_logger(__name__)


Probed = Policy | ValueModel
"""A model that reads microbatches."""


class LayoutChooser:
    """Life: check, once for each model that reads microbatches -> choose. Both are collective."""

    def __init__(
        self, run: RunConfig, policy: Policy, *, ranks: Ranks, device: torch.device, text: Sequence[int] = ()
    ) -> None:
        """Check the policy, on `text`, tokens of the run's prompts, and random ones beyond. Raises ModelError."""
        self._run = run
        self._text = text
        self._ranks = ranks
        self._device = device
        self._hidden_size = policy.hidden_size
        self._kinds: list[LayoutKind] = ["shared_rows", "one_row", "one_per_row"]
        self._reasons: list[str] = []
        self._needs_masks = False
        self.check(policy, setting="model.path", path=run.model.path)

    def check(self, model: Probed, *, setting: str, path: str) -> None:
        """Keep the layouts in which `model` is exact; it must be whole on this rank. Raises ModelError if none is left.

        `setting` is the config key of its `path`.
        """
        kinds, is_packed = self._kinds, model.backbone.config._attn_implementation == PACKED
        # The kernel of packed rows on GPUs computes in half precision alone.
        is_half = is_packed and self._device.type == "cuda"
        with _computing_in(model, model.compute_dtype if is_half else torch.float32):
            limit = MAX_DIFFERENCE[model.compute_dtype]
            found = self._compare(model, kinds)
            if is_packed and model.group.size == 1 and found[kinds[0]][0] > limit:
                model.backbone.set_attn_implementation("sdpa")
                found = self._compare(model, kinds)
        self._needs_masks |= model.backbone.config._attn_implementation != PACKED
        name = f"{type(model.backbone).__name__} ({setting})"
        described = ", ".join(f"{kind} {_describe(*found[kind])}" for kind in kinds)
        self._kinds = [kind for kind in kinds if found[kind][0] <= limit]
        self._reasons.append(f"{name}: {described}")
        if not self._kinds:
            raise ModelError(
                f"{setting} must name a model that computes of samples side by side what it computes of each alone, "
                f"within {limit:g} nats, got {path!r} ({type(model.backbone).__name__}), for which no layout is left: "
                f"{described}; train another model"
                + (", or with learner.sequence_parallel=1." if model.group.size > 1 else ".")
            )

    def choose(self) -> Layout:
        """The densest layout that fits all models that were checked."""
        kind, microbatch_tokens = self._kinds[0], self._run.learner.tokens_per_microbatch
        if self._ranks.is_first:
            log.info("layout_chosen", layout=kind, differences="; ".join(self._reasons))
        # Attention costs row length x width, everything else 12 x width^2: rows of half the width cost next to nothing.
        dense = min(microbatch_tokens, max(_MIN_ROW_TOKENS, self._hidden_size // 2))
        row_tokens = dense if self._needs_masks else microbatch_tokens
        return Layout(kind, microbatch_tokens, row_tokens, self._run.learner.sequence_parallel)

    @torch.no_grad()
    def _compare(self, model: Probed, kinds: list[LayoutKind]) -> dict[LayoutKind, tuple[float, str]]:
        """Layout -> largest mean difference of a sample from itself alone, over all ranks, and an error instead."""
        text = [token for token in self._text if token < model.vocab_size]
        # Tokens that some layer sees at most; 0 = no layer is limited.
        config = model.backbone.config.get_text_config()
        window = max(getattr(config, name, None) or 0 for name in _WINDOWS)
        samples = _probe_samples(self._run, text, window=window, vocab_size=model.vocab_size)
        total = sum(sample.num_inputs for sample in samples)
        budget = self._run.learner.tokens_per_microbatch
        with _attending_natively(model):
            alone = _numbers(model, samples, Layout("one_per_row", 1), device=self._device)
        errors = dict.fromkeys(kinds, "")
        differences = torch.full((len(kinds),), torch.inf)
        for index, kind in enumerate(kinds):
            try:
                # One row for as many as may be together, so that each sample has neighbours to be disturbed by.
                layout = Layout(kind, budget, min(total, budget), self._run.learner.sequence_parallel)
                packed = _numbers(model, samples, layout, device=self._device)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
                errors[kind] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            means = [float((packed[i] - alone[i]).abs().mean()) for i in (torch.from_numpy(s.indices) for s in samples)]
            differences[index] = np.nan_to_num(max(means), nan=np.inf)
        # The ranks decide together: rounding differs between processors.
        worst = self._ranks.max(differences).tolist()
        return {kind: (worst[index], errors[kind]) for index, kind in enumerate(kinds)}


def _numbers(model: Probed, samples: list[Sample], layout: Layout, *, device: torch.device) -> Tensor:
    """Float32[N, K], in the order of the samples."""
    parts, indices = [], []
    for microbatch in collate(samples, layout=layout):
        parts.append(model.probe(microbatch.to(device)).float().cpu())
        indices.append(microbatch.indices)
    return torch.cat(parts)[torch.cat(indices).argsort()]


@contextmanager
def _computing_in(model: Probed, dtype: torch.dtype) -> Iterator[None]:
    """In float32 a leak cannot hide in rounding, nor rounding look like one."""
    before, model.compute_dtype = model.compute_dtype, dtype
    try:
        yield
    finally:
        model.compute_dtype = before


@contextmanager
def _attending_natively(model: Probed) -> Iterator[None]:
    """Attention as transformers computes it, of whole sequences."""
    attention, group = model.backbone.config._attn_implementation, model.group
    if attention == PACKED:
        model.backbone.set_attn_implementation("sdpa")
    model.group = ALONE
    try:
        yield
    finally:
        model.group = group
        if attention == PACKED:
            model.backbone.set_attn_implementation(attention)


def _describe(difference: float, error: str) -> str:
    return f"fails ({error})" if error else f"differs by {difference:.2g}"


# --- samples ---------------------------------------------------------------------------------------------------------
def _probe_samples(run: RunConfig, text: list[int], *, window: int, vocab_size: int) -> list[Sample]:
    """Three groups that share prompts: one longer than the window where the run allows it, a short and a tiny one."""
    longest = min(run.model.max_length, max(_SHORTEST_PROBE, window + 2 * _RESPONSE_TOKENS))
    response = max(1, min(_RESPONSE_TOKENS, longest // 4))
    # Every response of the first group lies beyond the window from its prompt's beginning.
    groups = [(longest - response, 2), (min(24, longest - response), 3), (1, 1)]
    count = sum(prompt + size * response for prompt, size in groups)
    drawn = np.random.default_rng([run.seed, vocab_size]).integers(0, vocab_size, size=count)
    token_ids = np.concatenate([np.array(text[:count], dtype=np.int64), drawn[len(text) :]])
    samples: list[Sample] = []
    first = 0
    for group, (prompt, size) in enumerate(groups):
        start, token_ids = token_ids[:prompt], token_ids[prompt:]
        for member in range(size):
            length = max(1, response - 5 * member)
            own, token_ids = token_ids[:length], token_ids[length:]
            trained = np.arange(prompt, prompt + length)
            samples.append(Sample(np.concatenate([start, own]), trained, first, group_id=str(group)))
            first += length
    return samples
