"""Saved models: weights in transformers format, in files of bounded size.

No rank holds a whole unsharded model. For a checkpoint, each rank copies its share of the files to host memory. Rank 0
writes the final model, file by file.
"""

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from slipstream.configs.data import ModelConfig
from slipstream.learner.background_save import Write
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.engines.optimizer import Trainable
from slipstream.learner.ranks import Ranks
from slipstream.runtime.disk import DiskWait
from slipstream.runtime.model_files import IMAGE_FILES, find_file, read_chat_template

FILE_BYTES = 2 * 2**30
"""Largest file of a saved model, unless one tensor is larger."""
_INDEX = "model.safetensors.index.json"
_FORMAT = {"format": "pt"}
FOLDER = ""
"""Key of the write of all but the weights."""


def copy_model(engine: ModelEngine, *, config: ModelConfig, ranks: Ranks) -> dict[str, Write]:
    """Copy this rank's files to host memory. Returns their writes by name. Collective."""
    files = _files(engine.model)
    names = list(dict.fromkeys(files.values()))
    copies: dict[str, dict[str, Tensor]] = {name: {} for name in names[ranks.rank :: ranks.size]}
    rest: dict[str, Tensor] = {}
    for name, tensor in engine.model.to_saved(engine.gather_parameters(is_whole=True), rest):
        if (file := files[name]) in copies:
            copies[file][name] = _copied(tensor)
    writes: dict[str, Write] = {name: partial(_save_file, tensors) for name, tensors in copies.items()}
    if ranks.is_first:
        writes[FOLDER] = partial(_write_rest, engine.model, files=files, rest=rest, config=config)
    return writes


def save_model(
    engine: ModelEngine, folder: Path, *, config: ModelConfig, ranks: Ranks, disk: DiskWait | None = None
) -> None:
    """Write a model with any tokenizer of `config.path`. An adapter is merged and also saved separately.

    Collective: rank 0 writes each file once it is gathered. On a full disk, it waits with `disk`, or raises at the end.
    """

    def attempt(write: Callable[[], object]) -> None:
        if disk:
            disk.retry(write, what="the final model", path=folder)
        else:
            write()

    files, rest = _files(engine.model), dict[str, Tensor]()
    missing, parts = Counter(files.values()), defaultdict[str, dict[str, Tensor]](dict)
    failure: Exception | None = None
    for name, tensor in engine.model.to_saved(engine.gather_parameters(is_whole=True), rest):
        if not ranks.is_first or failure:
            continue
        parts[file := files[name]][name] = _copied(tensor)
        missing[file] -= 1
        if not missing[file]:
            try:
                attempt(partial(_save_file, parts.pop(file), folder / file))
            # The other ranks continue to gather.
            except Exception as error:
                failure = error
    if failure:
        raise failure
    if ranks.is_first:
        attempt(partial(_write_rest, engine.model, folder, files=files, rest=rest, config=config))


def _files(model: Trainable) -> dict[str, str]:
    """Saved tensor -> its file, in the order of gathering."""
    metadata = model.saved_names.metadata(model.saved_dtype)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape, dtype in metadata}
    parts, size = [list[str]()], 0
    for name, num_bytes in sizes.items():
        if parts[-1] and size + num_bytes > FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += num_bytes
    if len(parts) == 1:
        return dict.fromkeys(sizes, "model.safetensors")
    file = "model-{:05}-of-{:05}.safetensors".format
    return {name: file(number, len(parts)) for number, part in enumerate(parts, 1) for name in part}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=_FORMAT)


def _write_rest(
    model: Trainable, folder: Path, *, files: dict[str, str], rest: dict[str, Tensor], config: ModelConfig
) -> None:
    """Write everything but the weights."""
    module: Any = model.backbone
    folder.mkdir(parents=True, exist_ok=True)
    model.save_rest(folder, rest)
    if len(set(files.values())) > 1:
        (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2, sort_keys=True))
    module.config.architectures, module.config.dtype = [type(module).__name__], model.saved_dtype
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    for file in filter(None, (find_file(config.path, name) for name in IMAGE_FILES)):
        shutil.copy(file, folder / file.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError):
        return
    if template := read_chat_template(config):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
