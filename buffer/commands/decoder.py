"""Token ids -> text, with the tokenizer that lies beside a model."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from buffer.archive.trajectory_filter import Decode
from configs.base import ConfigError

_FILE = "tokenizer.json"


def find_decoder(given: Path | None, *, candidates: list[Path]) -> Decode | None:
    """The tokenizer of the folder (or file) `given`, else the first there is among the `candidates`; None without one.

    Raises ConfigError when `given` has none, or a file that is there cannot be read.
    """
    if given is None:
        paths = [folder / _FILE for folder in candidates]
        return next((_load(path) for path in paths if path.is_file()), None)
    path = given / _FILE if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(f"--tokenizer must be a {_FILE} or a folder with one, got {given}.")
    return _load(path)


def _load(path: Path) -> Decode:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises a bare Exception for whatever is wrong with the file.
    except Exception as error:
        raise ConfigError(
            f"{path} must be a tokenizer of the `tokenizers` library, but cannot be read: {error}"
        ) from None

    def decode(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    return decode
