"""Rows of a catalog, one per trajectory, without tokens; and details of one: tokens, messages, steps."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.shards import SCHEMA, from_batch, known_columns
from slipstream.buffer.archive.step_tokens import TokenNumbers
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, lag
from slipstream.configs.base import Record
from slipstream.observe.catalog.token_decoder import TokenDecoder

_CHATS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
"""Chat templates of Qwen (ChatML) and Llama 3."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_SINGLE = "biuf"
"""numpy dtype kinds that are one real number."""


class CatalogRow(Record):
    """One trajectory in a list.

    Example: CatalogRow(id="17-0-3", group_id="17", reward_total=1.0, advantage=0.25, uses=1, last_step=12, lag=2, ...)
    """

    id: str
    group_id: str
    index: int
    prompt_uid: str
    attempt: int
    """Number of earlier leases of the prompt."""
    data_source: str
    generator_id: str
    outcome: str
    """State or outcome of its group."""
    reason: str
    reward_total: float
    reward_status: str
    is_correct: bool
    num_tokens: int
    """Tokens of prompt and response."""
    num_turns: int
    stop_reason: str
    oldest_version: int
    """Smallest version that sampled a token."""
    newest_version: int
    steps: list[int]
    started_at: float
    """Seconds since 1970, as `finished_at` and `archived_at`."""
    finished_at: float
    archived_at: float | None
    versions: list[int]
    advantage: float | None
    """Reward minus the group's mean over sampled members; None if greedy, failed, or an evaluation."""
    uses: int
    last_step: int | None
    lag: int | None
    """Learner's version at the start of `last_step` minus `oldest_version`; None if unknown."""
    seconds: float
    """Generation time."""
    prompt: str = ""
    """End of the prompt, beginning of the answer; only in pages, with a tokenizer."""
    answer: str = ""


_AS_ARCHIVED = [name for name in CatalogRow.__struct_fields__ if name in SCHEMA.names]
_NUMBERS = {"advantage": pa.float64(), "uses": pa.int64(), "last_step": pa.int64(), "lag": pa.int64()}
_DERIVED = {"versions": pa.list_(pa.int64())} | _NUMBERS | {"seconds": pa.float64()}
ROWS = pa.schema({name: SCHEMA.field(name).type for name in _AS_ARCHIVED} | _DERIVED)
"""Archive columns, then derived columns."""


def read_rows(dataset: ds.Dataset, *, step_versions: Mapping[int, int]) -> pa.Table:
    """Return the rows of a dataset. Advantages need whole groups.

    `step_versions`: step -> the learner's version at its start. Raises pa.ArrowException, OSError.
    """
    table = dataset.to_table(columns=[*_AS_ARCHIVED, "sampling", "version_spans"])
    columns = {name: table[name] for name in _AS_ARCHIVED}
    spans = table["version_spans"].combine_chunks()
    versions = pc.struct_field(spans.flatten(), "version")
    columns["versions"] = pa.ListArray.from_arrays(pc.subtract(spans.offsets, spans.offsets[0]), versions)
    columns["advantage"] = _advantages(table)
    columns["uses"] = pc.fill_null(pc.list_value_length(table["steps"]), 0)
    steps = table["steps"].combine_chunks()
    offsets, values = steps.offsets.to_numpy(), np.append(steps.flatten().to_numpy(), -1)
    # -1 without steps.
    last_steps = np.where(np.diff(offsets) > 0, values[offsets[1:] - offsets[0] - 1], -1)
    columns["last_step"] = pa.array(last_steps, mask=last_steps < 0)
    columns["lag"] = _lags(last_steps, table["oldest_version"].to_numpy(), step_versions)
    columns["seconds"] = pc.subtract(table["finished_at"], table["started_at"])
    return pa.table([columns[field.name].cast(field.type) for field in ROWS], schema=ROWS).combine_chunks()


def read_stored(dataset: ds.Dataset, ids: list[str]) -> Iterator[StoredTrajectory]:
    """Yield trajectories in the dataset's order."""
    wanted = pc.field("id").isin(ids)
    for batch in dataset.to_table(columns=known_columns(dataset.schema), filter=wanted).to_batches():
        yield from from_batch(batch)


def to_records(rows: pa.Table) -> list[CatalogRow]:
    """Build one record per row."""
    return [CatalogRow(**row) for row in rows.to_pylist()]


def has_value_within(lists: pa.ChunkedArray, low: int | None, high: int | None) -> np.ndarray:
    """Return whether each list has a value within the bounds, bool[N]."""
    masks = [np.empty(0, dtype=bool)]
    for chunk in lists.chunks:
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        is_within = (values >= (-np.inf if low is None else low)) & (values <= (np.inf if high is None else high))
        mask = np.zeros(len(chunk), dtype=bool)
        mask[pc.list_parent_indices(chunk).to_numpy()[is_within]] = True
        masks.append(mask)
    return np.concatenate(masks)


def _advantages(table: pa.Table) -> pa.Array:
    rewards = table["reward_total"].to_numpy()
    is_sampled = pc.greater(pc.struct_field(table["sampling"], "temperature"), 0).to_numpy()
    is_trained_on = pc.not_equal(table["outcome"], "evaluated").to_numpy()
    is_rated = pc.equal(table["reward_status"], "ok").to_numpy() & is_sampled & is_trained_on
    groups = pc.dictionary_encode(table["group_id"].combine_chunks()).indices.to_numpy()
    counts = np.bincount(groups, weights=is_rated)
    sums = np.bincount(groups, weights=np.where(is_rated, rewards, 0.0))
    means: Any = sums / np.maximum(counts, 1)
    return pa.array(rewards - means[groups], mask=~is_rated)


