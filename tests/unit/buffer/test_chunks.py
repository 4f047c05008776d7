"""Trajectories are cut into lists that are worth a message and not too long to wait for."""

from slipstream.buffer.codec import MAX_BYTES, MAX_TRAJECTORIES, chunks
from tests.builders import make_packed


def packed(index: int, size_bytes: int) -> tuple:
    return make_packed(str(index))[0], b"x" * size_bytes


def sizes(items: list) -> list[int]:
    return [len(chunk) for chunk in chunks(items)]


def test_nothing_makes_no_chunk():
    assert sizes([]) == []


def test_order_is_kept_and_nothing_is_left_out():
    items = [packed(index, 10) for index in range(2 * MAX_TRAJECTORIES + 1)]
    assert [item for chunk in chunks(items) for item in chunk] == items
    assert sizes(items) == [MAX_TRAJECTORIES, MAX_TRAJECTORIES, 1]


def test_a_chunk_is_never_larger_than_allowed_but_for_a_single_trajectory():
    items = [packed(0, MAX_BYTES // 2), packed(1, MAX_BYTES // 2), packed(2, 1), packed(3, 2 * MAX_BYTES), packed(4, 1)]
    assert sizes(items) == [2, 1, 1, 1]
