"""Conditions as text: parsing, refusals, and the round trip of a filter."""

import pytest

from slipstream.buffer.archive.trajectory_filter import TrajectoryFilter, format_conditions, parse_conditions
from slipstream.configs.base import ConfigError


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


def test_a_single_step_or_version_is_written_as_one() -> None:
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
