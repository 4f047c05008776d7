"""Dataset: the prompts of one or more files, validated and measured when opened.

Reads the tokenizer file directly, because the transformers classes would import torch into the broker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import structlog
from tokenizers import Tokenizer

from slipstream.broker.messages import Row
from slipstream.broker.prompt_rows import (
    JsonRows,
    PromptText,
    TableRows,
    image_sources,
    make_row,
    open_rows,
    place_images,
)
from slipstream.buffer.codec import encode
from slipstream.buffer.sampling import FileShare, RowCount
from slipstream.configs.base import ConfigError, require
from slipstream.configs.data import ModelConfig
from slipstream.configs.run import RunConfig, check_profile
from slipstream.runtime.images import VisionModel
from slipstream.runtime.model_files import find_file, read_chat_template, read_json

_BATCH = 1024
_TRIED_PROMPTS = 4096
"""Bounds the second or so before a run's first output; the broker measures all."""

Counter = Callable[[list[PromptText]], list[int]]
"""Number of tokens of each prompt."""
log = structlog.get_logger(__name__)


def is_short(prompt: PromptText, most: int) -> bool:
    """Whether the prompt's length proves at most `most` tokens."""
    # A token has at least one character, and a tokenizer may prepend one space.
    return isinstance(prompt, str) and prompt.isascii() and len(prompt) < most


