"""Memory of a training step, traced on fake tensors, which have shapes but no memory."""

import dataclasses
import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from slipstream.configs.run import RunConfig
from slipstream.learner.algorithms.logprobs import CHUNK_ELEMENTS, Requested
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch, Sample
from slipstream.learner.training.attention import choose_attention
from slipstream.learner.training.model import COMPUTE_DTYPES, OutputHead, Policy

_ROW_TOKENS = 64
_EXPERTS = "slipstream_traced"
_UNTRACED = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException,
)  # fmt: skip


def step_bytes(run: RunConfig, model: PreTrainedModel, *, on_gpu: bool = False) -> int:
    """Peak memory of a forward and backward pass over the largest microbatch, without gradients.

    `model` must be on the meta device. With sequence parallelism, sums over ranks that share a sequence. For
    data-dependent operations, estimates 34 bytes per token, unit of width, and layer (one with gradient checkpointing),
    twice that in float32 (Korthikanti et al., arXiv:2205.05198).
    """
    microbatch = largest_microbatch(run, model)
    engine, compute_dtype = run.learner.engine, COMPUTE_DTYPES[run.model.dtype]
    is_recomputed = engine.gradient_checkpointing
    allocations = Allocations()
    with fake_tensor.FakeTensorMode() as fake:
        _materialize(model, dtype=compute_dtype)
        model.set_experts_implementation(_EXPERTS)
        is_sliced = run.learner.sequence_parallel > 1
        attention = choose_attention(model.config, type(model), run.model, on_gpu=on_gpu, is_sliced=is_sliced)
        if attention:
            model.set_attn_implementation(attention)
        if is_recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model.train(), compute_dtype=compute_dtype)
        # Counts of tokens per expert are data-dependent and small.
        policy.routers = None
        if model.get_output_embeddings() is not None:
            policy.head = OutputHead(model)
        policy.chunk_elements = CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"]
        columns = {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
        fakes = Microbatch(**{k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in columns.items()})
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        try:
            with allocations:
                policy(fakes, requested=Requested(entropy=True))["logprobs"].sum().backward()
        except _UNTRACED:
            text = model.config.get_text_config()
            num_kept = 1 if is_recomputed else text.num_hidden_layers
            return 17 * compute_dtype.itemsize * text.hidden_size * num_kept * microbatch.num_tokens
    return allocations.peak


def _run_experts(experts: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts with the memory of grouped matrix products."""
    repeated = states.repeat_interleave(chosen.shape[-1], dim=0)

    def project(inputs: Tensor, matrices: Tensor) -> Tensor:
        return inputs @ (matrices[0] if experts.is_transposed else matrices[0].T)

    inner = project(repeated, experts.gate_up_proj if experts.has_gate else experts.up_proj)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    scaled = project(inner, experts.down_proj) * weights.reshape(-1, 1)
    return scaled.view(*chosen.shape, -1).sum(dim=1).to(states.dtype)


ExpertsInterface.register(_EXPERTS, _run_experts)


def layer_input_bytes(run: RunConfig, model: PreTrainedModel) -> int:
    """Size of all layer inputs for the largest microbatch."""
    text, num_tokens = model.config.get_text_config(), largest_microbatch(run, model).num_tokens
    return num_tokens * text.hidden_size * text.num_hidden_layers * COMPUTE_DTYPES[run.model.dtype].itemsize


class Allocations(TorchDispatchMode):
    """Tracks storages allocated in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Bytes."""
        self._alive: dict[int, int] = {}
        self._total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            # Excludes views and in-place results.
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                self._total += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self._total)
        return result

    def _free(self, storage: int) -> None:
        self._total -= self._alive.pop(storage)


def largest_microbatch(run: RunConfig, model: PreTrainedModel) -> Microbatch:
    """Microbatch with the most tokens, of samples of maximum length."""
    longest = run.model.max_length
    prompt, group_size = (1, 1) if run.mode == "sft" else (run.data.max_prompt_tokens, run.generators.group_size)
    budget = run.learner.tokens_per_microbatch
    trained = np.arange(prompt, longest)
    samples = [
        Sample(np.zeros(longest, dtype=np.int64), trained, index * len(trained), group_id=str(index // group_size))
        for index in range(math.ceil(budget / (longest - prompt)) + group_size)
    ]
    row_tokens = min(budget, max(_ROW_TOKENS, model.config.get_text_config().hidden_size // 2))
    return max(collate(samples, layout=Layout("shared_rows", budget, row_tokens)), key=lambda each: each.num_tokens)


def _materialize(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Replace meta tensors with fake ones on the CPU. `dtype`: of floating-point parameters."""
    made: dict[int, Tensor] = {}
    for part in model.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    kind = (dtype if is_parameter else torch.float32) if tensor.is_floating_point() else tensor.dtype
                    fresh = torch.empty(tensor.shape, dtype=kind)
                    made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
                table[name] = made[id(tensor)]
