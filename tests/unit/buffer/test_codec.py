from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, check_header, checksum, chunks, decode, encode, unpack
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import (
    SCHEMA_VERSION,
    Media,
    Reward,
    Sampling,
    Trajectory,
    TrajectoryHeader,
    VersionSpan,
    group_of,
    lag,
    lag_histogram,
    lease_of,
    make_lease_id,
    make_trajectory_id,
    stale_mask,
)
from tests.builders import make_packed, make_trajectory
from tests.cases import cases

KINDS = {"token_ids": np.int32, "model_mask": bool, "generator_logprobs": np.float32}
NOTHING = {name: np.zeros(0, dtype=dtype) for name, dtype in KINDS.items()}
MIXED = [VersionSpan(6, 2), VersionSpan(9, 5)]


def reason_of(payload: bytes) -> str:
    with pytest.raises(RecordRefusedError) as caught:
        unpack(payload)
    return caught.value.reason


def fields_of(trajectory: Trajectory) -> dict[str, Any]:
    return msgpack.unpackb(encode(trajectory))


def spoilt(**changes: Any) -> bytes:
    return msgpack.packb(fields_of(make_trajectory()) | changes)


def logprobs(value: float) -> np.ndarray:
    array = make_trajectory().generator_logprobs.copy()
    array[8] = value
    return array


def test_a_trajectory_comes_back_as_it_was_sent():
    experts = np.arange(12 * 2 * 3, dtype=np.int16).reshape(12, 2, 3)
    sent = make_trajectory(
        generator_logprobs=logprobs(5e-5),  # rounding above zero is tolerated
        version_spans=[VersionSpan(6, 2), VersionSpan(9, 3)],
        reward=Reward(total=0.8, parts={"positions": 0.8}, status="timeout", detail="5 s", turns=[0.25, 0.5]),
        extras={"tool": "none", "numbers": [1, 2.5], "a": [{"b": 1.5}, "c", b"d", None, True]},
        context_starts=[9],
        arrays={"experts": experts, "teacher": np.linspace(-3, 0, 12).astype(np.float16)},
        media=[Media("image", "images/17.png", "9f86d081884c7d65", first_token=1, num_tokens=4)],
        metrics={"tool_calls": 2.0},
        stop_reason="turn_limit",
    )
    got = unpack(encode(sent))
    names = ["token_ids", "model_mask", "generator_logprobs"]
    pairs = [(getattr(sent, name), getattr(got, name)) for name in names]
    for expected, value in [*pairs, *((sent.arrays[name], got.arrays[name]) for name in sent.arrays)]:
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
    for name in {*Trajectory.__struct_fields__} - {*names, "arrays"}:
        assert getattr(got, name) == getattr(sent, name), name
    assert encode(got) == encode(sent)


def test_a_header_describes_its_payload_in_little_endian_arrays_and_schema_3_is_read():
    header, payload = make_packed("17", 3, group_size=8, version_spans=[VersionSpan(6, 2), VersionSpan(9, 5)])
    assert (header.oldest_version, header.newest_version, header.num_tokens) == (2, 5, 12)
    assert (header.payload_bytes, header.checksum) == (len(payload), checksum(payload))
    assert check_header(header, payload).id == "17-0-3"
    # Versions without a token that the model wrote do not count.
    mask = np.zeros(12, dtype=bool)
    mask[[6, 10]] = True
    spans = [VersionSpan(0, 9), VersionSpan(6, 2), VersionSpan(8, 1), VersionSpan(10, 3)]
    header, payload = make_packed(model_mask=mask, version_spans=spans)
    assert (header.oldest_version, header.newest_version) == (2, 3)
    check_header(header, payload)
    big_endian = np.arange(12, dtype=">i4")
    assert encode(make_trajectory(token_ids=big_endian)) == encode(make_trajectory())
    fields = msgspec.structs.asdict(make_trajectory())
    fields["reward"] = {"total": 0.5, "parts": {}, "status": "ok", "is_correct": False, "detail": ""}
    for name in ("context_starts", "arrays", "media", "metrics"):
        del fields[name]
    assert encode(unpack(encode(fields))) == encode(make_trajectory())


