"""SftFile: the demonstrations of a Parquet file, as token ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoConfig, AutoTokenizer

from slipstream.configs.base import ConfigError
from slipstream.configs.data import ModelConfig
from slipstream.configs.run import RunConfig
from slipstream.learner.sft.demonstration import Demonstration
from slipstream.learner.sft.forms import Form, find_form

_ROWS_AT_ONCE = 1024


@dataclass(slots=True)
class SftFile:
    """What is in it. Every rank reads it for itself, and finds the same."""

    demonstrations: list[Demonstration] = field(default_factory=list)
    """In the order of the file."""
    num_empty: int = 0
    """Rows left out because nothing is learnt from them."""
    num_too_long: int = 0
    """Rows left out because they are longer than `model.max_length`."""


def read_train(run: RunConfig) -> SftFile:
    """What is learnt; at least one demonstration. Raises ConfigError."""
    return _read(Path(run.sft.train_path), run=run, max_rows=None)


def read_heldout(run: RunConfig) -> SftFile:
    """What the loss is measured on; nothing without `sft.heldout_path`. Raises ConfigError."""
    path = run.sft.heldout_path
    return _read(Path(path), run=run, max_rows=run.sft.heldout_rows) if path else SftFile()


def _read(path: Path, *, run: RunConfig, max_rows: int | None) -> SftFile:
    vocab_size = _load(AutoConfig, run.model).get_text_config().vocab_size
    rows, form = _open(path, run=run)
    file = SftFile()
    for number, row in enumerate(islice(rows, max_rows)):
        try:
            _take(form.demonstration(row), into=file, run=run, vocab_size=vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
    if not file.demonstrations:
        raise ConfigError(
            f"{path} must hold at least one demonstration, got none: {file.num_empty} rows with nothing to learn and "
            f"{file.num_too_long} longer than model.max_length ({run.model.max_length}) were left out."
        )
    return file


def _take(demonstration: Demonstration | None, *, into: SftFile, run: RunConfig, vocab_size: int) -> None:
    if demonstration is None or not len(demonstration.trained):
        _check_may_skip(run, "the response must not be empty: there is nothing to learn")
        into.num_empty += 1
    elif demonstration.num_tokens > run.model.max_length:
        limit, length = run.model.max_length, demonstration.num_tokens
        _check_may_skip(run, f"it must hold at most model.max_length ({limit}) tokens, got {length}")
        into.num_too_long += 1
    else:
        _check_vocabulary(demonstration, vocab_size=vocab_size)
        into.demonstrations.append(demonstration)


def _check_may_skip(run: RunConfig, fault: str) -> None:
    if run.sft.unfit == "refuse":
        raise ConfigError(f"{fault}; drop the row, or leave such rows out with sft.unfit=skip.")


def _check_vocabulary(demonstration: Demonstration, *, vocab_size: int) -> None:
    smallest, largest = demonstration.token_ids.min(), demonstration.token_ids.max()
    if smallest < 0 or largest >= vocab_size:
        raise ConfigError(
            f"token ids must lie between 0 and {vocab_size - 1}, the model's vocabulary, got {smallest} to {largest}: "
            "the file must be made for the model that model.path names."
        )


def _open(path: Path, *, run: RunConfig) -> tuple[Iterator[dict[str, Any]], Form]:
    if not path.is_file():
        raise ConfigError(
            f"{path} must be a Parquet file of demonstrations, but there is no such file: correct sft.train_path and "
            "sft.heldout_path, or make what a preset needs with `slipstream prepare` and the same overrides."
        )
    try:
        file = pq.ParquetFile(path)
        form = find_form(file.schema_arrow, config=run.sft, load_tokenizer=lambda: _load(AutoTokenizer, run.model))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be a Parquet file of demonstrations, but cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return _rows(file, columns=form.columns), form


def _rows(file: pq.ParquetFile, *, columns: list[str]) -> Iterator[dict[str, Any]]:
    try:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"the file cannot be read any further: {error}") from None


def _load(kind: Any, model: ModelConfig) -> Any:
    """The model's settings or its tokenizer."""
    try:
        return kind.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.path must hold a readable model and tokenizer, got {model.path!r}: {first_line}"
        ) from error
