"""Shared buckets are readable by another process, and refused before allocation if memory is short."""

import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.weights.shared_buckets import BucketMaps, SharedBuckets, free_memory_bytes, map_buckets

READER = """
import sys
from slipstream.broker.weights.shared_buckets import map_buckets
first, second = map_buckets(sys.argv[1], sizes=[5, 0])
first[0] = 99
print(first.tolist(), second.tolist())
"""


def test_another_process_reads_the_buckets_and_cannot_change_them() -> None:
    buckets = SharedBuckets([5, 0])
    buckets.tensors[0].copy_(torch.arange(5, dtype=torch.uint8))
    reader = subprocess.run(
        [sys.executable, "-c", READER, buckets.path], capture_output=True, text=True, timeout=60, check=True
    )
    assert reader.stdout.strip() == "[99, 1, 2, 3, 4] []"
    assert buckets.tensors[0].tolist() == [0, 1, 2, 3, 4]
    buckets.close()


def test_pinned_buckets_are_one_region_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0, cudaHostUnregister=lambda address: None
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    sizes = [3 << 20, 5 << 20, 100]
    allocated = SharedBuckets(sizes, is_pinned=True)
    assert [bucket.numel() for bucket in allocated.tensors] == sizes
    # A page more per bucket, not the next power of two.
    (region,) = pinned
    assert sum(sizes) <= region < sum(sizes) + len(sizes) * mmap.PAGESIZE
    allocated.close()


def test_buckets_stay_mapped_exactly_while_they_exist() -> None:
    maps, first, second = BucketMaps(), SharedBuckets([5]), SharedBuckets([5])
    mapped = [maps.get(buckets.path, sizes=[5]) for buckets in (first, second, first)]
    assert mapped[0] is mapped[2]
    first.tensors[0].fill_(3)
    assert mapped[0][0].tolist() == [3] * 5
    path = first.path
    first.close()
    # Takes the descriptor of the closed one.
    other = SharedBuckets([5])
    assert other.path == path
    assert maps.get(path, sizes=[5])[0].tolist() == [0] * 5
    other.close()
    second.close()
    with pytest.raises(WeightTransferError, match="must exist at"):
        maps.get(path, sizes=[5])


def test_dropped_buckets_leave_no_descriptor() -> None:
    path = Path(SharedBuckets([4096]).path)
    assert not path.exists()


def test_closed_buckets_leave_no_descriptor() -> None:
    buckets = SharedBuckets([4096])
    path = Path(buckets.path)
    assert path.exists()
    buckets.close()
    assert not path.exists()
    assert buckets.sizes == []
    buckets.close()


def test_weights_larger_than_the_memory_are_refused() -> None:
    with pytest.raises(WeightTransferError, match=r"must fit into memory .* available"):
        SharedBuckets([2**55])


def test_missing_or_smaller_buckets_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    for name in ("absent", "small"):
        with pytest.raises(WeightTransferError, match="must be able to map the 1 buckets of its machine"):
            map_buckets(str(tmp_path / name), sizes=[4])


MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


def limit(folder: Path, names: tuple[str, str, str], *, allowed: int | str, used: int, cache: int = 0) -> None:
    allowed_name, used_name, prefix = names
    folder.mkdir(parents=True, exist_ok=True)
    (folder / allowed_name).write_text(f"{allowed}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache}\n{prefix}active_file {cache}\n")


def free(mount: Path, *lines: str) -> int:
    own = mount.parent / "own"
    own.write_text("".join(f"{line}\n" for line in lines))
    return free_memory_bytes(mount=mount, own=own)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


ANY_GROUP = "4:memory:/docker/1f"


@pytest.mark.parametrize(
    ("lines", "free_mib", "groups"),
    [
        (["0::/"], 40, {".": (V2, 100, 60, 0)}),
        # The page cache counts as free, and usage above the limit leaves nothing.
        (["0::/"], 60, {".": (V2, 100, 60, 10)}),
        (["0::/"], 0, {".": (V2, 1, 2, 0)}),
        # The tightest of nested groups counts, and no other one.
        (["0::/jobs/mine"], 30, {"jobs": (V2, 50, 20, 0), "jobs/mine": (V2, 999, 10, 0), "jobs/others": (V2, 1, 0, 0)}),
        (["5:cpu,cpuacct:/docker/1f", ANY_GROUP, "0::/"], 20, {"memory/docker/1f": (V1, 80, 70, 5)}),
        # A path of the host falls back to the limit of the mount.
        ([ANY_GROUP], 10, {"memory": (V1, 80, 70, 0)}),
    ],
)
def test_the_free_memory_is_what_the_limits_leave(mount: Path, lines: list[str], free_mib: int, groups: dict):
    for name, (names, allowed, used, cache) in groups.items():
        limit(mount / name, names, allowed=allowed * MIB, used=used * MIB, cache=cache * MIB)
    assert free(mount, *lines) == free_mib * MIB


@pytest.mark.parametrize("lines", [[], ["0::/gone"], ["4:memory:/gone", "0::/"]])
def test_without_a_limit_the_memory_of_the_machine_counts(
    mount: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123 * MIB}))
    assert free(mount, *lines) == 123 * MIB
    limit(mount, V2, allowed="max", used=1)
    assert free(mount, *lines) == 123 * MIB
    assert free_memory_bytes(mount=mount, own=mount / "absent") == 123 * MIB


def test_the_limits_of_this_process_can_be_read():
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
