"""Reading back: does a loaded model hold the tensors that were loaded into it?

What the engine stores as it was sent is compared bit for bit, also where it lies packed with others (query, key and
value as one). Of what a kernel keeps in a form of its own, as on CPUs, it is seen whether that was made anew. Not for
models that are split between workers.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

Packing = Mapping[str, Sequence[str]]
"""Parts, in the order of their rows, of each module that vLLM packs. Example: {"qkv_proj": ["q_proj", "k_proj",
"v_proj"]}."""


def first_unlike(model: nn.Module, sent: Sequence[tuple[str, Tensor]], *, packing: Packing) -> str:
    """Name of the first tensor that the model does not hold as it was sent; empty when there is none."""
    for name, held, tensor in _pairs(model, sent, packing=packing):
        if not torch.equal(held, tensor.to(device=held.device, dtype=held.dtype)):
            return name
    return ""


def kernels(model: nn.Module) -> dict[str, object]:
    """What each layer on a CPU multiplies with: its weight in the kernel's form, made anew whenever it is loaded."""
    found = {name: getattr(layer, "cpu_linear", None) for name, layer in model.named_modules()}
    return {name: kernel for name, kernel in found.items() if kernel not in (None, nn.functional.linear)}


def first_stale(model: nn.Module, before: Mapping[str, object]) -> str:
    """Name of the first layer that still has the kernel of `before`; empty when there is none."""
    return next((name for name, kernel in kernels(model).items() if kernel is before.get(name)), "")


def _pairs(
    model: nn.Module, sent: Sequence[tuple[str, Tensor]], *, packing: Packing
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, where the model keeps it, and what was sent, for all that can be compared."""
    held, tensors = dict(model.named_parameters(remove_duplicate=False)), dict(sent)
    packed_in = {part: whole for whole, parts in packing.items() for part in parts}
    for name, tensor in sent:
        if name in held:
            whole, first_row = held[name], 0
        else:
            whole_name, part_names = _packed(name, packed_in, packing)
            if whole_name not in held or not all(part in tensors for part in part_names):
                continue
            whole, rows = held[whole_name], [tensors[part].shape[0] for part in part_names]
            if whole.shape[0] != sum(rows):
                continue
            first_row = sum(rows[: part_names.index(name)])
        # Rows may follow that pad a vocabulary.
        if whole.shape[1:] == tensor.shape[1:] and whole.shape[:1] >= tensor.shape[:1]:
            yield name, whole.data[first_row : first_row + tensor.shape[0]] if tensor.dim() else whole.data, tensor


def _packed(name: str, packed_in: Mapping[str, str], packing: Packing) -> tuple[str, list[str]]:
    """Name of what a tensor is packed into, and the names of all its parts; empty where it is not packed."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    whole = packed_in.get(module, "")
    parts = [f"{prefix}.{part}.{kind}" for part in packing.get(whole, ())]
    return f"{prefix}.{whole}.{kind}" if whole else "", parts