def test_extension_types_unknown_and_missing_fields_and_odd_masks_are_refused():
    extension = msgpack.ExtType(42, b"anything")
    assert reason_of(msgpack.packb(extension)) == "malformed"
    for changes in ({"extras": {"x": extension}}, {"surprise": 1}, {"model_mask": ["bool", [12], b"\x02" * 12]}):
        assert reason_of(spoilt(**changes)) == "malformed"
    fields = fields_of(make_trajectory())
    del fields["reward"]
    assert reason_of(msgpack.packb(fields)) == "malformed"


@cases(
    "array",
    None,
    [1, 2, 3],
    ["int32", [12], "text"],
    ["object", [1], b"\x00" * 8],
    [["int32"], [12], b""],
    ["int32", [13], b"\x00" * 48],
    ["int32", [-12], b"\x00" * 48],
    ["int32", [2**63], b"\x00" * 48],
    ["int32", [2**31, 2**31, 2**31], b"\x00" * 48],
    ["int32", ["12"], b"\x00" * 48],
    ["int32", [12], b"\x00" * 47],
)
def test_an_array_that_is_none_is_refused(array):
    assert reason_of(spoilt(token_ids=array)) == "malformed"


@cases(
    "changes, reason",
    ({"token_ids": np.arange(12, dtype=np.int64)}, "shape"),
    ({"token_ids": np.arange(12, dtype=np.int32).reshape(3, 4)}, "shape"),
    ({"token_ids": np.array(0, dtype=np.int32)}, "shape"),
    ({"model_mask": np.ones(11, dtype=bool)}, "shape"),
    ({"model_mask": np.ones(12, dtype=np.uint8)}, "shape"),
    ({"generator_logprobs": np.full(12, -1.0)}, "shape"),
    ({"generator_logprobs": np.full(13, -1.0, dtype=np.float32)}, "shape"),
    ({"generator_logprobs": logprobs(np.nan)}, "nonfinite_logprob"),
    ({"generator_logprobs": logprobs(-np.inf)}, "nonfinite_logprob"),
    ({"generator_logprobs": logprobs(0.01)}, "positive_logprob"),
    ({"model_mask": np.zeros(12, dtype=bool)}, "empty"),
    ({"token_ids": np.arange(-1, 11, dtype=np.int32)}, "token_id"),
    ({"version_spans": []}, "version_spans"),
    ({"version_spans": [VersionSpan(7, 0)]}, "version_spans"),
    ({"version_spans": [VersionSpan(6, 0), VersionSpan(6, 1)]}, "version_spans"),
    ({"version_spans": [VersionSpan(8, 0), VersionSpan(6, 1)]}, "version_spans"),
    ({"version_spans": [VersionSpan(6, 0), VersionSpan(12, 1)]}, "version_spans"),
    ({"version_spans": [VersionSpan(-1, 0)]}, "version_spans"),
    ({"version_spans": [VersionSpan(6, -1)]}, "version_spans"),
    ({"reward": Reward(total=float("nan"))}, "nonfinite_reward"),
    ({"reward": Reward(total=0.0, parts={"a": float("inf")})}, "nonfinite_reward"),
    ({"reward": Reward(total=-1e300)}, "large_reward"),
    ({"started_at": float("nan")}, "nonfinite_number"),
    ({"num_turns": 2**63}, "large_number"),
    ({"sampling": Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=6, seed=2**64 - 1)}, "large_number"),
    ({"extras": {"a": [{"when": datetime.now(UTC)}]}}, "extras"),
    ({"extras": {"a": {1: 2}}}, "extras"),
    ({"context_starts": [12]}, "contexts"),
    ({"context_starts": [9, 9]}, "contexts"),
    ({"context_starts": [0]}, "contexts"),
    ({"context_starts": [4]}, "empty"),
    ({"reward": Reward(total=1.0, turns=[0.5, 0.5])}, "turn_rewards"),
    ({"reward": Reward(total=1.0, turns=[float("nan")])}, "nonfinite_reward"),
    ({"reward": Reward(total=1.0, turns=[1e300])}, "large_reward"),
    ({"arrays": {"experts": np.zeros((11, 2), dtype=np.int16)}}, "shape"),
    ({"arrays": {"experts": np.zeros((), dtype=np.int16)}}, "shape"),
    ({"arrays": {"teacher": np.full((12, 2), np.nan, dtype=np.float16)}}, "nonfinite_number"),
    ({"arrays": {"": np.zeros(12, dtype=np.int16)}}, "names"),
    ({"metrics": {"calls": float("inf")}}, "nonfinite_number"),
    ({"metrics": dict.fromkeys(map(str, range(65)), 0.0)}, "names"),
    ({"media": [Media("image", "17.png", "0", first_token=4, num_tokens=9)]}, "media"),
    ({"media": [Media("image", "17.png", "0", first_token=4, num_tokens=0)]}, "media"),
    ({"stop_reason": ""}, "malformed"),
    (NOTHING, "empty"),
)
def test_untrainable_trajectories_are_refused_with_a_reason(changes, reason):
    assert reason_of(encode(make_trajectory(**changes))) == reason


