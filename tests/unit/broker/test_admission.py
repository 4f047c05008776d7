"""Admission bounds how far generators run ahead and how much the store holds."""

import msgspec
import pytest

from slipstream.buffer.pacing import admission_limit, admission_reason, capacity_limit, capacity_reason
from slipstream.buffer.records import RunState
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import CapacityConfig, StalenessConfig
from tests.builders import make_run
from tests.memory_store.store import MemoryStore


@pytest.mark.parametrize(
    ("max_lag", "publish_every", "consumed", "limit"),
    [(0, 1, 0, 4), (0, 1, 12, 16), (2, 1, 0, 12), (2, 2, 8, 32), (8, 1, 400, 40)],
)
def test_the_limit_follows_consumption_and_ends_with_the_run(max_lag, publish_every, consumed, limit):
    run = make_run(
        buffer={"staleness": {"max_lag": max_lag}},
        weights={"publish_every_steps": publish_every},
        learner={"groups_per_step": 4, "max_steps": 10},
    )
    assert admission_limit(run, consumed=consumed) == limit


@pytest.mark.parametrize(("pacing_lag", "limit"), [(None, 20), (4, 20), (2, 12), (1.5, 10), (0, 4)])
def test_a_lower_lag_to_pace_for_admits_fewer_groups(pacing_lag, limit):
    staleness = {"max_lag": 4, "pacing_lag": pacing_lag}
    run = make_run(buffer={"staleness": staleness}, learner={"groups_per_step": 4, "max_steps": 100})
    assert admission_limit(run, consumed=0) == limit
    assert admission_limit(run, consumed=8) == limit + 8


def test_groups_that_would_be_stale_when_they_are_trained_on_are_not_paced_for():
    with pytest.raises(ConfigError, match=r"pacing_lag must be <= max_lag \(2\), got 2.5"):
        StalenessConfig(max_lag=2, pacing_lag=2.5)


def test_a_replay_admits_no_prompt():
    run = make_run(mode="replay", weights={"transport": "memory"}, replay={"path": "runs/other/archive"})
    assert admission_limit(run, consumed=100) == 0


def counts(**fields):
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=4, seed=0)
    return msgspec.structs.replace(store.counts(), **fields)


def test_stored_groups_and_bytes_are_bounded_with_the_reason():
    full = counts(admitted=50, leased=2, returned=1, ready=4, claimed=4, used=5, unarchived=4)
    reason = "capacity: 20 groups are outstanding, buffer.capacity.max_groups is 20"
    assert capacity_reason(CapacityConfig(max_groups=20), full) == reason
    assert capacity_limit(CapacityConfig(max_groups=20), full) == 50
    assert capacity_limit(CapacityConfig(max_groups=23), full) == 53
    assert capacity_reason(CapacityConfig(max_groups=21), full) == ""
    heavy = counts(admitted=7, payload_bytes=3 * 2**20)
    assert capacity_reason(CapacityConfig(max_mib=3), heavy).startswith("capacity: 3.0 MiB are stored")
    assert capacity_limit(CapacityConfig(max_mib=3), heavy) == 7
    assert capacity_limit(CapacityConfig(max_mib=4), heavy) > 10**9


def test_the_reason_is_the_first_condition_that_forbids_admission():
    run = make_run(buffer={"capacity": {"max_groups": 200}, "staleness": {"max_lag": 1}})
    state = RunState("run", "training", step=0, version=0, announced_version=0)
    assert admission_reason(run, state=state, counts=counts(admitted=3)) == ""
    assert admission_reason(run, state=state, counts=counts(admitted=4)).startswith("pacing: ")
    assert admission_reason(run, state=state, counts=counts(admitted=4, ready=200)).startswith("capacity: ")
    over = msgspec.structs.replace(state, phase="finishing")
    assert admission_reason(run, state=over, counts=counts()) == "the run is finishing"
