"""Mixture-of-experts routers: record, count, or replace chosen experts.

A hook observes the router's `topk` over experts, or answers it with given experts, so that weights and gradients follow
the router's own formula.

Source: rollout routing replay (R3), arXiv:2510.11370.
"""

from functools import partial
from inspect import getsource
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.configs.base import ConfigError, require
from slipstream.configs.data import ModelConfig
from slipstream.runtime.lora import meta_model

EXPERTS = "experts"
"""Trajectory array, uint8 or int16[T, M, K]: K experts per token in M routers; 0 for the last token, which is
never read."""


class Router(NamedTuple):
    """A module that selects experts."""

    layer: int
    module: Any
    """Has `top_k` and `num_experts`."""
    logits: int
    """Index of its logits, [N, E], in the output tuple."""


def find_routers(module: nn.Module) -> list[Router]:
    """Routers of a transformers model in layer order."""
    places: dict[type, int] = {}
    for part in module.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits") or []
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            if hasattr(recorder, "target_class"):
                places[recorder.target_class] = recorder.index
    return [
        Router(next(int(word) for word in name.split(".") if word.isdigit()), part, places[type(part)])
        for name, part in module.named_modules()
        # Skip routers that select experts elsewhere, unseen by the hook.
        if type(part) in places and hasattr(part, "top_k") and "topk(" in getsource(type(part).forward)
    ]


def check_layers(config: ModelConfig) -> None:
    """Check LoRA targets and router settings before the model loads. Raises ConfigError."""
    has_router_settings = bool(config.moe.router_replay or config.moe.router_aux_loss)
    if not (config.lora or has_router_settings):
        return
    try:
        module = meta_model(config)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError):
        return
    if not has_router_settings:
        return
    routers, name = find_routers(module), type(module).__name__
    key = "model.moe.router_replay" if config.moe.router_replay else "model.moe.router_aux_loss"
    got = config.moe.router_replay or config.moe.router_aux_loss
    require(bool(routers), key, "be off for a model without routers that choose by top-k", got=got, why=f"it is {name}")
    if config.moe.router_aux_loss:
        has_bias = hasattr(routers[0].module, "e_score_correction_bias")
        why = f"{name} balances its experts by a bias, not by a loss"
        require(not has_bias, "model.moe.router_aux_loss", "be 0", got=config.moe.router_aux_loss, why=why)
        aux_loss_coefficient(config, module)


def aux_loss_coefficient(config: ModelConfig, module: Any) -> float:
    """Balancing loss's coefficient. Raises ConfigError if the checkpoint should have it but doesn't."""
    if config.moe.router_aux_loss != "checkpoint":
        return config.moe.router_aux_loss
    own = getattr(module.config.get_text_config(), "router_aux_loss_coef", None)
    must = "be a number for a checkpoint without router_aux_loss_coef"
    require(own is not None, "model.moe.router_aux_loss", must, got="checkpoint", why=f"it is {type(module).__name__}")
    return float(own or 0.0)


class Routers:
    """All routers of a model. Life: (given = ... -> forward pass -> chosen | load | probabilities)*.

    Recomputed activations read `given` again: change it only after the backward pass.
    """

    def __init__(self, routers: list[Router]) -> None:
        self.layers = [router.layer for router in routers]
        self.num_experts: int = routers[0].module.num_experts
        self.top_k: int = routers[0].module.top_k
        self.given: Tensor | None = None
        """Experts to use, [N, M, K]; None = the routers choose."""
        self.keeps_logits = False
        """Required by `probabilities`."""
        self._chosen: list[Tensor] = [torch.empty(0)] * len(routers)
        self._logits: list[Tensor] = [torch.empty(0)] * len(routers)
        for position, router in enumerate(routers):
            router.module.forward = partial(self._route, router.module.forward, position, router.logits)

    @property
    def shape(self) -> tuple[int, int]:
        """(M routers, K experts per token)."""
        return len(self.layers), self.top_k

    def chosen(self) -> Tensor:
        """Experts of the last forward pass, uint8 or int16[N, M, K]."""
        return torch.stack(self._chosen, dim=1).to(torch.uint8 if self.num_experts <= 256 else torch.int16)

    def load(self, copies: Tensor, experts: Tensor | None = None) -> Tensor:
        """Tokens per expert in the last forward pass, or for `experts` [N, M, K]; float64[M, E].

        Token n counts `copies[n]` times.
        """
        chosen = self.chosen() if experts is None else experts
        weights = copies.double().repeat_interleave(self.top_k)
        return torch.stack(
            [torch.bincount(own.flatten(), weights, self.num_experts) for own in chosen.long().unbind(1)]
        )

    def probabilities(self, copies: Tensor) -> Tensor:
        """Differentiable expert probabilities, summed over the last pass, float32[M, E]."""
        return torch.stack([copies.float() @ logits.float().softmax(-1) for logits in self._logits])

    def _route(self, forward: Any, position: int, logits: int, *inputs: Any, **options: Any) -> Any:
        given = None if self.given is None else self.given[:, position].long()
        with _Choice(self.num_experts, self.top_k, given) as choice:
            output = forward(*inputs, **options)
        self._chosen[position] = choice.experts
        if self.keeps_logits:
            self._logits[position] = output[logits]
        return output


class _Choice(TorchFunctionMode):
    def __init__(self, num_experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._top_k = top_k
        self._given = given
        self.experts = torch.empty(0)
        """[N, K], chosen or given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        scores, top_k = args[0], kwargs["k"] if "k" in kwargs else args[1]
        # Other calls select groups of experts.
        if scores.shape[1:] != (self._num_experts,) or top_k != self._top_k:
            return func(*args, **kwargs)
        given = self._given
        found = func(*args, **kwargs) if given is None else torch.return_types.topk((scores.gather(-1, given), given))
        self.experts = found[1]
        return found
