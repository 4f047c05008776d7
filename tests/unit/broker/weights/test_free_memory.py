"""What a container may have at most counts as much as what its machine has left."""

from pathlib import Path

import psutil
import pytest

from slipstream.broker.weights.shared_buckets import free_memory_bytes

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


def test_the_limit_of_a_container_counts_less_what_is_used(mount: Path):
    limit(mount, V2, allowed=100 * MIB, used=60 * MIB)
    assert free(mount, "0::/") == 40 * MIB


def test_pages_of_files_are_free_for_the_taking(mount: Path):
    limit(mount, V2, allowed=100 * MIB, used=60 * MIB, cache=10 * MIB)
    assert free(mount, "0::/") == 60 * MIB


def test_of_nested_groups_the_one_with_the_least_counts(mount: Path):
    limit(mount / "jobs", V2, allowed=50 * MIB, used=20 * MIB)
    limit(mount / "jobs" / "mine", V2, allowed="max", used=10 * MIB)
    limit(mount / "jobs" / "others", V2, allowed=MIB, used=0)
    assert free(mount, "0::/jobs/mine") == 30 * MIB


def test_the_first_version_of_cgroups_is_understood_too(mount: Path):
    limit(mount / "memory" / "docker" / "1f", V1, allowed=80 * MIB, used=70 * MIB, cache=5 * MIB)
    assert free(mount, "5:cpu,cpuacct:/docker/1f", "4:memory:/docker/1f", "0::/") == 20 * MIB


def test_a_container_that_is_told_its_path_on_the_host_has_the_limit_of_its_mount(mount: Path):
    limit(mount / "memory", V1, allowed=80 * MIB, used=70 * MIB)
    assert free(mount, "4:memory:/docker/1f") == 10 * MIB


def test_more_is_used_than_allowed_leaves_nothing(mount: Path):
    limit(mount, V2, allowed=MIB, used=2 * MIB)
    assert free(mount, "0::/") == 0


@pytest.mark.parametrize("lines", [[], ["0::/gone"], ["4:memory:/gone", "0::/"]])
def test_without_a_limit_it_is_what_the_machine_has_left(
    mount: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123 * MIB}))
    assert free(mount, *lines) == 123 * MIB
    limit(mount, V2, allowed="max", used=1)
    assert free(mount, *lines) == 123 * MIB
    assert free_memory_bytes(mount=mount, own=mount / "absent") == 123 * MIB


def test_the_limits_of_this_very_process_can_be_read():
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
