"""Verifies that a loaded model holds exactly the tensors that were sent.

In vLLM, loaders place tensors, then each layer may repack them. RecordedLoad records the loader calls, replays them
into a copy of one layer at a time, and compares bit for bit.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from inspect import BoundArguments
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.broker.errors import WeightTransferError

CHECK_TIMEOUT_S = 60.0
"""Longest wait for the decoding thread."""

T = TypeVar("T")
Check = Callable[[], bool]
Call = tuple[str, BoundArguments]
"""Parameter name within its layer, and the loader's arguments."""


def resolve(future: "Future[T]", call: Callable[..., T], *arguments: Any) -> None:
    """Set the future to a call's result or error."""
    try:
        future.set_result(call(*arguments))
    except Exception as error:
        future.set_exception(error)


def kernels_not_compared() -> WeightTransferError:
    """Build the error for a decoding thread that runs no checks."""
    return WeightTransferError(f"kernels must be compared within {CHECK_TIMEOUT_S:g} s, they were not")


def run_now(check: Check) -> "Future[bool]":
    """Run a check of a kernel in this thread."""
    checked: Future[bool] = Future()
    resolve(checked, check)
    return checked


class _Calls(list[Call]):
    """Replaces vLLM's list of calls, which it empties after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Call] = []

    def append(self, call: Call) -> None:
        name, arguments = call
        # vLLM puts the loaded parameter into the arguments, which would keep a second model in memory.
        kept = copy(arguments)
        kept.arguments = dict(arguments.arguments)
        self.kept.append((name, kept))
        super().append(call)


class RecordedLoad(TorchDispatchMode):
    """Life cycle: create after `initialize_layerwise_reload` -> `load_weights` in a `with` block -> first_mismatch.

    Also turns direct copies into a parameter, as by gpt-oss, into loader calls. vLLM would lose them, because
    parameters are on the meta device until their layer is complete.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._layers = dict(model.named_modules())
        self._calls = {path: _Calls() for path in self._layers}
        self._owners: dict[int, tuple[str, str]] = {}
        for path, layer in self._layers.items():
            get_layerwise_info(layer).loaded_weights = self._calls[path]
            for name, parameter in layer.named_parameters(recurse=False):
                self._owners[parameter.untyped_storage()._cdata] = path, name
        kernels = {path: getattr(layer, "cpu_linear", None) for path, layer in self._layers.items()}
        self._kernels = {path: kernel for path, kernel in kernels.items() if kernel is not nn.functional.linear}
        """Kernels of the previous weights."""
        self.uncompared: list[str] = []
        """Parameters and sent tensors not compared by `first_mismatch`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            path, name = self._owners.get(args[0].untyped_storage()._cdata, ("", ""))
            parameter: Any = self._layers[path]._parameters.get(name)
            # Inside a recorded loader call, vLLM copies only to count elements.
            is_called = any(name == called for called, _ in self._calls[path].kept)
            if parameter is not None and not is_called and args[0].shape == parameter.shape:
                parameter.weight_loader = default_weight_loader
                parameter.weight_loader = make_online_process_loader(self._layers[path], name)
                parameter.weight_loader(parameter, args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def first_mismatch(
        self,
        sent: Sequence[tuple[str, Tensor]],
        *,
        run: Callable[[Check], Future[bool]] = run_now,
        part: tuple[int, int] = (0, 1),
        is_sampled: bool = False,
    ) -> str:
        """Name of the first tensor that differs from the model's, or empty.

        `run`: runs a check of a kernel in the thread of the model. `part`: (i, n) compares the i-th of n parts of the
        kernels, and checks that the others are new; `uncompared` is filled only for n = 1. `is_sampled`: also compares
        only this part of the layers without kernels.
        """
        compared = set[int]()
        if different := self._mismatch_of_layers(compared, run=run, part=part, is_sampled=is_sampled):
            return different
        held = dict(self._layers[""].named_parameters(remove_duplicate=False))
        # The model may have transformed the tensors that no loader received.
        kept = (arguments for calls in self._calls.values() for _, arguments in calls.kept)
        tensors = dict(sent)
        missed = _not_passed(tensors, [v for c in kept for k, v in c.arguments.items() if k != "param"])
        for name in (each for each in missed if each in held):
            tensor = tensors[name]
            # vLLM may pad the vocabulary with extra rows.
            rows = held[name][: len(tensor)] if tensor.dim() else held[name]
            if rows.shape == tensor.shape:
                if not torch.equal(rows, tensor.to(rows)):
                    return name
                compared.add(id(held[name]))
        if part[1] > 1:
            return ""
        unknown = [name for name, tensor in self._layers[""].named_parameters() if id(tensor) not in compared]
        self.uncompared = sorted({*unknown, *(name for name in missed if id(held.get(name)) not in compared)})
        return ""

    def _mismatch_of_layers(
        self, compared: set[int], *, run: Callable[[Check], Future[bool]], part: tuple[int, int], is_sampled: bool
    ) -> str:
        """Adds the `id` of each equal parameter to `compared`."""
        later: list[tuple[str, Future[bool]]] = []
        start, step = part
        for index, (path, layer) in enumerate(self._layers.items()):
            shard = getattr(layer, "shard_indices", None)
            if shard and not shard.num_org_elements:
                # This part of a small vocabulary is only padding, which vLLM does not load again.
                compared |= {id(parameter) for parameter in layer._parameters.values()}
                continue
            calls, kernel = self._calls[path].kept, getattr(layer, "cpu_linear", nn.functional.linear)
            if calls and kernel is self._kernels.get(path):
                return f"{path}.weight"
            if (index - start) % step and (is_sampled or kernel is not nn.functional.linear):
                continue
            for name, is_held in _compare(layer, calls):
                if callable(is_held):
                    later.append((f"{path}.{name}", run(is_held)))
                    continue
                if is_held is False:
                    return f"{path}.{name}"
                if is_held:
                    compared.add(id(layer._parameters[name]))
        try:
            return next((name for name, check in later if not check.result(CHECK_TIMEOUT_S)), "")
        except TimeoutError:
            raise kernels_not_compared() from None


def _compare(layer: nn.Module, calls: Sequence[Call]) -> Iterator[tuple[str, "bool | Check | None"]]:
    """Yield each parameter's name, and whether it matches the replayed calls: a Check for a kernel, None = unknown."""
    expected = _place(layer, calls)
    kernel = getattr(layer, "cpu_linear", nn.functional.linear)
    is_held = {name: _is_same(layer._parameters[name], tensor) for name, tensor in expected.items()}
    # A layer without a `quant_method` does not repack its parameters.
    is_plain = not expected or not hasattr(layer, "quant_method")
    if is_plain or (all(is_held.values()) and kernel is nn.functional.linear):
        yield from is_held.items()
        return
    if (repacked := _repack(layer, expected)) is None:
        yield from ((name, same or None) for name, same in is_held.items())
        return
    for name, tensor in repacked.named_parameters():
        yield name, _is_same(layer._parameters.get(name), tensor)
    if kernel is not nn.functional.linear:
        # Only a kernel's output shows its packed weights.
        row = torch.randn(1, expected["weight"].shape[1], generator=torch.Generator().manual_seed(0))
        row = row.to(expected["weight"].dtype)
        yield "weight", partial(_has_same_output, layer, repacked, row)


