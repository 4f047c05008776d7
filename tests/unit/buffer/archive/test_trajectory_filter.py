"""TrajectoryFilter: conditions on trajectories of a store and of an archive, and conditions as text."""

from typing import Any

import numpy as np
import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.trajectory_filter import (
    StoredTrajectory,
    TrajectoryFilter,
    format_conditions,
    parse_conditions,
)
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.base import ConfigError
from tests.builders import make_finished, make_trajectory, write_archive

LONG = {
    "token_ids": np.arange(20, dtype=np.int32),
    "model_mask": np.arange(20) >= 6,
    "generator_logprobs": np.zeros(20, dtype=np.float32),
}
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


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
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
    ],
)
def test_all_conditions_must_hold(archive: Archive, fields: dict[str, Any], wanted: str) -> None:
    found = archive.read(TrajectoryFilter(**fields), decode=decode)
    assert "".join(stored.trajectory.group_id for stored in found) == wanted


def test_the_column_expression_never_excludes_a_match_and_a_trajectory_knows_its_versions(archive: Archive) -> None:
    everything = list(archive.read())
    for fields in ({"version": 4}, {"min_reward": 0.5}, {"max_tokens": 12}, {"outcome": "retired"}, {"step": 8}):
        wanted = TrajectoryFilter(**fields)
        expected = [stored.trajectory.id for stored in everything if wanted.matches(stored, decode=None)]
        assert [stored.trajectory.id for stored in archive.read(wanted)] == expected
    stored = StoredTrajectory(make_trajectory(version_spans=[VersionSpan(6, 2), VersionSpan(9, 4)]), "ready", "", [])
    assert (stored.versions, stored.oldest_version, stored.newest_version) == ([2, 4], 2, 4)
    assert stored.response_tokens == 6


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("reward>=0.5 step<=40", {"min_reward": 0.5, "max_step": 40}),
        ("version=3 outcome=retired", {"min_version": 3, "max_version": 3, "outcome": "retired"}),
        ("text='a <= b' group=17 id=17-0-3", {"text": "a <= b", "group_id": "17", "id": "17-0-3"}),
        ("tokens>=5 tokens<=9 status=ok", {"min_tokens": 5, "max_tokens": 9, "reward_status": "ok"}),
        ("prompt=train/1 generator=g-0 source=sums stop=length", {
            "prompt_uid": "train/1", "generator_id": "g-0", "data_source": "sums", "stop_reason": "length",
        }),
    ],
)  # fmt: skip
def test_a_line_is_a_filter_and_back(line: str, fields: dict[str, object]) -> None:
    read = parse_conditions(line)
    assert read == TrajectoryFilter(**fields)  # type: ignore[arg-type]
    assert parse_conditions(format_conditions(read)) == read
    assert format_conditions(TrajectoryFilter(step=3, version=2)) == "version=2 step=3"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("reward", "must read NAME=VALUE"),
        ("rewards>=1", "Did you mean reward?"),
        ("step>=x", "must have a value that fits"),
        ("group>=3", "group must be given with ="),
        ("outcome=gone", "outcome must be one of open, ready"),
        ("text='a", "must have their quotes closed"),
    ],
)
def test_unreadable_input_is_reported_in_one_sentence(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_conditions(line)
