"""Policy: a causal language model that returns log-probabilities; loading of models."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.checkpoint_names import AdapterNames, CheckpointNames, NamedTensors
from slipstream.configs.data import ModelConfig
from slipstream.learner.algorithms.inputs import known
from slipstream.learner.algorithms.logprobs import LOGPROBS, DeferredLogits, Requested, measure_tokens
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.engines.optimizer import named_weights
from slipstream.learner.errors import ModelError
from slipstream.learner.training.attention import (
    PACKED,
    SINGLE_RANK,
    PackedRows,
    SequenceGroup,
    check_sequence_parallel,
    choose_attention,
    native_attention,
)
from slipstream.learner.training.rounding import LIMIT, MARGIN, difference, rounded
from slipstream.runtime.images import takes_images
from slipstream.runtime.lora import adapter_parameters, attach_adapter, language_model_class, merge, save_adapter
from slipstream.runtime.routers import Routers, check_layers, find_routers

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}
"""`model.dtype` -> dtype of weights and activations. float16 gradients would underflow."""

_HEAD_TOLERANCE = 1e-5
"""Relative to the largest float32 logit: 84 epsilon for a reordered dot product."""
_HEAD_LOGITS = 64.0
"""Magnitude of compared logits: on small ones, a soft cap has less effect than rounding."""

_WINDOWED, _FULL = "sliding_attention", "full_attention"

UNLIMITED = 2**31
"""Row length of a model without a limit."""

_PROBE_TOKENS = 32

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of models that do not support their inputs."""


