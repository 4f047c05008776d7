"""CheckpointNames: converts a transformers module's tensors to the layout of its checkpoint on the hub.

transformers changes the layout of some models when it loads them, such as merging a layer's experts. Engines load the
checkpoint layout, so the learner sends that. Each generator derives the same names from its model config.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import TensorSlot
from slipstream.broker.weights.buckets import TensorMeta, dtype_name
from slipstream.runtime.lora import adapter_parameters

NamedTensors = Iterable[tuple[str, Tensor]]


class CheckpointNames:
    """Names, shapes and dtypes of a module's checkpoint, and conversion in both directions.

    Includes persistent buffers; a tied tensor once, under its first name.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """`module` may be on the meta device or sharded. Raises WeightTransferError if it cannot be published."""
        if quantized := getattr(module.config, "quantization_config", None):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
            raise WeightTransferError(
                f"{type(module).__name__} cannot be published: its checkpoint must be unquantized, like the learner's "
                f"weights, got {method}; convert it to bfloat16 first"
            )
        # The model type's conversions, not its file's, so that all generators derive the same names.
        known = get_model_conversion_mapping(module, add_legacy=False)
        conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
        self._model = SimpleNamespace(
            _weight_conversions=conversions, config=module.config, get_parameter=module.get_parameter
        )
        held = module.state_dict(keep_vars=True)
        names = defaultdict[int, list[str]](list)
        for name, tensor in held.items():
            names[id(tensor)].append(name)
        self.tied = [several for several in names.values() if len(several) > 1]
        """Groups of names of one tensor; the checkpoint uses the first."""
        # ZeRO-3 empties a parameter and keeps its shape in `ds_shape`.
        shapes = {name: getattr(held[name], "ds_shape", held[name].shape) for name, *_ in names.values()}
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        separate = {name: self._revert({name: tensor}) for name, tensor in meta.items()}
        self._renamed = {
            name: target for name, made in separate.items() for target, tensor in made.items() if tensor is meta[name]
        }
        """Module name -> checkpoint name of tensors that need no conversion."""
        members = defaultdict[str, list[str]](list)
        for name, made in separate.items():
            members[next(iter(made))].append(name)
        self._members = {name: members[next(iter(made))] for name, made in separate.items()}
        """Module name -> all module names converted together."""
        self.tensors: dict[str, Tensor] = dict(self.convert(meta.items()))
        """Checkpoint name -> meta tensor, in the order of `convert`."""
        together = self._revert(meta)
        is_same = {name: t.shape for name, t in together.items()} == {name: t.shape for name, t in self.tensors.items()}
        if not is_same or _size(together) != _size(meta):
            raise WeightTransferError(
                f"{type(module).__name__} cannot be published: its layout in transformers must convert to that of its "
                "checkpoint one layer at a time and without loss; train another model"
            )
        strict = sorted(module._keep_in_fp32_modules_strict or ())
        self._full = {
            target for name, made in separate.items() for target in made if any(part in name for part in strict)
        }

    def metadata(self, dtype: torch.dtype) -> list[TensorMeta]:
        """Name, shape and wire dtype of each tensor, in order, for an engine that computes in `dtype`.

        Tensors that transformers keeps in float32, such as DeepSeek-V3's routing biases, stay in float32.
        """
        tensors = self.tensors.items()
        return [(name, tensor.shape, torch.float32 if name in self._full else dtype) for name, tensor in tensors]

    def convert(self, held: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Convert tensors from module names to checkpoint names.

        Tensors that are converted together are collected until complete, then copied.
        """
        waiting: dict[str, Tensor] = {}
        for name, tensor in held:
            if name in self._renamed:
                yield self._renamed[name], tensor
            # Skips further names of tied tensors, and buffers that checkpoints lack.
            elif members := self._members.get(name):
                waiting[name] = tensor
                if all(member in waiting for member in members):
                    yield from self._revert({member: waiting.pop(member) for member in members}).items()

    @torch.no_grad()
    def load_into(self, module: PreTrainedModel, sent: Mapping[str, Tensor]) -> None:
        """Copy the checkpoint's tensors into the module; `sent` must hold all of them."""
        held = module.state_dict()
        for name, target in self._renamed.items():
            held[name].copy_(sent[target])
        for members in {tuple(members) for name, members in self._members.items() if name not in self._renamed}:
            # Conversions only move elements: converting indices gives each element's position.
            sizes = [held[name].numel() for name in members]
            indices = zip(members, torch.arange(sum(sizes)).split(sizes), strict=True)
            values = torch.empty(sum(sizes))
            for target, index in self._revert({name: part.view(held[name].shape) for name, part in indices}).items():
                values[index.flatten()] = sent[target].flatten().to(values)
            for name, part in zip(members, values.split(sizes), strict=True):
                held[name].copy_(part.view(held[name].shape))

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self._model, tensors)


class AdapterNames(CheckpointNames):
    """Names and shapes of an adapter, as in peft's files."""

    def __init__(self, module: PreTrainedModel) -> None:
        parameters = adapter_parameters(module)
        shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in parameters}
        self.tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self.tied, self._full = [], set()

    def convert(self, held: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        return iter(held)

    @torch.no_grad()
    def load_into(self, module: PreTrainedModel, sent: Mapping[str, Tensor]) -> None:
        for name, parameter in adapter_parameters(module):
            parameter.copy_(sent[name])


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def check_layout(slots: Sequence[TensorSlot], names: CheckpointNames, *, dtype: str) -> None:
    """Check names, order, shapes, and dtypes of an update for an engine that computes in `dtype`.

    Finds errors that the checksum (intact bytes of other tensors) or the probe (a small tensor not sent) misses. Raises
    WeightTransferError.
    """
    metadata = names.metadata(getattr(torch, dtype))
    expected = {name: (list(shape), dtype_name(wire)) for name, shape, wire in metadata}
    sent = [slot.name for slot in slots]
    known = set(sent)
    if missing := [name for name in expected if name not in known]:
        raise WeightTransferError(f"every parameter must be sent, {missing[0]} and {len(missing) - 1} more were not")
    if unknown := [name for name in sent if name not in expected]:
        raise WeightTransferError(
            f"every tensor must belong to a parameter of the model, {unknown[0]} and {len(unknown) - 1} more do not"
        )
    # Swapped names with equal shapes pass every other check.
    for index, (name, expected_name) in enumerate(zip(sent, expected, strict=False)):
        if name != expected_name:
            raise WeightTransferError(
                f"tensors must be in the model's order, with {expected_name} at index {index}, got {name}: "
                "names were swapped or the models differ"
            )
    if len(sent) > len(expected):
        raise WeightTransferError(f"every parameter must be sent once, got {len(sent)} tensors for {len(expected)}")
    for slot in slots:
        shape, own_dtype = expected[slot.name]
        if slot.shape != shape:
            raise WeightTransferError(
                f"tensor {slot.name} must have this generator's shape {shape}, got {slot.shape}: "
                "learner and generator must start from the same model.path"
            )
        if slot.dtype != own_dtype:
            raise WeightTransferError(f"tensor {slot.name} must have the engine's dtype {own_dtype}, got {slot.dtype}")
