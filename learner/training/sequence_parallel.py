"""SequenceGroup: ranks that each compute a slice of every sequence and exchange heads for tokens in attention.

Ranks of a group get the same microbatches and gather the outputs of all trained tokens. Each has its slice's gradient,
and gradients add up over ranks.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Differs: rows may hold several sequences, and key/value heads that ranks
cannot share evenly are repeated.
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
"""Rotary embeddings that depend on a forward pass's longest position, unknown to a slice."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """One rank's view of its group. `gather`, `total`, and `exchange` are collective."""

    size: int = 1
    rank: int = 0
    members: dist.ProcessGroup | None = None
    """None for a group of one."""

    def take(self, microbatch: Microbatch) -> Microbatch:
        """Slice each row and keep the trained tokens predicted there. `spans` still describe whole rows."""
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
        """This rank's entries of a column over trained tokens."""
        return column if column is None or self.size == 1 else column[self._mine(microbatch)]

    def gather(self, measured: dict[str, Any], microbatch: Microbatch) -> dict[str, Any]:
        """Outputs of all ranks, with gradients only for this rank's."""
        if self.size == 1:
            return measured
        mine, found = self._mine(microbatch), {}
        for name, own in measured.items():
            whole = own.new_zeros(len(microbatch.sources), *own.shape[1:])
            whole[mine] = own.detach()
            dist.all_reduce(whole, group=self.members)
            found[name] = whole.index_put((mine,), own)
        return found

    def total(self, part: Tensor) -> Tensor:
        """Sum over ranks, with a gradient only for this rank's part."""
        if self.size == 1:
            return part
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.members)
        return whole + (part - part.detach())

    def _mine(self, microbatch: Microbatch) -> Tensor:
        """Indices of trained tokens predicted in this rank's slice."""
        length = microbatch.token_ids.shape[1]
        return (microbatch.sources % length * self.size // length == self.rank).nonzero()[:, 0]

    def exchange(self, states: Tensor) -> Tensor:
        """Gather axis 2 and split axis 1 over ranks."""
        if self.size == 1:
            return states
        dealt = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _Exchange.apply(dealt, self.members).movedim(0, 2).flatten(2, 3)


SINGLE_RANK = SequenceGroup()


class _Exchange(torch.autograd.Function):
    """All-to-all over the first axis, in both passes."""

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
    """Raise ModelError if sequences cannot be split over ranks. `setting`: config key of `path`."""
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
        "attention that needs the model's code (soft cap, sinks or biases)": not can_pack(settings, model_class),
        f"rotary embeddings that depend on the length ({rope})": rope in _LENGTH_DEPENDENT,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ModelError(
            f"{setting} must name a decoder of softmax attention with a number of heads that "
            f"learner.sequence_parallel={size} divides, got {path!r} ({settings.model_type}) with {reason}: choose "
            "another size, 1 for none."
        )


def can_pack(settings: PreTrainedConfig, model_class: Any) -> bool:
    """True if a transformers class supports `packed_attention`."""
    is_capped = getattr(settings.get_text_config(), "attn_logit_softcapping", None)
    supported = (getattr(model_class, name, False) for name in ("_supports_attention_backend", "_supports_sdpa"))
    return not hasattr(settings, "vision_config") and not is_capped and all(supported)