def count_tokens(prompts: list[PromptText], model: ModelConfig) -> list[int]:
    """Count each prompt's tokens as generators encode it; 0 if unknown."""
    if not prompts:
        return []
    if (file := find_file(model.path, "tokenizer.json")) is None:
        log.warning("prompt_lengths_unknown", reason=f"{model.path} has no tokenizer.json on this machine")
        return [0] * len(prompts)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    render = chat_renderer(model) if any(not isinstance(prompt, str) for prompt in prompts) else str
    texts = [prompt if isinstance(prompt, str) else render(prompt) for prompt in prompts]
    # In batches, because encodings take far more memory than their texts.
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    return [len(found) for batch in batches for found in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


def chat_renderer(model: ModelConfig) -> Callable[[Any], str]:
    """Make a function that renders chat messages, as empty text if generators will report an error."""
    # Imported here because it takes a second and most datasets do not need it.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template, settings = find_template(model), read_json(model.path, "tokenizer_config.json")
    found = {key: value for key, value in settings.items() if key.endswith("_token")}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    tokens |= model.chat_template_kwargs

    def render(messages: Any) -> str:
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
        except (TemplateError, TypeError, ValueError):
            return ""
        return str(texts[0])

    return render if template else lambda _: ""


def find_template(model: ModelConfig) -> str:
    """Chat template of the settings, else of the checkpoint, else empty. Raises ConfigError."""
    if given := read_chat_template(model):
        return given
    if file := find_file(model.path, "chat_template.jinja"):
        return file.read_text("utf-8")
    # Older checkpoints have a text here, or a list of named texts.
    template = read_json(model.path, "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):
        template = next((each.get("template") for each in template if each.get("name") == "default"), "")
    return str(template)


_MOST_OVERHEAD = 8
"""Bound on a row's bytes in a message, as a multiple of `TableRows.num_bytes`."""


class Dataset:
    """The rows of one or more files, numbered consecutively and held in memory."""

    def __init__(
        self,
        *paths: str | Path,
        weights: Sequence[float] = (),
        names: Sequence[str] = (),
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        """Open and validate the files. Raises ConfigError, naming the file and its first problem.

        `weights`: shares of the files in the prompt order; default: by rows. `names`: prefixes of the rows' uids;
        default: file names. `columns`: `data.columns`. `max_rows`: of each file.
        """
        names = names or _short_names(list(map(Path, paths)))
        self.files = [
            PromptFile(Path(path), name=name, rows=open_rows(Path(path), columns=columns or {}, max_rows=max_rows))
            for path, name in zip(paths, names, strict=True)
        ]
        self._weights = weights

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def __iter__(self) -> Iterator[Row]:
        return (file.row(index) for file in self.files for index in range(len(file)))

    @property
    def paths(self) -> str:
        return ", ".join(str(file.path) for file in self.files)

    @property
    def row_count(self) -> RowCount:
        """Rows of the single file, or of each with its weight; determines the prompt order."""
        counts = [len(file) for file in self.files]
        weights = self._weights or counts
        shares = [FileShare(count, float(weight)) for count, weight in zip(counts, weights, strict=True)]
        return shares if len(shares) > 1 else counts[0]

    def row(self, index: int) -> Row:
        """Kept row `index`. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.paths} has rows 0 to {len(self) - 1}, got {index}")
        for file in self.files:
            if index < len(file):
                break
            index -= len(file)
        return file.row(index)


def _short_names(paths: list[Path]) -> list[str]:
    """Paths without suffixes, shortened while unique: gsm8k/train and math/train."""
    # A link keeps its name: its target may be a hash.
    parts = [(path.parent.resolve() / path.name.removesuffix(".gz")).with_suffix("").parts for path in paths]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


class PromptFile:
    """The kept rows of one file."""

    def __init__(self, path: Path, *, name: str, rows: TableRows | JsonRows) -> None:
        """`name`: prefix of the rows' uids, and default `data_source`."""
        self.path = path
        self._name = name
        self._file = rows
        self._rows: Sequence[int] = range(len(self._file))
        self._images: dict[int, tuple[int, int]] = {}
        """Row -> bytes of its images, and tokens they add beyond one placeholder each."""

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._row(self._rows[index])

    def _row(self, number: int) -> Row:
        values, folder = self._file.values(number), self.path.parent
        return make_row(values, uid=f"{self._name}/{number:05d}", file_name=self._name, folder=folder)

    def check_images(self, vision: VisionModel) -> None:
        """Read the headers of all images. Raises ConfigError for the first unusable one."""
        for number in self._rows if self._file.may_have_images else ():
            if not image_sources(self._file.values(number)):
                continue
            # Raises for a model without image support, a problem of all rows rather than this one.
            vision.token_id  # noqa: B018
            try:
                images = self._row(number).images
                tokens = [vision.num_tokens(vision.grid(data)) for data in images]
            except ConfigError as error:
                raise ConfigError(f"{self.path}, row {number}: {error}") from None
            self._images[number] = sum(map(len, images)), sum(tokens) - len(tokens)

    def keep_short(self, num_tokens: Counter, *, most: int, drops: bool, num_tried: int | None = None) -> None:
        """Refuse prompts over `most` tokens, or drop them and log how many. Raises ConfigError.

        `num_tried`: number of the longest texts to measure; default: all.
        """
        prompts = self._file.prompts()
        unmeasured = [row for row in self._rows if row in self._images or not is_short(prompts[row], most)]
        unmeasured = sorted(unmeasured, key=lambda row: len(str(prompts[row])), reverse=True)[:num_tried]
        placed = [place_images(self._file.values(row)) if row in self._images else prompts[row] for row in unmeasured]
        found_lengths = zip(unmeasured, num_tokens(placed), strict=True)
        lengths = {row: length + self._images.get(row, (0, 0))[1] for row, length in found_lengths}
        longer = {row: length for row, length in lengths.items() if length > most}
        if not longer:
            return
        row, length = max(longer.items(), key=lambda item: item[1])
        found = f"{len(longer)} of {len(self)} are longer, up to {length} tokens in row {row}"
        if not drops or len(longer) == len(self):
            raise ConfigError(
                f"the prompts of {self.path} must hold at most data.max_prompt_tokens ({most}) tokens, but {found}: "
                "raise the limit, or leave such rows out with data.on_too_long=skip."
            )
        self._rows = [row for row in self._rows if row not in longer]
        reason = f"over data.max_prompt_tokens ({most}): {found}"
        log.warning("prompts_left_out", file=str(self.path), left_out=len(longer), kept=len(self), reason=reason)

    def check_row_sizes(self, *, max_message_bytes: int) -> None:
        """Refuse rows over half the message size, which also holds a lease. Raises ConfigError."""
        if found := self._find_large(0, len(self._file), most=max_message_bytes // 2):
            row, size = found
            raise ConfigError(
                f"a row of {self.path} must take at most half of broker.max_message_bytes ({max_message_bytes}), got "
                f"{size} bytes in row {row}: raise broker.max_message_bytes, here and where generators are "
                "started by hand, or shorten the row."
            )

    def _find_large(self, start: int, end: int, *, most: int) -> tuple[int, int] | None:
        """(row, encoded bytes) of the first row in this range that is too large."""
        # Images may be in separate files.
        num_bytes = self._file.num_bytes(start, end) + sum(self._images.get(i, (0, 0))[0] for i in range(start, end))
        if start == end or num_bytes <= most // _MOST_OVERHEAD:
            return None
        if end - start == 1:
            size = len(encode(self._row(start)))
            return (start, size) if size > most and start in self._rows else None
        middle = (start + end) // 2
        return self._find_large(start, middle, most=most) or self._find_large(middle, end, most=most)


def read_train(run: RunConfig) -> Dataset:
    """Open the training prompts without a length limit. Raises ConfigError."""
    must, why = "name files of prompts", "there would be nothing to train on"
    require(bool(run.data.train), "data.train", must, got="nothing", why=why)
    files = run.data.train_files
    weights = [file.weight for file in files if file.weight is not None]
    paths = [file.path for file in files]
    return Dataset(*paths, weights=weights, columns=run.data.columns, max_rows=run.data.max_rows)


def with_epochs(run: RunConfig) -> RunConfig:
    """Derive `learner.max_steps` from `learner.epochs` and the rows of the training files. Raises ConfigError.

    Supervised training counts its demonstrations instead.
    """
    epochs = run.learner.epochs
    if epochs is None or run.mode in ("sft", "evaluate"):
        return run
    # Rows over `data.max_prompt_tokens` count, because a learner may lack the tokenizer to find them.
    max_steps = ceil(epochs * len(read_train(run)) / run.claimed_groups_per_step)
    run = msgspec.structs.replace(run, learner=msgspec.structs.replace(run.learner, max_steps=max_steps))
    check_profile(run)
    return run


def read_heldout(run: RunConfig) -> dict[str, Dataset]:
    """Open the prompts of each held-out set, shared files once, without a length limit. Raises ConfigError."""
    must, why = "name files of prompts", "there would be nothing to evaluate on"
    require(bool(run.data.eval), "data.eval", must, got="nothing", why=why)
    sets = run.data.eval_sets
    paths = list(dict.fromkeys(each.path for each in sets))
    names = _short_names(list(map(Path, paths)))
    columns = run.data.columns
    files = {path: Dataset(path, names=[name], columns=columns) for path, name in zip(paths, names, strict=True)}
    return {each.name: files[each.path] for each in sets}


def open_datasets(run: RunConfig) -> tuple[Dataset, dict[str, Dataset]]:
    """Open the training and held-out prompts. Raises ConfigError."""
    return open_train(run), open_heldout(run)


def open_train(run: RunConfig) -> Dataset:
    """Open the training prompts and apply `data.max_prompt_tokens`; logs dropped ones. Raises ConfigError."""
    return _checked(read_train(run), run)


def open_heldout(run: RunConfig) -> dict[str, Dataset]:
    """Open each held-out set likewise; also logs files with too few rows. Raises ConfigError."""
    heldout = read_heldout(run)
    for dataset in dict.fromkeys(heldout.values()):
        _checked(dataset, run)
    for shortage in describe_shortages(run, heldout):
        log.warning("few_heldout_prompts", reason=shortage)
    return heldout


def _checked(dataset: Dataset, run: RunConfig) -> Dataset:
    check_prompt_sizes(dataset, run)
    for file in dataset.files:
        file.check_row_sizes(max_message_bytes=run.broker.max_message_bytes)
    return dataset


def check_prompt_sizes(dataset: Dataset, run: RunConfig, *, is_trial: bool = False) -> None:
    """Apply `data.max_prompt_tokens`, as a trial only to the longest texts. Raises ConfigError."""
    vision, num_tried = VisionModel(run.model.path), _TRIED_PROMPTS if is_trial else None
    most, drops = run.data.max_prompt_tokens, run.data.on_too_long == "skip"
    # All images first: tokenizing takes much longer.
    for file in dataset.files:
        file.check_images(vision)
    for file in dataset.files:
        file.keep_short(lambda prompts: count_tokens(prompts, run.model), most=most, drops=drops, num_tried=num_tried)


def describe_shortages(run: RunConfig, heldout: Mapping[str, Dataset]) -> list[str]:
    """Describe how evaluations share each held-out file with too few prompts."""
    wanted = run.evaluation.num_prompts + run.evaluation.num_final_prompts
    found = []
    for dataset in dict.fromkeys(heldout.values()):
        if len(dataset) < wanted:
            monitored, final = run.evaluation.rows(len(dataset))
            found.append(
                f"{dataset.paths} holds {len(dataset)} prompts, evaluation.num_prompts + evaluation.num_final_prompts "
                f"ask for {wanted}: {len(monitored)} are evaluated during training, {len(final)} before and after it"
            )
    return found
