"""Columns: finished groups to a table and back."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.buffer.archive.columns import ARCHIVE_SCHEMA, SCHEMA, from_batch, newer_schema, to_table
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import SCHEMA_VERSION, Media, Reward, Sampling, Trajectory, VersionSpan
from tests.builders import make_finished

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 40))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    mask[draw(st.integers(0, length - 1))] = True
    # A context begins only where both parts hold a token that the model wrote.
    written = np.flatnonzero(mask)
    contexts = [int(written[1])] if len(written) > 1 and draw(st.booleans()) else []
    starts = sorted(draw(st.sets(st.integers(0, length - 1), max_size=4)) | {0})
    logprob = st.floats(-(2.0**100), 0, width=32)
    return Trajectory(
        id=draw(st.text(max_size=8)),
        group_id="0",
        index=draw(COUNTS),
        prompt_uid=draw(st.text(max_size=8)),
        attempt=draw(COUNTS),
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        model_mask=mask,
        generator_logprobs=np.array(draw(st.lists(logprob, min_size=length, max_size=length)), np.float32),
        version_spans=[VersionSpan(start, draw(st.integers(0, 2**31 - 1))) for start in starts],
        reward=Reward(
            draw(st.floats(-1e12, 1e12)),
            draw(st.dictionaries(st.text(max_size=4), FLOATS, max_size=3)),
            draw(st.sampled_from(["ok", "error", "timeout"])),
            draw(st.booleans()),
            draw(st.text(max_size=8)),
            draw(st.sampled_from([[], [draw(st.floats(-1e12, 1e12)) for _ in range(num_turns(mask, contexts))]])),
        ),
        stop_reason=draw(st.text(min_size=1, max_size=8)),
        sampling=Sampling(*map(draw, [FLOATS] * 2 + [INTEGERS] * 3 + [st.none() | FLOATS, st.booleans()])),
        generator_id=draw(st.text(max_size=8)),
        started_at=draw(FLOATS),
        finished_at=draw(FLOATS),
        data_source=draw(st.text(max_size=8)),
        num_turns=draw(INTEGERS),
        extras=draw(st.dictionaries(st.text(max_size=4), PLAIN, max_size=3)),
        context_starts=contexts,
        arrays=draw(st.dictionaries(st.text(min_size=1, max_size=4), arrays(length), max_size=2)),
        media=[Media("image", "a.png", "9f", first_token=0, num_tokens=length)] * draw(st.integers(0, 2)),
        metrics=draw(st.dictionaries(st.text(min_size=1, max_size=4), FLOATS, max_size=3)),
    )


def num_turns(mask: np.ndarray, contexts: list[int]) -> int:
    return sum(len("".join("w" if written else " " for written in part).split()) for part in np.split(mask, contexts))


def arrays(length: int) -> st.SearchStrategy[np.ndarray]:
    kinds = st.sampled_from(["int32", "int64", "uint8", "int16", "bool", "float16", "float32", "float64"])
    shapes = st.sampled_from([(length,), (length, 2, 3)])
    return st.builds(lambda kind, shape: np.arange(np.prod(shape)).reshape(shape).astype(kind), kinds, shapes)


def rows_of(table: pa.Table) -> list[StoredTrajectory]:
    return [stored for batch in table.to_batches() for stored in from_batch(batch)]


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=4))
def test_archived_trajectories_reencode_to_the_same_bytes(sent: list[Trajectory]) -> None:
    payloads = [encode(trajectory) for trajectory in sent]
    table = to_table([StoredGroup("0", "retired", "", [1], payloads)], archived_at=7.0)
    assert [encode(stored.trajectory) for stored in rows_of(table)] == payloads


def test_rows_in_the_middle_of_a_batch_are_read_and_hold_the_outcome_and_columns_for_other_tools() -> None:
    groups = [make_finished(str(number), reward=Reward(total=number / 2)) for number in range(4)]
    payloads = [payload for group in groups for payload in group.payloads]
    part = to_table(groups, archived_at=7.0).slice(3, 3)
    assert [encode(stored.trajectory) for stored in rows_of(part)] == payloads[3:6]
    group = make_finished("5", members=1, state="rejected", reason="on_stale", steps=[3, 9])
    (stored,) = rows_of(to_table([group], archived_at=7.0))
    assert (stored.state, stored.reason, stored.steps, stored.archived_at) == ("rejected", "on_stale", [3, 9], 7.0)
    # No token that the model wrote has version 9.
    spans = [VersionSpan(0, 9), VersionSpan(6, 2), VersionSpan(9, 4)]
    group = make_finished(members=1, version_spans=spans, reward=Reward(0.5, {"positions": 0.5}))
    (row,) = to_table([group], archived_at=7.0).to_pylist()
    assert (row["oldest_version"], row["newest_version"], row["num_tokens"]) == (2, 4, 12)
    assert row["reward_parts"] == [("positions", 0.5)]
    assert row["token_ids"] == list(range(12))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sampling": Sampling(1.0, 1.0, -1, 6, 2**63)}, (RecordRefusedError, OverflowError, pa.ArrowException)),
        ({"version_spans": []}, RecordRefusedError),
    ],
)
def test_values_that_no_column_can_hold_are_refused(fields: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        to_table([make_finished(**fields)], archived_at=7.0)


@pytest.mark.parametrize(
    ("key", "newest"),
    [(b"slipstream.archive_schema", ARCHIVE_SCHEMA), (b"slipstream.trajectory_schema", SCHEMA_VERSION)],
)
def test_a_newer_schema_is_refused_by_name(key: bytes, newest: int) -> None:
    newer = SCHEMA.with_metadata(dict(SCHEMA.metadata) | {key: b"99"})
    complaint = f"must have {key.decode()} <= {newest}, got 99: read it with the Slipstream that wrote it"
    assert newer_schema(newer) == complaint
    assert newer_schema(SCHEMA) == ""
