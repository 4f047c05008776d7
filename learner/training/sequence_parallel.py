"""SequenceGroup: ranks that hold a slice of each sequence, and exchange heads for tokens within attention.

All ranks of a group get the same microbatches and end with the same numbers of all trained tokens, so a loss is
computed as if there were one. The gradient of each rank is that of its own tokens: they add up over ranks.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Differs: rows hold several sequences, and any number of key/value heads
that divides the query heads is dealt out, repeated where needed.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.errors import ModelError

_SOFTMAX = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings that differ with the longest position of a forward pass, of which a slice is only a part."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One rank's view of its group; by default it is alone. `gather` and `exchange` are collective."""

    size: int = 1
    rank: int = 0
    members: dist.ProcessGroup | None = None
    """Its collectives; None: of one rank."""

    def take(self, microbatch: Microbatch) -> Microbatch:
        """The part of a microbatch that this rank computes: a slice of each row, and tokens that are predicted there.

        `spans` stay those of whole rows, which attention sees.
        """
        if self.size == 1:
            return microbatch
        rows, length = microbatch.token_ids.shape
        width = length // self.size
        first = self.rank * width
        positions = microbatch.position_ids
        if positions is None:
            positions = torch.arange(length, device=microbatch.token_ids.device).expand(rows, -1)
        mine = self._mine(microbatch)
        sources = microbatch.sources[mine]
        return dataclasses.replace(
            microbatch,
            token_ids=microbatch.token_ids[:, first : first + width],
            position_ids=positions[:, first : first + width],
            sources=sources // length * width + sources % length - first,
            targets=microbatch.targets[mine],
            temperatures=microbatch.temperatures[mine],
            indices=microbatch.indices[mine],
            copies=microbatch.copies[:, first : first + width],
            experts=None if microbatch.experts is None else microbatch.experts[:, first : first + width],
        )

    def own(self, column: Tensor | None, microbatch: Microbatch) -> Tensor | None:
        """The entries of a column of trained tokens that belong to this rank's part."""
        return column if column is None or self.size == 1 else column[self._mine(microbatch)]

    def gather(self, measured: dict[str, Any], microbatch: Microbatch) -> dict[str, Any]:
        """Numbers of all trained tokens from each rank's own, with a gradient for those alone."""
        if self.size == 1:
            return measured
        mine, found = self._mine(microbatch), {}
        for name, own in measured.items():
            whole = own.new_zeros(len(microbatch.sources), *own.shape[1:])
            whole[mine] = own.detach()
            dist.all_reduce(whole, group=self.members)
            # Every rank has the same loss: each takes the gradient of its own tokens, and they add up over ranks.
            found[name] = whole.index_put((mine,), own)
        return found

    def total(self, part: Tensor) -> Tensor:
        """Sum of each rank's part, with a gradient for its own alone."""
        if self.size == 1:
            return part
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.members)
        return whole + (part - part.detach())

    def _mine(self, microbatch: Microbatch) -> Tensor:
        """Indices of the trained tokens whose source lies in this rank's slice."""
        length = microbatch.token_ids.shape[1]
        return (microbatch.sources % length * self.size // length == self.rank).nonzero()[:, 0]

    def exchange(self, states: Tensor) -> Tensor:
        """All of axis 1 for a slice of axis 2 -> a slice of axis 1 for all of axis 2: heads for tokens, or back."""
        if self.size == 1:
            return states
        dealt = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _Exchange.apply(dealt, self.members).movedim(0, 2).flatten(2, 3)


ALONE = SequenceGroup()


class _Exchange(torch.autograd.Function):
    """All-to-all of entries of the first axis; so is that of their gradients."""

    @staticmethod
    def forward(ctx: Any, dealt: Tensor, members: dist.ProcessGroup) -> Tensor:
        ctx.members = members
        dealt = dealt.contiguous()
        received = torch.empty_like(dealt)
        dist.all_to_all_single(received, dealt, group=members)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(*gradients, ctx.members), None


def check_sequence_parallel(
    settings: PreTrainedConfig, model_class: Any, *, size: int, setting: str, path: str
) -> None:
    """Raise ModelError for a model whose sequences cannot be sliced; `setting` is the config key of its `path`."""
    text = settings.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _SOFTMAX)
    reasons = {
        "images": hasattr(settings, "vision_config"),
        "an encoder-decoder": settings.is_encoder_decoder,
        f"layers that are not softmax attention ({', '.join(others) or 'recurrent'})": others
        or not heads
        or getattr(model_class, "_is_stateful", False),
        f"{heads} attention heads, which {size} ranks cannot share": heads and heads % size,
        "attention that only its own code computes (soft cap, sinks or biases)": not can_pack(settings, model_class),
        f"rotary embeddings that depend on the length ({rope})": rope in _LENGTH_DEPENDENT,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ModelError(
            f"{setting} must name a decoder of softmax attention with a number of heads that "
            f"learner.sequence_parallel={size} divides, got {path!r} ({settings.model_type}) with {reason}: choose "
            "another size, 1 for none."
        )


def can_pack(settings: PreTrainedConfig, model_class: Any) -> bool:
    """Whether a transformers class leaves attention to a registered function, and is exact with SDPA."""
    is_capped = getattr(settings.get_text_config(), "attn_logit_softcapping", None)
    if hasattr(settings, "vision_config"):
        return False
    is_open = getattr(model_class, "_supports_attention_backend", False)
    return bool(is_open and getattr(model_class, "_supports_sdpa", False) and not is_capped)
