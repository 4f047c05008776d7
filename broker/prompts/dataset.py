"""Dataset: the prompts of a file, validated and measured when it is opened."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from slipstream.broker.prompts.lengths import count_tokens, is_short
from slipstream.broker.prompts.rows import PromptText, Row, make_row, open_rows
from slipstream.buffer.codec import encode
from slipstream.configs.base import ConfigError
from slipstream.configs.run import RunConfig

_MOST_OVERHEAD = 8
"""A row's bytes in a message are fewer than so many times those of `RowFile.num_bytes`."""

log = structlog.get_logger(__name__)


class Dataset:
    """The rows of one file, held in memory. Loads without torch."""

    def __init__(self, path: str | Path) -> None:
        """Open and validate the file. Raises ConfigError, naming the file and its first problem."""
        self._path = Path(path)
        self._file = open_rows(self._path)
        self._rows: Sequence[int] = range(len(self._file))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        """Return row `index`, from 0 to len - 1, of those that are kept. Raises IndexError otherwise."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self._path} has rows 0 to {len(self) - 1}, got {index}")
        return self._row(self._rows[index])

    def _row(self, number: int) -> Row:
        stem = self._path.stem
        return make_row(self._file.values(number), uid=f"{stem}/{number:05d}", file_name=stem)

    def keep_short(self, num_tokens: Callable[[list[PromptText]], list[int]], *, most: int, drops: bool) -> None:
        """Refuse prompts of more than `most` tokens, or leave them out and log how many. Raises ConfigError."""
        prompts = self._file.prompts()
        unmeasured = [row for row in self._rows if not is_short(prompts[row], most)]
        lengths = dict(zip(unmeasured, num_tokens([prompts[row] for row in unmeasured]), strict=True))
        longer = {row: length for row, length in lengths.items() if length > most}
        if not longer:
            return
        row, length = max(longer.items(), key=lambda item: item[1])
        found = f"{len(longer)} of {len(self)} are longer, up to {length} tokens in row {row}"
        if not drops or len(longer) == len(self):
            raise ConfigError(
                f"the prompts of {self._path} must hold at most data.max_prompt_tokens ({most}) tokens, but {found}: "
                "raise the limit, or leave such rows out with data.too_long=drop."
            )
        self._rows = [row for row in self._rows if row not in longer]
        log.warning(
            "prompts_left_out",
            file=str(self._path),
            left_out=len(longer),
            kept=len(self),
            reason=f"over data.max_prompt_tokens ({most}): {found}",
        )

    def check_row_sizes(self, *, max_message_bytes: int) -> None:
        """Refuse a row that would fill more than half of a message, which holds its lease, too. Raises ConfigError."""
        if (row := self._find_large(0, len(self._file), most=max_message_bytes // 2)) is not None:
            raise ConfigError(
                f"a row of {self._path} must take at most half of broker.max_message_bytes ({max_message_bytes}), got "
                f"{row.size} bytes in row {row.number}: raise broker.max_message_bytes, here and where generators are "
                "started by hand, or shorten the row."
            )

    def _find_large(self, start: int, end: int, *, most: int) -> "_LargeRow | None":
        """First row in this range whose message is too large."""
        if start == end or self._file.num_bytes(start, end) <= most // _MOST_OVERHEAD:
            return None
        if end - start == 1:
            size = len(encode(self._row(start)))
            return _LargeRow(start, size) if size > most and start in self._rows else None
        middle = (start + end) // 2
        return self._find_large(start, middle, most=most) or self._find_large(middle, end, most=most)


class _LargeRow(NamedTuple):
    number: int
    size: int
    """Bytes of its record in a message."""


def open_datasets(run: RunConfig) -> tuple[Dataset, Dataset]:
    """Open the prompts to train on and those held out, without prompts over `data.max_prompt_tokens`.

    Logs what is left out, and a held-out file with fewer rows than the settings ask for. Raises ConfigError.
    """
    train, heldout = Dataset(run.data.train_path), Dataset(run.data.heldout_path)
    for dataset in (train, heldout):
        dataset.keep_short(
            lambda prompts: count_tokens(prompts, run.model),
            most=run.data.max_prompt_tokens,
            drops=run.data.too_long == "drop",
        )
        dataset.check_row_sizes(max_message_bytes=run.broker.max_message_bytes)
    if shortage := describe_shortage(run, num_heldout=len(heldout)):
        log.warning("few_heldout_prompts", reason=shortage)
    return train, heldout


def describe_shortage(run: RunConfig, *, num_heldout: int) -> str:
    """Say how evaluations share too few held-out prompts; empty if there are enough."""
    wanted = run.evaluation.monitor_prompts + run.evaluation.final_prompts
    if num_heldout >= wanted:
        return ""
    monitored, final = run.evaluation.rows(num_heldout)
    return (
        f"{run.data.heldout_path} holds {num_heldout} prompts, evaluation.monitor_prompts + evaluation.final_prompts "
        f"ask for {wanted}: {len(monitored)} are evaluated during training, {len(final)} before and after it"
    )