@pytest.mark.parametrize(("purpose", "is_known"), [("aime24.pass-8", True), ("", False), ("a:b", False), ("-a", False)])
def test_evaluations_have_open_names(purpose, is_known):
    header, _ = make_packed(purpose=purpose)
    with nullcontext() if is_known else pytest.raises(RecordRefusedError, match="purpose"):
        decode(encode(header), TrajectoryHeader)


@cases(
    "changes, reason",
    ({"schema_version": SCHEMA_VERSION + 1}, "newer_schema"),
    ({"payload_bytes": 1}, "checksum"),
    ({"checksum": 7}, "checksum"),
    ({"index": 2}, "index"),
    ({"index": -1}, "index"),
    ({"lease_id": "0-1"}, "id"),
    ({"lease_id": ""}, "id"),
    ({"id": "0-0-1"}, "header_mismatch"),
    ({"group_id": "1"}, "header_mismatch"),
    ({"index": 1}, "header_mismatch"),
    ({"newest_version": 3}, "header_mismatch"),
    ({"reward": 1.0}, "header_mismatch"),
    ({"is_correct": True}, "header_mismatch"),
    ({"num_tokens": 11}, "header_mismatch"),
)
def test_a_header_that_does_not_describe_its_payload_is_refused(changes, reason):
    header, payload = make_packed()
    with pytest.raises(RecordRefusedError) as caught:
        check_header(msgspec.structs.replace(header, **changes), payload)
    assert caught.value.reason == reason


def test_only_plain_values_are_encoded_and_packing_relies_on_no_shape():
    with pytest.raises(TypeError, match="only plain values and arrays"):
        encode({"odd": 1j})
    with pytest.raises(TypeError, match="arrays must be one of"):
        encode(make_trajectory(token_ids=np.arange(12, dtype=np.complex64)))
    with pytest.raises(RecordRefusedError, match="shape"):
        check_header(*make_packed(model_mask=np.ones(3, dtype=bool)))


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else(noise):
    assert reason_of(noise) == "malformed"


@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_changed_byte_never_raises_anything_but_refused(place, value):
    header, payload = make_packed()
    changed = bytearray(payload)
    changed[place % len(payload)] = value
    if bytes(changed) == payload:
        return
    with pytest.raises(RecordRefusedError, match="checksum"):
        check_header(header, bytes(changed))
    try:
        unpack(bytes(changed))
    except RecordRefusedError:
        return


