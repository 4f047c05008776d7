"""Verification of a loaded model: does it hold the tensors that were loaded into it?

Tensors that the engine stores as sent are compared bit for bit, also inside a packed parameter (query, key and value in
one). For a layer that a CPU kernel repacks, only the replacement of the kernel can be checked. Does not support models
that are split between workers.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

Packing = Mapping[str, Sequence[str]]
"""Parts of each module that vLLM packs, in the order of their rows. Example: {"qkv_proj": ["q_proj", "k_proj",
"v_proj"]}."""


def first_mismatch(model: nn.Module, sent: Sequence[tuple[str, Tensor]], *, packing: Packing) -> str:
    """Return the name of the first tensor that the model does not hold as sent; empty if there is none."""
    for name, held, tensor in _comparable(model, sent, packing=packing):
        if not torch.equal(held, tensor.to(device=held.device, dtype=held.dtype)):
            return name
    return ""


def cpu_kernels(model: nn.Module) -> dict[str, object]:
    """Return the kernel of each layer that has a repacked weight; vLLM rebuilds it with every load."""
    kernels = {name: getattr(layer, "cpu_linear", None) for name, layer in model.named_modules()}
    return {name: kernel for name, kernel in kernels.items() if kernel not in (None, nn.functional.linear)}


def first_stale_kernel(model: nn.Module, before: Mapping[str, object]) -> str:
    """Return the name of the first layer that still has its kernel of `before`; empty if there is none."""
    return next((name for name, kernel in cpu_kernels(model).items() if kernel is before.get(name)), "")


def _comparable(
    model: nn.Module, sent: Sequence[tuple[str, Tensor]], *, packing: Packing
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, the model's rows, the sent tensor) for everything that the model stores as sent."""
    held, tensors = dict(model.named_parameters(remove_duplicate=False)), dict(sent)
    packed_in = {part: whole for whole, parts in packing.items() for part in parts}
    for name, tensor in sent:
        if name in held:
            whole, first_row = held[name], 0
        else:
            whole_name, part_names = _packed_names(name, packed_in, packing)
            if whole_name not in held or not all(part in tensors for part in part_names):
                continue
            whole, rows = held[whole_name], [tensors[part].shape[0] for part in part_names]
            if whole.shape[0] != sum(rows):
                continue
            first_row = sum(rows[: part_names.index(name)])
        # vLLM may pad a vocabulary with further rows.
        if whole.shape[1:] == tensor.shape[1:] and whole.shape[:1] >= tensor.shape[:1]:
            yield name, whole.data[first_row : first_row + tensor.shape[0]] if tensor.dim() else whole.data, tensor


def _packed_names(name: str, packed_in: Mapping[str, str], packing: Packing) -> tuple[str, list[str]]:
    """Return the names of the packed parameter and of all its parts; empty if the tensor is not packed."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    whole = packed_in.get(module, "")
    parts = [f"{prefix}.{part}.{kind}" for part in packing.get(whole, ())]
    return f"{prefix}.{whole}.{kind}" if whole else "", parts