@torch.no_grad()
def _has_same_output(layer: Any, other: Any, row: Tensor) -> bool:
    return torch.equal(*(made.cpu_linear(row, made.weight, None) for made in (layer, other)))


def _place(layer: nn.Module, calls: Sequence[Call]) -> dict[str, Tensor]:
    """Replay loader calls into new parameters. Floats that no call writes are NaN."""
    placed: dict[str, Tensor] = {}
    with get_layerwise_info(layer).restore_device:
        for name, call in calls:
            parameter = call.arguments["param"]
            if name not in placed:
                placed[name] = materialize_meta_tensor(to_meta_tensor(parameter))
                placed[name].fill_(torch.nan if placed[name].is_floating_point() else 0)
            again = copy(call)
            again.arguments = call.arguments | {"param": placed[name]}
            _get_original_loader(parameter)(*again.args, **again.kwargs)
    return placed


def _repack(layer: Any, placed: dict[str, Tensor]) -> Any:
    """Build a layer and repack it as vLLM does; None if that needs more than parameters."""
    if any(tensor.isnan().any() for tensor in placed.values()):
        return None
    other, method = nn.Module(), layer.quant_method
    for name, tensor in placed.items():
        other.register_parameter(name, nn.Parameter(tensor.data, requires_grad=False))
    if next(other.parameters()).device.type == "cpu":
        # For experts, the kernel does the repacking.
        method = method.moe_kernel.fused_experts if hasattr(method, "moe_kernel") else method
    elif not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return None
    try:
        method.process_weights_after_loading(other)
    except Exception:
        return None  # it may need attributes that this bare layer lacks
    return other


def _is_same(held: Tensor | None, expected: Tensor) -> bool:
    """Whether all elements are equal, except where NaN is expected."""
    is_alike = held is not None and held.shape == expected.shape and held.dtype == expected.dtype
    return is_alike and bool(((held == expected) | expected.isnan()).all())


def _not_passed(sent: dict[str, Tensor], passed: Sequence[Any]) -> list[str]:
    """Names of tensors that no loader received, even with reordered elements."""
    first_at = {tensor.data_ptr(): name for name, tensor in reversed(sent.items())}
    starts = sorted(first_at)
    missing = {name: tensor.numel() for name, tensor in sent.items()}
    others = set[tuple[int, ...]]()
    for tensor in passed:
        if isinstance(tensor, Tensor):
            index = bisect_right(starts, tensor.data_ptr()) - 1
            name = first_at[starts[index]] if index >= 0 else ""
            if name and tensor.data_ptr() < starts[index] + sent[name].nbytes:
                missing[name] -= tensor.numel()
            else:
                others.add(_fingerprint(tensor))
    return [name for name, count in missing.items() if count > 0 and _fingerprint(sent[name]) not in others]


def _fingerprint(tensor: Tensor) -> tuple[int, ...]:
    """Fingerprint that does not depend on the order of elements."""
    bits = tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return tensor.numel(), int(bits.sum(dtype=torch.int64)), int((bits * bits).sum(dtype=torch.int64))