def packed(index: int, size_bytes: int) -> tuple:
    return make_packed(str(index))[0], b"x" * size_bytes


def sizes(items: list) -> list[int]:
    return [len(chunk) for chunk in chunks(items)]


def test_chunks_keep_the_order_and_only_a_single_trajectory_may_exceed_their_limit():
    items = [packed(index, 10) for index in range(2 * MAX_TRAJECTORIES + 1)]
    assert [item for chunk in chunks(items) for item in chunk] == items
    assert sizes(items) == [MAX_TRAJECTORIES, MAX_TRAJECTORIES, 1]
    assert sizes([]) == []
    items = [packed(0, MAX_BYTES // 2), packed(1, MAX_BYTES // 2), packed(2, 1), packed(3, 2 * MAX_BYTES), packed(4, 1)]
    assert sizes(items) == [2, 1, 1, 1]


@pytest.mark.parametrize("changes", [{"id": "another"}, {"attempt": -1}])
def test_a_trajectory_that_is_not_named_after_its_index_is_refused(changes):
    with pytest.raises(RecordRefusedError) as caught:
        check_header(*make_packed(**changes))
    assert caught.value.reason == "id"


@pytest.mark.parametrize("group_id", ["17", "step-10-3-sampled:7"])
def test_ids_contain_their_lease_and_group(group_id):
    lease_id = make_lease_id(group_id, 2)
    trajectory_id = make_trajectory_id(lease_id, 3)
    assert trajectory_id == f"{group_id}-2-3"
    assert (lease_of(trajectory_id), group_of(lease_id)) == (lease_id, group_id)


def test_tokens_the_model_did_not_write_have_no_version():
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0], dtype=bool)
    trajectory = make_trajectory(model_mask=mask, version_spans=[VersionSpan(2, 0), VersionSpan(5, 7)])
    assert trajectory.token_versions().tolist() == [-1, -1, 0, 0, -1, -1, 7, 7, -1, -1, -1, -1]
    assert trajectory.token_versions().dtype == np.int32


@pytest.mark.parametrize(("max_lag", "num_stale"), [(0, 6), (1, 3), (3, 3), (4, 0)])
def test_only_model_written_tokens_beyond_the_bound_are_stale(max_lag, num_stale):
    mask = stale_mask(make_trajectory(version_spans=MIXED), learner_version=6, max_lag=max_lag)
    assert mask.tolist() == [False] * 6 + [i < num_stale for i in range(6)]
    assert mask.dtype == np.bool_


def test_the_histogram_counts_model_written_tokens_per_lag_and_newer_ones_as_fresh():
    assert lag(np.array([0, 3, 5]), 5).tolist() == [5, 2, 0]
    trajectories = [make_trajectory(version_spans=MIXED), make_trajectory(version_spans=[VersionSpan(6, 5)])]
    assert lag_histogram(trajectories, learner_version=6) == {1: 9, 4: 3}
    assert lag_histogram([], learner_version=6) == {}
    trajectory = make_trajectory(version_spans=[VersionSpan(6, 9)])
    assert not stale_mask(trajectory, learner_version=5, max_lag=0).any()
    assert lag_histogram([trajectory], learner_version=5) == {-4: 6}
    # A span without a model-written token, and one that starts within an observation.
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1], dtype=np.bool_)
    spans = [VersionSpan(2, 1), VersionSpan(4, 3), VersionSpan(5, 4), VersionSpan(8, 6)]
    trajectory = make_trajectory(token_ids=np.arange(9, dtype=np.int32), model_mask=mask, version_spans=spans)
    versions = trajectory.token_versions()[mask]
    lags, counts = np.unique(7 - versions, return_counts=True)
    assert lag_histogram([trajectory], learner_version=7) == dict(zip(lags.tolist(), counts.tolist(), strict=True))
