"""Rows of a catalog: one per trajectory, without tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from slipstream.buffer.archive.columns import SCHEMA, from_batch, known_columns
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.configs.base import Record


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
