"""Compiled layers: torch.compile of each layer of a model, for GPUs, where small operations are launched one by one."""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.learner.errors import ModelError
from slipstream.learner.training.attention import PACKED, packed_attention

BACKEND = "inductor"
_MOST_GRAPHS = 64
"""Graphs of one layer: with and without gradients, one row and several, of each kind of layer."""


def compile_layers(backbone: nn.Module, *, has_routers: bool) -> None:
    """Compile the layers of a transformers model in place; parameters and names stay. Raises ModelError.

    Rows and their lengths differ from microbatch to microbatch, so sizes are symbols. Attention of packed rows stays as
    it is: its kernel is one already, and the runs of tokens that it is told would make a graph of each microbatch.
    """
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if has_routers or not layers:
        reason = "a mixture of experts, whose shapes follow from numbers" if has_routers else "not made of known layers"
        raise ModelError(
            f"learner.compile must be false for {type(backbone).__name__} (model.path), got true: it is {reason}."
        )
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for layer in layers:
        # Only what runs on a pass: recomputation for gradient_checkpointing stays around it.
        layer.compile(dynamic=True, backend=BACKEND)
