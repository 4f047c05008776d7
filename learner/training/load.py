"""Loading: a transformers model that computes the same function as the unmodified checkpoint in evaluation mode."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.configs.data import ModelConfig
from slipstream.learner.errors import ModelError
from slipstream.learner.training.attention import PACKED
from slipstream.learner.training.rounding import LIMIT, MARGIN, difference, rounded
from slipstream.learner.training.sequence_parallel import ALONE, SequenceGroup, can_pack, check_sequence_parallel

LONG = 2048
"""Sequence length above which, on CPUs, masks cost more than one kernel call per run of tokens."""

UNLIMITED = 2**31
"""Maximum row length of a model that declares no limit."""


_PROBE_TOKENS = 32


def load_module(
    kind: Any,
    config: ModelConfig,
    *,
    device: torch.device,
    setting: str,
    group: SequenceGroup = ALONE,
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model with a transformers Auto class (`kind`). Also return the names of weights missing in the checkpoint.

    The model computes the same function as the unmodified checkpoint in evaluation mode. `setting` is the config key of
    the path. Raises ModelError.
    """
    logging.disable_progress_bar()
    try:
        settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        _disable_dropout(settings)
        if kind is AutoModelForSequenceClassification:
            settings.num_labels = 1
        model_class = kind._model_mapping.get(type(settings), None)
        if group.size > 1:
            check_sequence_parallel(settings, model_class, size=group.size, setting=setting, path=config.path)
        module, found = kind.from_pretrained(
            config.path,
            config=settings,
            dtype=torch.float32,
            attn_implementation=choose_attention(
                settings, model_class, config, on_gpu=device.type == "cuda", is_sliced=group.size > 1
            ),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{setting} must be a readable transformers checkpoint of a causal language model, got {config.path!r}: "
            f"{first_line}"
        ) from error
    module = module.to(device)
    _disable_noise(module, gradient_checkpointing=gradient_checkpointing)
    # A sharded model cannot compute outside an engine.
    if not is_sharded(module):
        _check_untouched(module, config, setting=setting)
    return module, sorted(found["missing_keys"])


def _disable_dropout(settings: PreTrainedConfig) -> None:
    """Set all dropout rates to 0, because layers that recompute activations are in training mode."""
    for part in (settings, settings.get_text_config()):
        for name, value in vars(part).items():
            # For example `resid_pdrop` (GPT-2) and `layerdrop` (OPT).
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _disable_noise(module: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Set evaluation mode, like the generators: in training mode, some routers are random."""
    module.eval()
    if gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers recomputes activations only in training mode. Submodules of these layers stay in evaluation mode.
        for part in module.modules():
            part.training = getattr(part, "gradient_checkpointing", False)


@torch.no_grad()
def _check_untouched(module: PreTrainedModel, config: ModelConfig, *, setting: str) -> None:
    """Compare with a model that transformers builds from the unmodified config, sharing the weights.

    Raises ModelError.
    """
    settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    settings.num_labels = module.config.num_labels
    attention = module.config._attn_implementation
    is_packed = attention == PACKED
    untouched = type(module).from_pretrained(
        None,
        config=settings,
        state_dict=module.state_dict(),
        dtype=torch.float32,
        attn_implementation="sdpa" if is_packed else attention,
    )
    if is_packed:
        # LayoutChooser checks packed attention later.
        module.set_attn_implementation("sdpa")
    untouched = untouched.to(module.device).eval()
    got = f"got {config.path!r} ({type(module).__name__})"
    token_ids, limit = probe_tokens(module), LIMIT

    def compute(model: PreTrainedModel) -> Tensor:
        # A classifier's output is a single score, so compare hidden states instead.
        part = model.base_model if hasattr(model, "score") else model
        return part(input_ids=token_ids, use_cache=False)[0]

    try:
        expected = compute(untouched)
        differs_by = difference(compute(module), expected)
        if differs_by > limit:
            with rounded(untouched, torch.float32):
                limit = max(limit, MARGIN * difference(compute(untouched), expected))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"{setting} must name a causal language model that computes {_PROBE_TOKENS} tokens, {got}, which fails "
            f"({first_line(error)}): train another model."
        ) from error
    if is_packed:
        module.set_attn_implementation(PACKED)
    if differs_by > limit:
        raise ModelError(
            f"{setting} must name a model that the learner computes as transformers does in evaluation mode, within "
            f"{limit:.1g} of the spread of its outputs, {got}, which differs by {differs_by:.2g}: train another model."
        )


def probe_tokens(module: PreTrainedModel) -> Tensor:
    """Random token ids, int64[1, T], equal in every call."""
    text = module.config.get_text_config()
    length = min(_PROBE_TOKENS, positions_of(text))
    generator = torch.Generator().manual_seed(text.vocab_size)
    return torch.randint(text.vocab_size, (1, length), generator=generator).to(module.device)


def positions_of(config: PreTrainedConfig) -> int:
    """Maximum row length of a model with masks or positions of fixed size; UNLIMITED if its config declares none."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    # XLNet uses -1 for no limit.
    return found if found and found > 0 else UNLIMITED


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def choose_attention(
    settings: PreTrainedConfig, model_class: Any, config: ModelConfig, *, on_gpu: bool, is_sliced: bool
) -> str | None:
    """Attention implementation for transformers. None: SDPA if the model supports it, else eager.

    `is_sliced`: whether ranks share sequences.
    """
    if (on_gpu or is_sliced or config.max_length >= LONG) and can_pack(settings, model_class):
        return PACKED
    # transformers' SDPA silently ignores the soft cap of attention scores.
    return "eager" if getattr(settings.get_text_config(), "attn_logit_softcapping", None) else None


def is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO-3 has sharded the module's parameters, which are then only gathered during computation."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())
