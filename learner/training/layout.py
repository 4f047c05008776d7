"""LayoutChooser: the densest layout that lets every model compute packed samples as if alone.

Some models ignore masks or windows, or leak recurrent states. A layout is exact if rounding explains, on the run's
prompts,

    |packed - alone| and |packed - packed with other neighbors|, relative to the standard deviation of `alone`,

and a model is causal if rounding explains the last token's effect on earlier ones. `check_rows` repeats this in
training.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from slipstream.configs.run import RunConfig
from slipstream.learner.batching.collate import Layout, LayoutKind, collate
from slipstream.learner.batching.microbatch import Sample, SampleImages
from slipstream.learner.errors import DivergenceError, ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.attention import PACKED, SINGLE_RANK, native_attention
from slipstream.learner.training.model import FAILURES, UNLIMITED, Policy, first_line, in_float32, positions_of
from slipstream.learner.training.rounding import LIMIT, MARGIN, difference, rounded
from slipstream.learner.training.second_model import ValueModel
from slipstream.runtime.images import VisionModel, takes_images

_SHORTEST_PROBE = 64
_RESPONSE_TOKENS = 16
_MIN_ROW_TOKENS = 64
_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")
_DRAWS = 3

CHECK_EVERY_STEPS = 20
_END_TOKENS = 8
_UNPACKED = Layout("one_at_a_time", 1)

ProbedModel = Policy | ValueModel

log = structlog.get_logger(__name__)


class LayoutChooser:
    """Life: check, once per further model -> choose. Both are collective."""

    def __init__(self, run: RunConfig, policy: Policy, *, ranks: Ranks, text: Sequence[int] = ()) -> None:
        """Check the policy. `text`: tokens of the run's prompts. Raises ModelError."""
        self._run = run
        self._text = text
        self._ranks = ranks
        self._hidden_size = policy.backbone.config.get_text_config().hidden_size
        packed: list[LayoutKind] = ["shared_rows", "one_row"] if run.learner.packing else []
        self._kinds: list[LayoutKind] = [*packed, "one_per_row", "one_at_a_time"]
        self._model_checks: list[_ModelCheck] = []
        self.check(policy, setting="model.path", path=run.model.path)

    def check(self, model: ProbedModel, *, setting: str, path: str) -> None:
        """Replace inexact packed attention by SDPA, then drop layouts until all models are exact.

        `model` must be unsharded. Raises ModelError if no layout is left or it isn't causal.
        """
        model_check = _ModelCheck(self._run, model, path=path, text=self._text, ranks=self._ranks)
        model_check.check_causality(setting=setting, path=path)
        self._model_checks.append(model_check)
        if model_check.is_packed and model.group.size == 1 and not model_check.is_exact(self._layout(self._kinds[0])):
            model.backbone.set_attn_implementation("sdpa")
            model_check.found.clear()
        # Earlier models must be exact in the sparser layout, too.
        while not all(each.is_exact(self._layout(self._kinds[0])) for each in self._model_checks):
            self._kinds.pop(0)
            if not self._kinds:
                raise ModelError(
                    f"{setting} must name a model that computes samples in one batch as it computes each alone, within "
                    f"rounding, got {path!r} ({model_check.name}), which no layout suits: {model_check.describe()}; "
                    "train another model" + (", or set learner.sequence_parallel=1." if model.group.size > 1 else ".")
                )

    def choose(self) -> Layout:
        layout = self._layout(self._kinds[0])
        if self._ranks.is_first:
            differences = "; ".join(f"{each.name}: {each.describe()}" for each in self._model_checks)
            log.info("layout_chosen", layout=layout.kind, row_tokens=layout.row_tokens, differences=differences)
        return layout

    def _layout(self, kind: LayoutKind) -> Layout:
        learner = self._run.learner
        row_tokens = budget = learner.tokens_per_microbatch
        if kind == "shared_rows" and not all(each.is_packed for each in self._model_checks):
            # Per token, attention costs row length x width, the rest 12 x width^2.
            row_tokens = min(budget, max(_MIN_ROW_TOKENS, self._hidden_size // 2))
        row_tokens = min(row_tokens, *(each.positions for each in self._model_checks))
        return Layout(kind, budget, row_tokens, learner.sequence_parallel)


class _ModelCheck:
    """Compares layouts for one model. Every method is collective."""

    def __init__(self, run: RunConfig, model: ProbedModel, *, path: str, text: Sequence[int], ranks: Ranks) -> None:
        self._run = run
        self._model = model
        self._probe = _Probe(model, ranks)
        self._vision = VisionModel(path) if takes_images(path) else None
        self._text = [token for token in text if token < model.vocab_size]
        self.name = type(model.backbone).__name__
        self.found: dict[Layout, tuple[float, str]] = {}
        """Layout -> difference relative to rounding, and any error."""

    @property
    def is_packed(self) -> bool:
        return self._model.backbone.config._attn_implementation == PACKED

    @property
    def positions(self) -> int:
        return UNLIMITED if self.is_packed else positions_of(self._model.backbone.config)

    def describe(self) -> str:
        return ", ".join(
            f"{layout.kind} " + (f"fails ({error})" if error else f"differs by {excess:.2g} times rounding")
            for layout, (excess, error) in self.found.items()
        )

    @torch.no_grad()
    def check_causality(self, *, setting: str, path: str) -> None:
        """Raise ModelError if a sample's last token changes earlier predictions."""
        samples = indexed([sample for sample in self._samples(0)[:2] if len(self._probe.before_last(sample))])
        if not samples:
            return
        changed = [self._probe.with_changed_tokens(sample, sample.trained[-1:] - 1) for sample in samples]
        got = f"got {path!r} ({self.name})"
        try:
            with self._natively(torch.float32):
                before, after = (self._probe.outputs(each) for each in (samples, changed))
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise ModelError(
                f"{setting} must name a model that computes {samples[0].num_inputs} tokens, {got}, which fails "
                f"({first_line(error)}): train another model, or lower model.max_length."
            ) from error
        found = difference(after, before, parts=[self._probe.before_last(sample) for sample in samples])
        with self._natively(torch.float32):
            excess = self._probe.excess_over_rounding(found, samples)
        if excess > 1:
            raise ModelError(
                f"{setting} must name a causal language model, {got}, in which the last token changes what the tokens "
                f"before it predict, by {excess:.2g} times what rounding explains: train a decoder."
            )

    @torch.no_grad()
    def is_exact(self, layout: Layout) -> bool:
        if layout not in self.found:
            found = 0.0, ""
            # float32 reveals small leaks, but half precision uses other kernels. Full-length rows reveal positions
            # counted along the row.
            dtypes = dict.fromkeys((torch.float32, self._model.compute_dtype))
            for dtype, fills_row in product(dtypes, (False, True)):
                if found[0] > 1:
                    break
                best = self._compare(layout, dtype, 0, fills_row=fills_row)
                # Rounding may change routing in one draw; leaks occur in all.
                for draw in range(1, _DRAWS):
                    if 1 < best[0] < torch.inf:
                        best = min(best, self._compare(layout, dtype, draw, fills_row=fills_row))
                found = max(found, best)
            self.found[layout] = found
        return self.found[layout][0] <= 1

    def _compare(self, layout: Layout, dtype: torch.dtype, draw: int, *, fills_row: bool) -> tuple[float, str]:
        """Difference over ranks relative to rounding, and any error. `fills_row`: rows as in training."""
        samples, others = self._samples(draw), self._samples(draw + _DRAWS)
        total = sum(sample.num_inputs for sample in samples)
        fillers = self._fillers(layout, total, samples[0].num_inputs) if fills_row else []
        if fills_row and not fillers:
            return 0.0, ""
        is_new = [int(sample.group_id) % 2 == 1 for sample in samples]
        exchanged = [b if new else a for a, b, new in zip(samples, others, is_new, strict=True)]
        # Few rows, so that each sample has neighbors.
        row_tokens = max(layout.row_tokens, min(total, layout.microbatch_tokens, self.positions))
        rows = dataclasses.replace(layout, row_tokens=row_tokens)
        found, error = torch.inf, ""
        try:
            with self._natively(dtype):
                alone = self._probe.outputs(samples)
            with _computing_in(self._model, dtype):
                packed, disturbed = (
                    self._probe.outputs(indexed([*each, *fillers]), rows)[: len(alone)] for each in (samples, exchanged)
                )
            parts = [sample.indices for sample in samples]
            kept = [part for part, new in zip(parts, is_new, strict=True) if not new]
            moved = difference(disturbed, packed, parts=kept, spread_of=alone)
            found = max(moved, difference(packed, alone, parts=parts))
        except torch.OutOfMemoryError:
            raise
        except FAILURES as caught:
            error = first_line(caught)
        with self._natively(dtype):
            return self._probe.excess_over_rounding(found, samples), error

    @contextmanager
    def _natively(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute whole sequences with transformers' attention."""
        model = self._model
        group, model.group = model.group, SINGLE_RANK
        try:
            with native_attention(model.backbone), _computing_in(model, dtype):
                yield
        finally:
            model.group = group

    def _samples(self, draw: int) -> list[Sample]:
        """Groups with shared prompts, longest first, of text in draw 0, else of random tokens."""
        config = self._model.backbone.config.get_text_config()
        longest = min(self._run.model.max_length, positions_of(config))
        # Attention windows, and the largest unscaled rotary position; 0 = unlimited.
        windows = [getattr(config, name, None) or 0 for name in _WINDOWS]
        windows.append((getattr(config, "rope_parameters", None) or {}).get("original_max_position_embeddings") or 0)
        window = min(longest, max(_SHORTEST_PROBE, max(windows) + 2 * _RESPONSE_TOKENS))
        response = max(1, min(_RESPONSE_TOKENS, window // 4))
        # Responses to the first prompt do not see its start through the window.
        groups = [(window - response, 2), (min(24, window - response), 3), (1, 1)]
        random = np.random.default_rng([self._run.seed, self._model.vocab_size, draw])
        text = [] if draw else list(self._text)

        def take(count: int) -> np.ndarray:
            own = np.array(text[:count], dtype=np.int64)
            del text[:count]
            return np.concatenate([own, random.integers(0, self._model.vocab_size, size=count - len(own))])

        samples = []
        if longest > window:
            trained = np.unique(np.linspace(1, longest - 1, _SHORTEST_PROBE).astype(np.int64))
            samples.append(Sample(take(longest), trained, 0, group_id="0"))
        for group, (prompt, size) in enumerate(groups, 1):
            start = take(prompt)
            for member in range(size):
                own = take(max(1, response - 5 * member))
                trained = np.arange(prompt, prompt + len(own))
                samples.append(Sample(np.concatenate([start, own]), trained, 0, group_id=str(group)))
        return indexed([*samples, *self._samples_with_images(random, longest)])

    def _samples_with_images(self, random: np.random.Generator, longest: int) -> list[Sample]:
        if not self._vision:
            return []
        side, embed = 2 * self._vision.merge_size, self._model.backbone.base_model.visual.patch_embed
        grid, first = (1, side, side), 2
        count = self._vision.num_tokens(grid)
        prompt = first + count + 2
        if prompt + 4 > longest:
            return []
        is_image = np.zeros(prompt + 4, dtype=np.bool_)
        is_image[first : first + count] = True
        samples, size = [], embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
        for group, members in (("4", 2), ("5", 1)):
            patches = random.standard_normal((side**2, size), dtype=np.float32)
            start = random.integers(0, self._model.vocab_size, size=prompt)
            start[is_image[:prompt]] = self._vision.token_id
            images = SampleImages(
                ids=[f"{group}-{patches[0, 0]}"],
                grids=[grid],
                merge_size=self._vision.merge_size,
                is_image=is_image,
                positions=self._vision.positions(prompt + 4, [(first, grid)]),
                patches=lambda _, patches=patches: patches,
            )
            for _ in range(members):
                own = random.integers(0, self._model.vocab_size, size=4)
                trained = np.arange(prompt, prompt + 4)
                samples.append(Sample(np.concatenate([start, own]), trained, 0, group_id=group, images=images))
        return samples

    def _fillers(self, layout: Layout, total: int, length: int) -> list[Sample]:
        """Samples of `length` inputs that fill a row of `total` tokens."""
        if layout.kind not in ("shared_rows", "one_row"):
            return []
        random, trained = np.random.default_rng([self._run.seed, length]), np.array([length])
        return [
            Sample(random.integers(0, self._model.vocab_size, length + 1), trained, 0, group_id=f"filler {index}")
            for index in range((layout.row_tokens - total) // length)
        ]


def _computing_in(model: ProbedModel, dtype: torch.dtype) -> AbstractContextManager[None]:
    """`dtype`: float32, or that of the weights."""
    return nullcontext() if dtype == model.compute_dtype else in_float32(model)


@torch.no_grad()
def check_rows(model: ProbedModel, samples: Sequence[Sample], *, layout: Layout, ranks: Ranks, step: int) -> None:
    """Verify, in training precision, that a sample depends on neither row neighbors nor its last token.

    Takes three to seven forward passes over three short samples. Collective. Raises DivergenceError.
    """
    samples = [sample for sample in samples if len(sample.trained)]
    if not samples:
        return
    chosen, probe = _short_row(samples), _Probe(model, ranks)
    subject = chosen[-1]
    neighbors = [probe.with_changed_tokens(each, _end_of(each)) for each in chosen]
    last = probe.with_changed_tokens(subject, subject.trained[-1:] - 1)
    rows = dataclasses.replace(layout, row_tokens=max(layout.row_tokens, *(each.num_inputs for each in samples)))
    before = probe.outputs(chosen, rows)
    for what, other, part in (
        ("its row neighbors", [*neighbors[:-1], subject], subject.indices),
        ("its last token", [*chosen[:-1], last], probe.before_last(subject)),
    ):
        found = difference(probe.outputs(other, rows), before, parts=[part] if len(part) else [])
        excess = probe.excess_over_rounding(found, chosen)
        if excess > 1:
            raise DivergenceError(
                f"{type(model.backbone).__name__} must compute a sample independently of {what}, got a change of "
                f"{excess:.2g} times the rounding error in step {step}, with layout {layout.kind}: resume with "
                "learner.packing=false, or train another model."
            )


def _short_row(samples: Sequence[Sample]) -> list[Sample]:
    """The shortest sample, after one of another group and a sibling, if any."""
    ordered = sorted(samples, key=lambda sample: sample.num_inputs)
    subject = ordered[0]
    sibling = [each for each in ordered[1:] if each.group_id == subject.group_id][:1]
    other = [each for each in ordered if each.group_id != subject.group_id][:1]
    # A reward model trains one token, but earlier ones must not change.
    trained = np.arange(max(1, _end_of(subject)[0]), subject.trained[-1] + 1)
    return indexed([*other, *sibling, dataclasses.replace(subject, trained=trained)])


def _end_of(sample: Sample) -> np.ndarray:
    """Positions of the response, at least `_END_TOKENS` inputs, but no images."""
    start = min(int(sample.trained[0]), max(0, sample.num_inputs - _END_TOKENS))
    if sample.images:
        start = max(start, int(np.flatnonzero(sample.images.is_image)[-1]) + 1)
    return np.arange(start, len(sample.token_ids))


class _Probe(NamedTuple):
    """A model's outputs for samples."""

    model: ProbedModel
    ranks: Ranks

    def outputs(self, samples: Sequence[Sample], layout: Layout = _UNPACKED) -> Tensor:
        """float32[N, K], in sample order."""
        parts, indices = [], []
        for microbatch in collate(samples, layout=layout):
            parts.append(self.model.probe(microbatch.to(self.ranks.device)).float().cpu())
            indices.append(microbatch.indices)
        return torch.cat(parts)[torch.cat(indices).argsort()]

    def excess_over_rounding(self, found: float, samples: Sequence[Sample]) -> float:
        """Largest `found` of the ranks, relative to what rounding explains. Collective."""
        worst, explained = float(self.ranks.max(torch.tensor([found]))[0]), LIMIT
        if LIMIT < worst < torch.inf:
            expected = self.outputs(samples)
            with rounded(self.model.backbone, self.model.compute_dtype):
                moved = difference(self.outputs(samples), expected, parts=[sample.indices for sample in samples])
            explained = max(LIMIT, MARGIN * float(self.ranks.max(torch.tensor([moved]))[0]))
        return worst / explained

    def with_changed_tokens(self, sample: Sample, positions: np.ndarray) -> Sample:
        token_ids = sample.token_ids.astype(np.int64)
        token_ids[positions] = (token_ids[positions] + 1 + positions % 7) % self.model.vocab_size
        return dataclasses.replace(sample, token_ids=token_ids)

    def before_last(self, sample: Sample) -> np.ndarray:
        """Outputs that must not depend on the last token."""
        # Unlike the hidden state that predicts it, its log-probability depends on it.
        end = sample.num_inputs if self.model.has_trunk else sample.num_inputs - 1
        return sample.indices[sample.trained < end]


def indexed(samples: Sequence[Sample]) -> list[Sample]:
    """Number the samples' trained tokens consecutively."""
    starts = accumulate((len(sample.trained) for sample in samples), initial=0)
    return [dataclasses.replace(sample, first_index=start) for sample, start in zip(samples, starts, strict=False)]
