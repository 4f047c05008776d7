"""Shared buckets: one process writes, another reads; what does not fit is refused before anything is taken."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.shared_buckets import SharedBuckets, map_buckets

READER = """
import sys
from slipstream.broker.weights.shared_buckets import map_buckets
first, second = map_buckets(sys.argv[1:], sizes=[5, 0])
first[0] = 99
print(first.tolist(), second.tolist())
"""


def test_another_process_reads_what_was_written_and_cannot_change_it() -> None:
    buckets = SharedBuckets([5, 0])
    buckets.tensors[0].copy_(torch.arange(5, dtype=torch.uint8))
    told = subprocess.run(
        [sys.executable, "-c", READER, *buckets.paths], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == "[99, 1, 2, 3, 4] []"
    assert buckets.tensors[0].tolist() == [0, 1, 2, 3, 4]
    buckets.close()


def test_closed_buckets_leave_no_descriptor() -> None:
    buckets = SharedBuckets([4096])
    path = Path(buckets.paths[0])
    assert path.exists()
    buckets.close()
    assert not path.exists()
    assert buckets.sizes == []
    buckets.close()


def test_weights_beyond_the_memory_are_one_clear_error() -> None:
    with pytest.raises(WeightTransferError, match=r"must fit into this machine's memory to be verified .* available"):
        SharedBuckets([2**55])


def test_buckets_that_are_not_there_or_smaller_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    for name in ("absent", "small"):
        with pytest.raises(WeightTransferError, match="must be able to map the 1 buckets"):
            map_buckets([str(tmp_path / name)], sizes=[4])
