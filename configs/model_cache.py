"""Folders for models converted from GGUF files, in the user's cache."""

import os
from pathlib import Path
from typing import Any

from blake3 import blake3

from slipstream.configs.base import ConfigError

_DIGITS = 16


def cache_folder(name: str) -> Path:
    """`$SLIPSTREAM_CACHE/NAME`, by default `~/.cache/slipstream/NAME`."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SLIPSTREAM_CACHE") or user / "slipstream").absolute() / name


def gguf_step(path: str) -> dict[str, Any] | None:
    """Preparation step that converts a GGUF file; None for other models. Raises ConfigError if the file is missing.

    The folder's name has a hash of the file, so that changes are converted.

    Example: gguf_step("gguf:models/tiny.gguf") -> {"creates": "CACHE/tiny-0a55b7e139f2c61d", "module":
        "slipstream.scripts.convert_gguf", "args": ["FOLDER/models/tiny.gguf", "--out=CACHE/tiny-0a55b7e139f2c61d"]}
    """
    file = Path(path.removeprefix("gguf:")).expanduser()
    if not path.startswith("gguf:") and file.suffix != ".gguf":
        return None
    if not file.is_file():
        raise ConfigError(f"model.path must be an existing GGUF file, got {path!r}: correct the path.")
    digest = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()[:_DIGITS]
    folder = cache_folder(f"{file.stem}-{digest}")
    return {
        "creates": str(folder),
        "module": "slipstream.scripts.convert_gguf",
        "args": [str(file.absolute()), f"--out={folder}"],
    }
