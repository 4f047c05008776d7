from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.shards import ARCHIVE_SCHEMA, SCHEMA, from_batch, newer_schema, to_table
from slipstream.buffer.archive.step_tokens import StepTokens, drop_steps, keep_newest, read_steps, write_step
from slipstream.buffer.archive.trajectory_filter import (
    StoredTrajectory,
    TrajectoryFilter,
    format_conditions,
    parse_conditions,
)
from slipstream.buffer.codec import encode
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import SCHEMA_VERSION, Media, Reward, Sampling, Trajectory, VersionSpan
from slipstream.configs.base import ConfigError
from tests.builders import make_finished, write_archive
from tests.cases import cases

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
    plain = dict.fromkeys(("id", "prompt_uid", "generator_id", "data_source"), st.text(max_size=8))
    plain |= {"index": COUNTS, "attempt": COUNTS, "started_at": FLOATS, "finished_at": FLOATS, "num_turns": INTEGERS}
    return Trajectory(
        **{name: draw(values) for name, values in plain.items()},
        group_id="0",
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


@settings(max_examples=30, deadline=None)
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
    assert (stored.versions, stored.oldest_version, stored.newest_version) == ([0], 0, 0)
    assert stored.response_tokens == 6
    # No token that the model wrote has version 9.
    spans = [VersionSpan(0, 9), VersionSpan(6, 2), VersionSpan(9, 4)]
    group = make_finished(members=1, version_spans=spans, reward=Reward(0.5, {"positions": 0.5}))
    (row,) = to_table([group], archived_at=7.0).to_pylist()
    assert (row["oldest_version"], row["newest_version"], row["num_tokens"]) == (2, 4, 12)
    assert row["reward_parts"] == [("positions", 0.5)]
    assert row["token_ids"] == list(range(12))


def test_values_that_no_column_can_hold_and_newer_schemas_are_refused() -> None:
    for fields in ({"sampling": Sampling(1.0, 1.0, -1, 6, 2**63)}, {"version_spans": []}):
        with pytest.raises((RecordRefusedError, OverflowError, pa.ArrowException)):
            to_table([make_finished(**fields)], archived_at=7.0)
    newest = {b"slipstream.archive_schema": ARCHIVE_SCHEMA, b"slipstream.trajectory_schema": SCHEMA_VERSION}
    for key, version in newest.items():
        newer = SCHEMA.with_metadata(dict(SCHEMA.metadata) | {key: b"99"})
        complaint = f"must have {key.decode()} <= {version}, got 99: read it with the Slipstream that wrote it"
        assert newer_schema(newer) == complaint
    assert newer_schema(SCHEMA) == ""


LONG = {"token_ids": np.arange(20, dtype=np.int32), "model_mask": np.arange(20) >= 6}
LONG |= {"generator_logprobs": np.zeros(20, dtype=np.float32)}
GROUPS = [
    make_finished("0", members=1, reward=Reward(0.0), version_spans=[VersionSpan(6, 2), VersionSpan(9, 4)], steps=[5]),
    make_finished("1", members=1, reward=Reward(0.5), data_source="sums", steps=[5, 8]),
    make_finished("2", members=1, reward=Reward(1.0), state="rejected", reason="late", steps=[], **LONG),
]


def decode(tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return Archive(write_archive(tmp_path_factory.mktemp("filter"), GROUPS))


@cases(
    "fields, wanted",
    ({}, "012"),
    ({"id": "1-0-0"}, "1"),
    ({"max_reward": 0.5}, "01"),
    ({"min_reward": 0.1, "max_reward": 0.9}, "1"),
    ({"min_tokens": 13}, "2"),
    ({"max_tokens": 12}, "01"),
    ({"version": 2}, "0"),
    ({"version": 4}, "0"),
    ({"step": 5}, "01"),
    ({"min_version": 3}, "0"),
    ({"max_version": 1}, "12"),
    ({"min_version": 3, "max_version": 3}, ""),
    ({"version": 4, "max_version": 3}, ""),
    ({"min_step": 6}, "1"),
    ({"max_step": 5}, "01"),
    ({"min_step": 6, "max_step": 7}, ""),
    ({"step": 8, "max_step": 7}, ""),
    ({"group_id": "2"}, "2"),
    ({"prompt_uid": "test/1"}, "1"),
    ({"generator_id": "generator-0"}, "012"),
    ({"reward_status": "timeout"}, ""),
    ({"stop_reason": "stop", "max_reward": 0}, "0"),
    ({"data_source": "sums"}, "1"),
    ({"outcome": "rejected"}, "2"),
    ({"text": "11 12"}, "2"),
)
def test_all_conditions_must_hold(archive: Archive, fields: dict[str, Any], wanted: str) -> None:
    found = archive.read(TrajectoryFilter(**fields), decode=decode)
    assert "".join(stored.trajectory.group_id for stored in found) == wanted


@cases(
    "line, fields",
    ("", {}),
    ("reward>=0.5 step<=40", {"min_reward": 0.5, "max_step": 40}),
    ("version=3 outcome=retired", {"min_version": 3, "max_version": 3, "outcome": "retired"}),
    ("text='a <= b' group=17 id=17-0-3", {"text": "a <= b", "group_id": "17", "id": "17-0-3"}),
    ("tokens>=5 tokens<=9 status=ok", {"min_tokens": 5, "max_tokens": 9, "reward_status": "ok"}),
    ("prompt=train/1 generator=g-0", {"prompt_uid": "train/1", "generator_id": "g-0"}),
    ("source=sums stop=length", {"data_source": "sums", "stop_reason": "length"}),
)
def test_a_line_is_a_filter_and_back(line: str, fields: dict[str, object]) -> None:
    read = parse_conditions(line)
    assert read == TrajectoryFilter(**fields)  # type: ignore[arg-type]
    assert parse_conditions(format_conditions(read)) == read
    assert format_conditions(TrajectoryFilter(step=3, version=2)) == "version=2 step=3"


@cases(
    "line, reason",
    ("reward", "must read NAME=VALUE"),
    ("rewards>=1", "Did you mean reward?"),
    ("step>=x", "must have a value that fits"),
    ("group>=3", "group must be given with ="),
    ("outcome=gone", "outcome must be one of open, ready"),
    ("text='a", "must have their quotes closed"),
)
def test_unreadable_input_is_reported_in_one_sentence(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_conditions(line)


COLUMNS = {"log_ratio": [0.5, -0.25, 0.0, -2.0], "entropy": [1.5, 0.0, 2.0, 0.125]}
TWO = StepTokens(
    ["0-0-0", "0-0-1"],
    lengths=[4, 5],
    positions=[np.array([2, 3]), np.array([1, 4])],
    columns={name: np.array(values, np.float32) for name, values in COLUMNS.items()},
)
"""Two trajectories; the second has a token that is not trained on between two that are."""


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        write_step(folder, step, TWO)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_number_comes_back_at_its_token_and_none_elsewhere_or_where_it_is_not_finite(tmp_path: Path) -> None:
    write(tmp_path / "token_stats", 12)
    assert names(tmp_path / "token_stats") == ["step-00000012.parquet"]
    assert read_steps(tmp_path / "token_stats", {"0-0-0": 12, "0-0-1": 12}) == {
        "0-0-0": {"learner_log_ratio": [None, None, 0.5, -0.25], "learner_entropy": [None, None, 1.5, 0.0]},
        "0-0-1": {
            "learner_log_ratio": [None, 0.0, None, None, -2.0],
            "learner_entropy": [None, 2.0, None, None, 0.125],
        },
    }
    for step, value in enumerate((np.nan, np.inf, -np.inf, 1e30)):
        columns = {name: np.array([value, *column[1:]], np.float32) for name, column in TWO.columns.items()}
        write_step(tmp_path, step, TWO._replace(columns=columns))
        assert read_steps(tmp_path, {"0-0-0": step})["0-0-0"]["learner_log_ratio"] == [None, None, None, -0.25]


def test_a_trajectory_is_looked_up_only_in_its_last_step_and_not_in_a_damaged_or_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 5, 8)
    (tmp_path / "step-00000008.parquet").write_bytes(b"PAR1 and no more")
    nothing = np.empty(0, np.float32)
    write_step(tmp_path, 1, StepTokens([], [], [], {"log_ratio": nothing, "entropy": nothing}))
    last = {"0-0-0": 5, "0-0-1": 8, "9-0-0": 5, "2-0-0": None, "3-0-0": 1, "4-0-0": 7}
    assert list(read_steps(tmp_path, last)) == ["0-0-0"]


def test_the_oldest_files_make_room_for_the_newest_and_undone_steps_are_deleted(tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 12, 13)
    drop_steps(tmp_path, after=10)
    drop_steps(tmp_path / "none", after=1)
    size = (tmp_path / "step-00000010.parquet").stat().st_size
    assert write_step(tmp_path, 11, TWO) == size
    keep_newest(tmp_path, max_bytes=2.5 * size)
    assert names(tmp_path) == ["step-00000010.parquet", "step-00000011.parquet"]
    keep_newest(tmp_path, max_bytes=0.5 * size)
    assert names(tmp_path) == []