class OutputHead(nn.Module):
    """Output projection for chunks of tokens."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        projection = causal_lm.get_output_embeddings()
        # Registered here too: ZeRO-3 gathers parameters of the called module.
        self.weight, self.bias = projection.weight, getattr(projection, "bias", None)
        self._cap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)

    def forward(
        self, states: Tensor, *inputs: Tensor, dtype: torch.dtype, requested: Requested | None, **options: Any
    ) -> dict[str, Any]:
        """`measure_tokens` from hidden states, float[N, D], or deferred `logits` if `requested` is None."""
        weight = self.weight
        if not requested and is_sharded(self):
            # Sharded parameters are gathered only within this call.
            weight = weight.clone()
        soft_cap = (lambda each: torch.tanh(each / self._cap) * self._cap) if self._cap else None
        logits = DeferredLogits(states, weight, self.bias, soft_cap, dtype)
        return measure_tokens(logits, *inputs, requested=requested, **options) if requested else {"logits": logits}


class Policy(nn.Module):
    """Causal language model with weights and activations in `compute_dtype`."""

    group = SINGLE_RANK

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        base_names: CheckpointNames | None = None,
    ) -> None:
        """`base_names`: tensor names before an adapter was attached."""
        super().__init__()
        self.causal_lm = causal_lm
        self.has_adapter = base_names is not None
        self._base_names = base_names
        self.compute_dtype = compute_dtype
        self.head: OutputHead | None = None
        """Computes logits in chunks; None: all at once."""
        self.chunk_elements: int | None = None
        """Logits per chunk; None for those of the device."""
        found = find_routers(causal_lm)
        self.routers = Routers(found) if found else None

    @property
    def vocab_size(self) -> int:
        return self.causal_lm.config.get_text_config().vocab_size

    @property
    def backbone(self) -> PreTrainedModel:
        return self.causal_lm

    @property
    def has_trunk(self) -> bool:
        """True if the transformers class separates layers and head."""
        return self.causal_lm.base_model is not self.causal_lm

    def probe(self, microbatch: Microbatch) -> Tensor:
        """Hidden states scaled to about 1, [N, D], which reveal leaks. Without a trunk: log-probabilities, [N, 1]."""
        if not self.has_trunk:
            return self(microbatch)["logprobs"][:, None]
        part = self.group.take(microbatch)
        self._set_routers(part, None)
        return self.group.gather({"states": scaled(self._states(part))}, microbatch)["states"]

    def forward(
        self,
        microbatch: Microbatch,
        *,
        requested: Requested | None = LOGPROBS,
        candidates: Tensor | None = None,
        reference_logits: Tensor | DeferredLogits | None = None,
        prices: Tensor | None = None,
    ) -> dict[str, Any]:
        """`logprobs` of the trained tokens, float32[N], and the requested numbers (see `measure_tokens`).

        If `requested` is None, returns this rank's `logits` [N, V]. `reference_logits` are also this rank's. Experts
        add `expert_load` [M, E] and, given `prices` (see `Trainer.expert_prices`), `aux_loss`.
        """
        part = self.group.take(microbatch)
        columns = part.targets, part.temperatures
        options: dict[str, Any] = {"requested": requested, "candidates": self.group.own(candidates, microbatch)}
        options |= {"reference_logits": reference_logits, "chunk_elements": self.chunk_elements}
        self._set_routers(part, prices)
        if self.head:
            outputs = self.head(self._states(part), *columns, dtype=self.compute_dtype, **options)
        else:
            keeps_some = len(part.token_ids) == 1 and "logits_to_keep" in signature(self.causal_lm.forward).parameters
            kept = {"logits_to_keep": part.sources} if keeps_some else {}
            logits = forward_pass(self.causal_lm, part, group=self.group, **kept).logits.flatten(0, 1)
            logits = logits if keeps_some else logits[part.sources]
            outputs = measure_tokens(logits, *columns, **options) if requested else {"logits": logits}
        outputs = self.group.gather(outputs, microbatch) if requested else outputs
        return outputs | self._routed(part, prices)

    def _set_routers(self, part: Microbatch, prices: Tensor | None) -> None:
        if self.routers:
            self.routers.given = None if part.experts is None else part.experts.flatten(0, 1)
            self.routers.keeps_logits = prices is not None

    def _routed(self, part: Microbatch, prices: Tensor | None) -> dict[str, Tensor]:
        if not self.routers:
            return {}
        copies = part.copies.flatten()
        found = {"expert_load": self.routers.load(copies)}
        if prices is not None:
            found["aux_loss"] = (prices * self.routers.probabilities(copies)).sum()
        return {name: self.group.total(tensor) for name, tensor in found.items()}

    def _states(self, part: Microbatch) -> Tensor:
        """Hidden states [N, D] that predict the trained tokens."""
        output = forward_pass(self.causal_lm.base_model, part, group=self.group)
        return output.last_hidden_state.flatten(0, 1)[part.sources]

    @torch.no_grad()
    def check_head(self) -> None:
        """Drop the head unless it computes the model's logits. Collective."""
        if not self.head:
            return
        inputs = {"input_ids": probe_tokens(self.causal_lm), "use_cache": False}
        seen: list[Tensor] = []

        def compute(states: Tensor) -> Tensor:
            return self.head(states, dtype=torch.float32, requested=None)["logits"].compute()

        def enlarge(_: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
            seen.append(arguments[0])
            return arguments[0] * scale

        def is_close(found: Tensor, expected: Tensor) -> bool:
            return bool((found - expected).abs().max() <= _HEAD_TOLERANCE * expected.abs().max())

        try:
            with in_float32(self):
                states = self.causal_lm.base_model(**inputs).last_hidden_state
                scale = _HEAD_LOGITS / compute(states).abs().max()
                with self.causal_lm.get_output_embeddings().register_forward_pre_hook(enlarge):
                    expected = self.causal_lm(**inputs).logits
                found = compute(states * scale)
            is_same = is_close(seen[0], states) and is_close(found, expected)
        # The head has more layers than a projection.
        except (RuntimeError, AttributeError, IndexError):
            is_same = False
        if not is_same:
            self.head = None

    @cached_property
    def checkpoint_names(self) -> CheckpointNames:
        """Names for inference engines. Raises WeightTransferError if a tensor cannot be published."""
        return AdapterNames(self.causal_lm) if self.has_adapter else CheckpointNames(self.causal_lm)

    @property
    def saved_names(self) -> CheckpointNames:
        return self._base_names or self.checkpoint_names

    @property
    def saved_dtype(self) -> torch.dtype:
        # A product of the adapter may be smaller than bfloat16 resolves.
        return torch.float32 if self.has_adapter else self.compute_dtype

    def to_saved(self, tensors: NamedTensors, rest: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.saved_names.convert(merge(self.causal_lm, tensors, adapter=rest) if self.has_adapter else tensors)

    def save_rest(self, folder: Path, rest: dict[str, Tensor]) -> None:
        if rest:
            save_adapter(self.causal_lm, folder, weights=rest)

    def weights(self, *, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Adapter parameters have peft's names unless `is_whole`."""
        is_adapter = self.has_adapter and not is_whole
        return adapter_parameters(self.causal_lm) if is_adapter else named_weights(self.causal_lm)


class RewardModel(Policy):
    """Policy on a single-label sequence classifier."""

    def forward(self, microbatch: Microbatch, *, prices: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        """`scores`, float32[N], at tokens before the trained ones, and router outputs."""
        part = self.group.take(microbatch)
        self._set_routers(part, prices)
        scores = self.causal_lm.score(self._states(part)).squeeze(-1)
        return self.group.gather({"scores": scores}, microbatch) | self._routed(part, prices)


class WideLinear(nn.Linear):
    """Linear layer that computes in float32, for heads with one output."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Hold a model's weights in float32 within the block; with ZeRO-3, those of the layer that computes.

    `model`: has `compute_dtype`. The weights must not change.
    """
    held: dict[int, tuple[nn.Parameter, Tensor]] = {}
    before, model.compute_dtype = model.compute_dtype, torch.float32

    def widen(part: nn.Module, *_: Any) -> None:
        for parameter in part.parameters(recurse=False):
            if parameter.dtype != torch.float32:
                held[id(parameter)] = parameter, parameter.data
                parameter.data = parameter.data.float()

    def narrow(part: nn.Module, *_: Any) -> None:
        for parameter in part.parameters(recurse=False):
            if id(parameter) in held:
                parameter.data = held.pop(id(parameter))[1]

    handles = []
    for part in model.modules():
        if is_sharded(model):
            # After ZeRO-3 has gathered them, and before it frees them.
            handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(narrow, prepend=True)]
        else:
            widen(part)
    try:
        yield
    finally:
        model.compute_dtype = before
        for handle in handles:
            handle.remove()
        for parameter, data in held.values():
            parameter.data = data


def scaled(states: Tensor) -> Tensor:
    """Hidden states divided by their root mean square per token, float32[N, D]."""
    states = states.float()
    return states / states.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)


def forward_pass(module: nn.Module, part: Microbatch, *, group: SequenceGroup, **arguments: Any) -> Any:
    """Forward pass over this rank's part of a microbatch."""
    inputs = {"position_ids": part.position_ids, "pixel_values": part.pixel_values, "image_grid_thw": part.image_grids}
    arguments |= {name: tensor for name, tensor in inputs.items() if tensor is not None}
    token_ids = part.token_ids
    if part.is_image is not None:
        # transformers inserts images at image tokens, also at generated ones.
        arguments["inputs_embeds"] = module.get_input_embeddings()(token_ids)
        token_ids = torch.where(part.is_image, module.config.image_token_id, -1)
    if module.config._attn_implementation == PACKED:
        arguments |= {"attention_mask": None, "packed_rows": PackedRows(part.spans, group)}
    else:
        arguments["attention_mask"] = _attention_mask(module.config, part)
    return module(input_ids=token_ids, use_cache=False, **arguments)


def _attention_mask(config: Any, microbatch: Microbatch) -> Tensor | dict[str, Tensor] | None:
    """Mask with any window, one per layer type if only some have one; None without a shared prompt."""
    if microbatch.spans is None or not microbatch.spans.has_shared:
        return None
    mask = microbatch.spans.mask(microbatch.token_ids.shape, microbatch.token_ids.device)
    masks, text = {_FULL: mask}, config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or [_WINDOWED])
    if window and mask.shape[-1] > window and kinds in ({_WINDOWED}, {_WINDOWED, _FULL}):
        # Distances along the sequence: a row may have siblings between a response and its prompt.
        positions = known(microbatch.position_ids)
        positions = positions if positions.dim() == 2 else positions[0]
        near = mask & (positions[:, None, :, None] - positions[:, None, None, :] < window)
        masks = {_WINDOWED: near, _FULL: mask} if _FULL in kinds else {_WINDOWED: near}
    if config._attn_implementation == "eager":
        # Added to the scores.
        hidden = torch.finfo(torch.float32).min
        masks = {kind: torch.where(each, 0.0, hidden) for kind, each in masks.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def load_policy(
    config: ModelConfig, *, is_reward_model: bool = False, setting: str = "model.path", **options: Any
) -> Policy:
    """Load a checkpoint with any adapter. `options`: see `load_module`. Raises ModelError, ConfigError."""
    check_layers(config)
    kind = AutoModelForSequenceClassification if is_reward_model else language_model_class(config.path)
    module, _ = load_module(kind, config, setting=setting, **options)
    base_names = None
    if config.lora:
        base_names = CheckpointNames(module)
        attach_adapter(module, config.lora, base=config.path)
    if config.freeze_vision and takes_images(config.path):
        module.base_model.visual.requires_grad_(False)
    if is_reward_model:
        module.score.forward = partial(WideLinear.forward, module.score)
    wrap = RewardModel if is_reward_model else Policy
    policy = wrap(module, compute_dtype=COMPUTE_DTYPES[config.dtype], base_names=base_names)
    policy.group = options.get("group", SINGLE_RANK)
    if not is_reward_model and module.get_output_embeddings() is not None and policy.has_trunk:
        policy.head = OutputHead(module)
        if not is_sharded(module):
            policy.check_head()
    try:
        # Cache the names before sharding changes the shapes.
        policy.checkpoint_names  # noqa: B018
    except WeightTransferError as error:
        raise ModelError(f"model.path: {error}") from error
    return policy


def load_module(
    kind: Any,
    config: ModelConfig,
    *,
    device: torch.device,
    setting: str,
    group: SequenceGroup = SINGLE_RANK,
    gradient_checkpointing: bool = False,
    loading: AbstractContextManager[None] | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model with a transformers Auto class (`kind`), and list weights that the checkpoint lacks.

    `setting`: config key of the path. `loading`: context such as `sharded_loading`. Raises ModelError, also if an
    unsharded model differs from transformers in evaluation mode.
    """
    logging.disable_progress_bar()
    # ZeRO-3 draws random numbers here, but adapters must start equal everywhere.
    with torch.random.fork_rng(), loading or nullcontext():
        module, found = _load_pretrained(kind, config, on_gpu=device.type == "cuda", setting=setting, group=group)
        module = module.to(device)
        # Some routers are random in training mode.
        module.eval()
        if gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
            # transformers recomputes activations in training mode. Submodules stay in evaluation mode.
            for part in module.modules():
                part.training = getattr(part, "gradient_checkpointing", False)
        # A sharded model cannot compute outside an engine.
        if not is_sharded(module):
            with native_attention(module):
                _check_untouched(module, config, setting=setting)
    return module, sorted(found["missing_keys"])


def _load_pretrained(kind: Any, config: ModelConfig, *, on_gpu: bool, setting: str, group: SequenceGroup) -> Any:
    """The model and transformers' report. Raises ModelError."""
    try:
        settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        _disable_dropout(settings)
        if kind is AutoModelForSequenceClassification:
            settings.num_labels = 1
        model_class, is_sliced = kind._model_mapping.get(type(settings), None), group.size > 1
        if is_sliced:
            check_sequence_parallel(settings, model_class, size=group.size, setting=setting, path=config.path)
        return kind.from_pretrained(
            config.path,
            config=settings,
            dtype=COMPUTE_DTYPES[config.dtype],
            attn_implementation=choose_attention(settings, model_class, config, on_gpu=on_gpu, is_sliced=is_sliced),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(
            f"{setting} must be a readable transformers checkpoint of a causal language model, got {config.path!r}: "
            f"{first_line(error)}"
        ) from error


def _disable_dropout(settings: PreTrainedConfig) -> None:
    """Disable dropout: layers that recompute activations are in training mode."""
    for part in (settings, settings.get_text_config()):
        for name, value in vars(part).items():
            # For example `resid_pdrop` (GPT-2) and `layerdrop` (OPT).
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


@torch.no_grad()
def _check_untouched(module: PreTrainedModel, config: ModelConfig, *, setting: str) -> None:
    """Raise ModelError unless a model of the unmodified config computes the same."""
    settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    settings.num_labels = module.config.num_labels
    options = {"config": settings, "state_dict": module.state_dict(), "dtype": module.dtype}
    attention = module.config._attn_implementation
    untouched = type(module).from_pretrained(None, **options, attn_implementation=attention).to(module.device).eval()
    got = f"got {config.path!r} ({type(module).__name__})"
    token_ids, limit = probe_tokens(module), LIMIT

    def compute(model: PreTrainedModel) -> Tensor:
        # Hidden states of a classifier, which outputs one score.
        part = model.base_model if hasattr(model, "score") else model
        return part(input_ids=token_ids, use_cache=False)[0]

    try:
        expected = compute(untouched)
        differs_by = difference(compute(module), expected)
        if differs_by > limit:
            with rounded(untouched, module.dtype):
                limit = max(limit, MARGIN * difference(compute(untouched), expected))
    except FAILURES as error:
        raise ModelError(
            f"{setting} must name a causal language model that computes {_PROBE_TOKENS} tokens, {got}, which fails "
            f"({first_line(error)}): train another model."
        ) from error
    if differs_by > limit:
        raise ModelError(
            f"{setting} must name a model that the learner computes as transformers does in evaluation mode, within "
            f"{limit:.1g} of the spread of its outputs, {got}, which differs by {differs_by:.2g}: train another model."
        )


def probe_tokens(module: PreTrainedModel) -> Tensor:
    """Fixed random token ids, int64[1, T]."""
    text = module.config.get_text_config()
    length = min(_PROBE_TOKENS, positions_of(text))
    generator = torch.Generator().manual_seed(text.vocab_size)
    return torch.randint(text.vocab_size, (1, length), generator=generator).to(module.device)


def positions_of(config: PreTrainedConfig) -> int:
    """Maximum row length in the config, else UNLIMITED."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    # XLNet uses -1 for no limit.
    return found if found > 0 else UNLIMITED


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def is_sharded(module: nn.Module) -> bool:
    """True if ZeRO-3 has sharded the parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())
