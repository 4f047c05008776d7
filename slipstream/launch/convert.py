"""Convert checkpoints to transformers format, without executing code from them."""

import contextlib
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor  # importing it also makes torch.load accept the class
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.checkpoint_names import CheckpointNames
from slipstream.buffer.durable_files import CHECKSUMS, find_damage, seal
from slipstream.configs.base import ConfigError, first_line, require
from slipstream.learner.training.model import COMPUTE_DTYPES
from slipstream.runtime.disk import describe_disk, is_disk_full
from slipstream.runtime.lora import ADAPTER_FILE
from slipstream.runtime.model_files import IMAGE_FILES, TOKENIZER_FILES, read_json, weight_files

_COPIED = (*TOKENIZER_FILES, *IMAGE_FILES, "generation_config.json")
_VERL = re.compile(r"model_world_size_(\d+)_rank_0\.pt")
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def convert(source: Path, target: Path, *, base: Path | None, dtype: str | None, max_shard_size: str) -> str:
    """Write the model in `source` to the new folder `target`; return a summary. Raises ConfigError.

    `base`: base model of an adapter, or config and tokenizer for shards. `dtype`: None = the dtype of most weights.
    """
    require(not target.exists(), "TARGET", "be a folder to be made", got=str(target), why="nothing is overwritten")
    must = f"be one of {', '.join(COMPUTE_DTYPES)}"
    require(dtype is None or dtype in COMPUTE_DTYPES, "--dtype", must, got=dtype, why="models are written in these")
    fits = re.fullmatch(r"[0-9]+(\.[0-9]+)?[KMGT]B", max_shard_size) is not None
    require(fits, "--max-shard-size", "be a number and a unit, 5GB or 500MB", got=max_shard_size, why="it limits files")
    if (source / "config.yaml").is_file():
        # A run: its final model, or its newest checkpoint.
        others = (source / "final_model", *sorted(source.glob("checkpoints/step-*"), reverse=True))
        source = next((folder for folder in others if folder.is_dir()), source)
    kind, weights, settings, found = _read(source, base)
    chosen = COMPUTE_DTYPES[dtype] if dtype else found
    module = _build(settings, weights, dtype=chosen, source=source)
    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        tensors = dict(CheckpointNames(module).convert(module.state_dict().items()))
        for name, tensor in tensors.items():
            # safetensors writes whole storages, so copy views of larger tensors.
            if tensor.nbytes != tensor.untyped_storage().nbytes():
                tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        save_torch_state_dict(tensors, draft, max_shard_size=max_shard_size)
        module.config.save_pretrained(draft)
        for name in _COPIED:
            if (settings / name).is_file():
                shutil.copyfile(settings / name, draft / name)
        seal(draft)
        draft.rename(target)
    except WeightTransferError as error:
        raise ConfigError(f"SOURCE must hold a model with a layout of the hub, got {source}: {error}.") from None
    except Exception as error:
        if not is_disk_full(error):
            raise
        where = describe_disk(target)
        raise ConfigError(f"TARGET must be on a disk with room for it, got {where}: {error}.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return f"{kind} -> {target}: {len(tensors)} tensors, {size / 2**20:.1f} MiB, {str(chosen).removeprefix('torch.')}"


def _read(source: Path, base: Path | None) -> tuple[str, dict[str, Tensor], Path, torch.dtype]:
    """(kind, weights, folder with config and tokenizer, commonest dtype)."""
    if (source / "adapter_config.json").is_file():
        root = _base(base, Path(str(read_json(str(source), "adapter_config.json").get("base_model_name_or_path"))))
        weights = _load_folder(root)
        return "adapter", _merged(source, root, weights), root, _common_dtype(weights)
    if (source / CHECKSUMS).is_file() and (damage := find_damage(source)):
        raise ConfigError(f"{damage}: restore the file from a copy.")
    newest = Path((source / "latest").read_text("utf-8").strip()).name if (source / "latest").is_file() else ""
    if folder := _with_file(source, "model*.safetensors*", "", "model"):
        kind, weights, root = "model", _load_folder(folder), base or folder
    elif folder := _with_file(source, "model_world_size_*_rank_*.pt", "", "actor"):
        kind, weights, root = "FSDP shards", _gather_fsdp(folder), _base(base, folder / "huggingface")
    elif folder := _with_file(source, "*_optim_states.pt", "", newest):
        kind, weights, root = "ZeRO checkpoint", _gather_zero(folder), _base(base, folder, folder.parent)
    else:
        must = "be a folder with a checkpoint of a run, a model or adapter, verl's FSDP shards or a ZeRO checkpoint"
        raise ConfigError(f"SOURCE must {must}, got {str(source)!r}.")
    return kind, weights, root, _common_dtype(weights)


def _with_file(source: Path, pattern: str, *parts: str) -> Path | None:
    return next((source / part for part in parts if any((source / part).glob(pattern))), None)


def _base(base: Path | None, *others: Path) -> Path:
    candidates = [base] if base else others
    if found := next((folder for folder in candidates if (folder / "config.json").is_file()), None):
        return found
    tried = ", ".join(str(folder) for folder in candidates)
    raise ConfigError(f"--base must be a folder with the config.json of the model in SOURCE, got {tried}.")


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn errors, arbitrary for damaged files, into one sentence; redirect output to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
            yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}, got {type(error).__name__}: {first_line(error)}") from error


