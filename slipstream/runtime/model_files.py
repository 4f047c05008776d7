"""The fingerprint of a checkpoint: what must be the same wherever a run loads its model, found without loading it."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from slipstream.configs.base import Config, ConfigError

# @@ Whether `model.path` leads to a checkpoint, asked before anything large is loaded.
_HUB_TIMEOUT_S = 10.0
_FILE = "config.json"


def check_model_path(path: str) -> None:
    """Raises ConfigError unless `path` is a folder with a checkpoint or the name of one on the Hugging Face hub.

    Asks the hub, for at most 10 s, only about names that are neither here nor in its cache.
    """
    if Path(path).is_dir():
        if not (Path(path) / _FILE).is_file():
            raise _fault(path, f"the folder has no {_FILE}")
    elif _is_folder_name(path):
        raise _fault(path, "there is no such folder")
    else:
        _check_hub(path)


def _is_folder_name(path: str) -> bool:
    """Whether it can only mean a folder: hub names have at most one slash, and their owner is no folder here."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and Path(path).parent.is_dir())


def _check_hub(name: str) -> None:
    try:
        if isinstance(try_to_load_from_cache(name, _FILE), str):
            return
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise _fault(name, "there is no such folder") from None
    # Whatever the client raises (no network, no such name, no access) has one meaning here, and its own hierarchy is
    # that of whichever HTTP library it uses.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _fault(name, f"there is no such folder, and the hub says: {reason}") from None


def _fault(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.path must be a folder with a transformers checkpoint, or the name of one on the Hugging Face hub, "
        f"got {path!r}: {reason.rstrip('.')}."
    )


_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_HEAD = "lm_head.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 10**8
"""Of a safetensors file, as its format allows."""
_DIGITS = 16


class ModelFingerprint(Config):
    """What can be told of a checkpoint by its small files; None where they do not tell it.

    Example: ModelFingerprint(architectures=["Qwen2ForCausalLM"], vocab_size=16, hidden_size=128, intermediate_size=512,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, num_tensors=50,
        num_parameters=801408, shapes="9f2c61d0a55b7e13", tokenizer_files={"tokenizer.json": "0a55b7e139f2c61d"})
    """

    architectures: list[str] | None = None
    """Names of transformers classes."""
    vocab_size: int | None = None
    """Rows of the embedding."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width inside an MLP."""
    num_hidden_layers: int | None = None
    """Transformer blocks."""
    num_attention_heads: int | None = None
    """Of each block."""
    num_key_value_heads: int | None = None
    """Of each block."""
    tie_word_embeddings: bool | None = None
    """Whether the output head is the embedding."""
    num_tensors: int | None = None
    """In safetensors files, without the output head, which of a tied model some write and some do not."""
    num_parameters: int | None = None
    """Of these tensors."""
    shapes: str | None = None
    """Hash of their names and shapes."""
    tokenizer_files: dict[str, str] = {}
    """Name -> hash of the content."""


_SETTINGS = ModelFingerprint.__struct_fields__[:8]


def fingerprint(path: str) -> ModelFingerprint | None:
    """Of the checkpoint in the folder `path`, or of that name in the hub's cache; None when neither is there.

    Reads no weights and asks no hub. A file that cannot be read tells nothing: whoever loads it says what is wrong.
    """
    settings = _read_json(path, _CONFIG)
    if not settings:
        return None
    # Of a model of several modalities, the part that writes text.
    inner = settings.get("text_config")
    told = settings | (inner if isinstance(inner, dict) else {})
    known = {name: told[name] for name in _SETTINGS if told.get(name) is not None}
    files = {"tokenizer_files": _tokenizer_files(path)}
    try:
        return msgspec.convert(known | _tensors(path) | files, ModelFingerprint)
    except msgspec.ValidationError:
        return None


def check_same_model(path: str, expected: ModelFingerprint | None) -> None:
    """Raises ConfigError where the checkpoint at `path` here is not the broker's; what one side cannot tell passes."""
    ours = fingerprint(path)
    found = _difference(ours, expected) if ours and expected else None
    if found:
        field, here, there = found
        raise ConfigError(
            f"model.path must hold the same model here as at the broker, got {path!r} with {field} {here} here and "
            f"{there} at the broker: copy the broker's folder here, or start where it lies."
        )


def _difference(ours: ModelFingerprint, theirs: ModelFingerprint) -> tuple[str, object, object] | None:
    """The first field that both know and that differs, with both values."""
    for field in ModelFingerprint.__struct_fields__[:-1]:
        here, there = getattr(ours, field), getattr(theirs, field)
        if None not in (here, there) and here != there:
            return field, here, there
    for name, here in ours.tokenizer_files.items():
        if theirs.tokenizer_files.get(name, here) != here:
            return f"{name} of hash", here, theirs.tokenizer_files[name]
    return None


def _tokenizer_files(path: str) -> dict[str, str]:
    contents = {name: _read(found) for name in _TOKENIZER_FILES if (found := _find(path, name))}
    return {name: _digest(content) for name, content in contents.items() if content}


def _tensors(path: str) -> dict[str, Any]:
    shapes: dict[str, list[int]] = {}
    for name in _weight_files(path):
        found = _find(path, name)
        header = _header(found) if found else None
        if header is None:
            return {}
        shapes |= header
    shapes.pop(_HEAD, None)
    if not shapes:
        return {}
    size = sum(math.prod(shape) for shape in shapes.values())
    packed = json.dumps(sorted(shapes.items())).encode()
    return {"num_tensors": len(shapes), "num_parameters": size, "shapes": _digest(packed)}


def _weight_files(path: str) -> list[str]:
    placed = _read_json(path, _INDEX).get("weight_map")
    return sorted(set(map(str, placed.values()))) if isinstance(placed, dict) else [_WEIGHTS]


def _header(file: Path) -> dict[str, list[int]] | None:
    """Name -> shape, from the beginning of a safetensors file; None when it is none."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            entries = json.loads(opened.read(length)) if length <= _MAX_HEADER_BYTES else {}
        return {name: list(map(int, entry["shape"])) for name, entry in entries.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _read_json(path: str, name: str) -> dict[str, Any]:
    """Empty when there is no such file, or nothing like a record in it."""
    found = _find(path, name)
    try:
        content = json.loads(_read(found) or "{}") if found else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _find(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        return file if (file := Path(path) / name).is_file() else None
    try:
        # Through the package, which imports what this needs (for half a second) only when it is asked for it.
        cached = huggingface_hub.try_to_load_from_cache(path, name)
    except ValueError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _read(file: Path) -> bytes:
    """Empty when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
