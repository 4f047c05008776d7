"""LoRA: attach an adapter, name its tensors as in peft files, and merge it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slipstream.configs.base import ConfigError, require
from slipstream.configs.data import LoraConfig, ModelConfig
from slipstream.runtime.images import takes_images

ADAPTER_FILE = "adapter/adapter_model.safetensors"
"""In a subfolder: next to merged weights, transformers would apply it again."""
_PREFIX = "base_model.model."
_HEAD = "score"
"""Head of a sequence classifier, which is trained in full."""


def find_targets(module: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Modules for an adapter. Raises ConfigError for a missing or unsupported target."""
    why = "vLLM does not serve adapters with images here yet: train all weights, or a text-only model"
    require(not hasattr(module.base_model, "visual"), "model.lora", "be null with images", got="an adapter", why=why)
    heads = [module.get_output_embeddings(), getattr(module, _HEAD, None)]
    parts = dict(module.named_modules())
    linear = {name: part for name, part in parts.items() if isinstance(part, nn.Linear | Conv1D)}
    fit = [name for name, part in linear.items() if ".experts." not in name and not any(part is head for head in heads)]
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    if "all-linear" in targets:
        return fit
    found = set[str]()
    for target in targets:
        matching = {name for name in parts if f".{name}".endswith(f".{target}")}
        known = f"this {type(module).__name__} has {', '.join(sorted({_last(name) for name in fit}))}"
        require(bool(matching), "model.lora.targets", "name layers of the model", got=target, why=known)
        must = "name linear layers other than the head, embeddings, and experts, where vLLM serves no adapters"
        require(matching <= set(fit), "model.lora.targets", must, got=target, why=known)
        found |= matching
    return [name for name in fit if name in found]


def attach_adapter(module: PreTrainedModel, lora: LoraConfig, *, base: str) -> None:
    """Attach a new adapter with B A = 0 and freeze all else. `base`: model path for peft files. Raises ConfigError."""
    try:
        # Takes most of a second.
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs peft, got {error}: install the `cpu` or `gpu` extra.") from error
    names = find_targets(module, lora)
    parts = dict(module.named_modules())
    has_head = hasattr(module, _HEAD)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=names,
        fan_in_fan_out=any(isinstance(parts[name], Conv1D) for name in names),
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if has_head else "CAUSAL_LM",
    )
    peft.inject_adapter_in_model(settings, module)
    if has_head:
        module.get_submodule(_HEAD).requires_grad_(True)
        settings.modules_to_save = [_HEAD]
    # The optimizer has float32 masters, and ZeRO shards parameters of one dtype.
    for _, parameter in adapter_parameters(module):
        parameter.data = parameter.data.to(module.dtype)
    for layer in _adapter_layers(module).values():
        layer.cast_input_dtype_enabled = False


def adapted_layers(module: nn.Module) -> list[str]:
    """Kinds of adapted layers, such as `q_proj`."""
    return sorted({_last(name) for name in _adapter_layers(module)})


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of adapter and trained head, with peft names."""
    for name, parameter in module.named_parameters():
        if ".lora_" in name or name.startswith(f"{_HEAD}."):
            yield _PREFIX + name.replace(".default.", "."), parameter


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Disable the adapter within the block."""
    layers = _adapter_layers(module).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield merged float32 weights by base name; fill `adapter` with weights of adapter and trained head.

    W + scaling * B A

    `tensors`: all weights of `module` in order. Holds one layer at a time.
    """
    layers, waiting = _adapter_layers(module), dict[str, Tensor]()
    for name, tensor in tensors:
        path, _, kind = name.rpartition(".base_layer.")
        if kind == "weight":
            waiting[path] = tensor
        elif ".lora_" in name:
            adapter[name] = tensor.to("cpu", copy=True)
            path, _, matrix = name.partition(".lora_")
            if matrix.startswith("B"):
                first, second = (adapter[f"{path}.lora_{each}.default.weight"].to(tensor.device) for each in "AB")
                product = layers[path].scaling["default"] * (second.float() @ first.float())
                product = product.T if layers[path].fan_in_fan_out else product
                yield f"{path}.weight", waiting.pop(path).float() + product
        else:
            if name.startswith(f"{_HEAD}."):
                adapter[name] = tensor.to("cpu", copy=True)
            yield name.replace(".base_layer.", "."), tensor.float() if tensor.is_floating_point() else tensor


def save_adapter(module: nn.Module, folder: Path, *, weights: Mapping[str, Tensor]) -> None:
    """Write the adapter in peft format below a model folder; `weights`: as in `merge`."""
    file = folder / ADAPTER_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tensors = {name: weights[names[id(parameter)]].contiguous() for name, parameter in adapter_parameters(module)}
    save_file(tensors, file, metadata={"format": "pt"})
    settings = module.peft_config["default"].to_dict() | {"inference_mode": True}
    # peft stores a set, whose order varies between processes.
    settings["target_modules"] = sorted(settings["target_modules"])
    (file.parent / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))


def language_model_class(path: str) -> Any:
    """Transformers Auto class of a model."""
    return AutoModelForImageTextToText if takes_images(path) else AutoModelForCausalLM


def meta_model(config: ModelConfig) -> PreTrainedModel:
    """Build a model, with its adapter, on the meta device.

    Raises ConfigError for the adapter, OSError or ValueError for the checkpoint.
    """
    settings = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        kind = language_model_class(config.path)
        module = kind.from_config(settings, trust_remote_code=config.trust_remote_code)
        if config.lora:
            attach_adapter(module, config.lora, base=config.path)
    return module


def _adapter_layers(module: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in module.named_modules() if hasattr(part, "lora_A")}


def _last(name: str) -> str:
    return name.rpartition(".")[2]