# --- sources ---------------------------------------------------------------------------------------------------------
def _load_folder(folder: Path) -> dict[str, Tensor]:
    files = weight_files(str(folder))
    why = "the weights are in model.safetensors, or in those that model.safetensors.index.json names"
    require(bool(files), str(folder), "hold every safetensors file of its model", got="not all", why=why)
    with _reading(f"{folder} must hold readable safetensors files"):
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _merged(folder: Path, base: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    import peft

    module = _build(base, weights, dtype=torch.float32, source=base)
    must = f"--base must be the causal language model that the adapter in {folder} was trained on"
    with _reading(must):
        tensors = load_file(folder / Path(ADAPTER_FILE).name)
        wrapped: Any = peft.PeftModelForCausalLM(module, peft.PeftConfig.from_pretrained(str(folder)))
        peft.set_peft_model_state_dict(wrapped, tensors)
        expected = peft.get_peft_model_state_dict(wrapped)
        if others := sorted(set(expected) ^ set(tensors)):
            raise ConfigError(f"{must}, got {base}: {others[0]} is in one of them only ({len(others)} such in all).")
        return dict(wrapped.merge_and_unload().state_dict())


def _gather_fsdp(folder: Path) -> dict[str, Tensor]:
    """Join the shards of verl's FSDP workers: DTensors over a (fsdp) or (ddp, fsdp) mesh."""
    sizes = [int(found[1]) for file in folder.iterdir() if (found := _VERL.fullmatch(file.name))]
    must, why = "hold the shards of one world size, from rank 0 on", "a model is joined from those of all ranks"
    require(len(sizes) == 1, str(folder), must, got=sorted(sizes), why=why)
    with _reading(f"{folder} must hold FSDP shards of DTensors, all of them and as they were saved"):
        files = [folder / f"model_world_size_{sizes[0]}_rank_{rank}.pt" for rank in range(sizes[0])]
        ranks = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        return {name: _join(name, [shard[name] for shard in ranks]) for name in ranks[0]}


def _join(name: str, shards: list[Any]) -> Tensor:
    first, why = shards[0], "other shards are not joined here"
    if not isinstance(first, DTensor):
        same = all(part.equal(first) for part in shards)
        require(same, name, "be a DTensor, or the same on all ranks", got=type(first).__name__, why=why)
        return first
    *outer, last = first.placements
    fits = len(outer) <= 1 and all(place.is_replicate() for place in outer) and not last.is_partial()
    got = f"{first.placements} over {first.device_mesh.mesh_dim_names}"
    require(fits, name, "be sharded over the last dimension of a mesh (fsdp) or (ddp, fsdp)", got=got, why=why)
    parts = [shard.to_local() for shard in shards[: first.device_mesh.shape[-1]]]
    whole = torch.cat(parts, dim=last.dim) if last.is_shard() else parts[0]
    require(whole.shape == first.shape, name, f"have the shape {list(first.shape)}", got=list(whole.shape), why=why)
    return whole


def _gather_zero(folder: Path) -> dict[str, Tensor]:
    """Gather the float32 master weights of a ZeRO 1-3 checkpoint, without unpickling objects."""
    before = os.environ.get(_FORCE)
    # Overrides DeepSpeed's torch.load(weights_only=False).
    os.environ[_FORCE] = "1"
    try:
        with _reading(f"{folder} must hold a whole checkpoint of ZeRO 1, 2 or 3"):
            from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
            from deepspeed.runtime.zero.config import ZeroStageEnum
            from deepspeed.utils.tensor_fragment import fragment_address
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            plain = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
            with torch.serialization.safe_globals(plain):
                return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    finally:
        os.environ.pop(_FORCE) if before is None else os.environ.update({_FORCE: before})


# --- the model -------------------------------------------------------------------------------------------------------
def _common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    sizes = Counter[torch.dtype]()
    for tensor in weights.values():
        sizes[tensor.dtype] += tensor.numel() * tensor.is_floating_point()
    return sizes.most_common(1)[0][0]


def _build(folder: Path, weights: dict[str, Tensor], *, dtype: torch.dtype, source: Path) -> PreTrainedModel:
    logging.disable_progress_bar()
    with _reading(f"{folder} must hold the config of a model that transformers knows"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        (name,) = config.architectures or ["none"]
        kind = getattr(transformers, name)
        if not issubclass(kind, PreTrainedModel):
            raise TypeError(f"{name} is no model of transformers")
    quantized = getattr(config, "quantization_config", None)
    why = "its weights are no plain numbers"
    require(not quantized, str(folder), "describe a model without quantization", got="a quantization_config", why=why)
    with _reading(f"{source} must hold the weights of the {name} in {folder}"):
        weights = _without_prefix(weights, kind, config)
        options: dict[str, Any] = {"config": config, "state_dict": weights, "dtype": dtype, "output_loading_info": True}
        module, found = kind.from_pretrained(None, **options)
    for problem in ("missing_keys", "unexpected_keys"):
        names, got = sorted(found[problem]), problem.replace("_", " ")
        why = f"{', '.join(names[:3])} ({len(names)} in all)"
        require(not names, str(source), f"hold the weights of the {name} in {folder}", got=got, why=why)
    return module


def _without_prefix(weights: dict[str, Tensor], kind: Any, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Strip a wrapper's prefix, such as `module.`. Compare identities, because wrappers may alias weights."""
    with torch.device("meta"):
        held = kind(config).state_dict()
    first = next(iter(held))
    prefix = next((name.removesuffix(first) for name in weights if name.endswith(f".{first}")), "")
    inner = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    known = {id(tensor) for tensor in inner.values()}
    return inner if all(id(tensor) in known for tensor in weights.values()) else weights