def _lags(last_steps: np.ndarray, oldest: np.ndarray, step_versions: Mapping[int, int]) -> pa.Array:
    known = np.full(int(last_steps.max(initial=0)) + 2, -1)
    for step, version in step_versions.items():
        if 0 <= step < len(known) - 1:
            known[step] = version
    # Index -1 (no step) selects the last entry, -1.
    versions = known[last_steps]
    return pa.array(versions - oldest, mask=versions < 0)


class Message(Record):
    """A message, or consecutive tokens by one writer if the chat template is unknown.

    Example: Message(role="assistant", text="<tool_call>...", calls=["{...}"], first_token=40, num_tokens=18, ...)
    """

    role: str
    """Role in the template, or `prompt`, `assistant` (the model), `observation` (input after a turn)."""
    text: str
    """Decoded text; empty without a tokenizer."""
    is_model: bool
    first_token: int
    """First token of its span. Messages between two model turns share a span."""
    num_tokens: int
    calls: list[str] = []
    """Tool calls in the text, between `<tool_call>` tags."""
    reward: float | None = None
    """Reward of this turn; None unless turns are scored."""


class Use(Record):
    """A step that trained on the trajectory."""

    step: int
    version: int | None
    """Learner's version at its start; None if unknown."""
    lag: int | None
    """`version` minus the trajectory's oldest version."""


class TrajectoryDetail(Record):
    """A trajectory token by token, as JSON-compatible values."""

    row: CatalogRow
    token_ids: list[int]
    texts: list[str]
    """Text of each token; empty without a tokenizer."""
    model_mask: list[bool]
    versions: list[int]
    """Version that sampled each token; -1 if the model did not write it."""
    numbers: dict[str, list[float | None]]
    """Per-token numbers, None where absent: the generator's `logprob`; `lag`, `learner_log_ratio`, and
    `learner_entropy` of its last step; `advantage`; and stored arrays such as `ratio`."""
    messages: list[Message]
    uses: list[Use]
    reward: Reward
    sampling: Sampling
    context_starts: list[int]
    """First token of each context after the first."""
    metrics: dict[str, float]
    extras: dict[str, Any]


def describe(
    row: CatalogRow,
    stored: StoredTrajectory,
    *,
    decoder: TokenDecoder | None,
    step_versions: Mapping[int, int],
    recorded: TokenNumbers,
) -> TrajectoryDetail:
    """Build details. `recorded`: the learner's per-token numbers."""
    trajectory = stored.trajectory
    used_at = [(step, step_versions.get(step)) for step in stored.steps]
    return TrajectoryDetail(
        row=row,
        token_ids=trajectory.token_ids.tolist(),
        texts=decoder.texts(trajectory.token_ids) if decoder else [],
        model_mask=trajectory.model_mask.tolist(),
        versions=trajectory.token_versions().tolist(),
        numbers=dict(_numbers(row, trajectory, step_versions)) | recorded,
        messages=list(_messages(trajectory, decoder)),
        uses=[Use(step, at, None if at is None else at - stored.oldest_version) for step, at in used_at],
        **{name: getattr(trajectory, name) for name in ("reward", "sampling", "context_starts", "metrics", "extras")},
    )


def _numbers(
    row: CatalogRow, trajectory: Trajectory, step_versions: Mapping[int, int]
) -> Iterator[tuple[str, list[float | None]]]:
    mask = trajectory.model_mask
    yield "logprob", _where(mask, trajectory.generator_logprobs)
    version = None if row.last_step is None else step_versions.get(row.last_step)
    if version is not None:
        yield "lag", _where(mask, lag(trajectory.token_versions(), version))
    if row.advantage is not None:
        yield "advantage", _where(mask, np.full(len(mask), row.advantage))
    for name, array in trajectory.arrays.items():
        if array.ndim == 1 and array.dtype.kind in _SINGLE:
            yield name, _where(mask, array)


def _where(mask: np.ndarray, values: np.ndarray) -> list[float | None]:
    return [value if is_model else None for value, is_model in zip(values.tolist(), mask.tolist(), strict=True)]


def _messages(trajectory: Trajectory, decoder: TokenDecoder | None) -> Iterator[Message]:
    rewards = iter(trajectory.reward.turns)
    borders = np.flatnonzero(np.diff(trajectory.model_mask)) + 1
    for start, end in pairwise(sorted({*borders.tolist(), *trajectory.context_bounds()})):
        is_model = bool(trajectory.model_mask[start])
        text = decoder(trajectory.token_ids[start:end]) if decoder else ""
        if is_model:
            calls = _CALL.findall(text)
            yield Message("assistant", text, True, start, end - start, calls, next(rewards, None))
        else:
            matches = next((found for pattern in _CHATS if (found := list(pattern.finditer(text)))), [])
            parts = [(match["role"], match["text"]) for match in matches]
            # The header of the model's turn is an empty message.
            parts = parts[:-1] if parts and parts[-1] == ("assistant", "") else parts
            role = "prompt" if start in (0, *trajectory.context_starts) else "observation"
            for part_role, part in parts or [(role, text)]:
                yield Message(part_role, part, False, start, end - start)
