"""A learner killed while it writes versions leaves only complete ones. Its successor continues from them."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.broker.weights import snapshots
from slipstream.broker.weights.host_weights import HostWeights
from slipstream.broker.weights.snapshots import Manifest, SnapshotStore
from tests.unit.broker.weight_versions import make_version

ROOT = Path(__file__).parents[2]
COLUMNS = 2**17
NUM_KEPT = 3
TIMEOUT_S = 60.0
WRITER = f"""
import itertools, sys
from pathlib import Path
from slipstream.broker.weights.snapshots import SnapshotStore
from tests.unit.broker.weight_versions import make_version
store = SnapshotStore(Path(sys.argv[1]), num_kept={NUM_KEPT})
for version in itertools.count(int(sys.argv[2])):
    store.put(*make_version(version, moved=version % 1000, num_columns={COLUMNS}), with_delta=True)
    print(version, flush=True)
"""


def kill_after(folder: Path, *, first: int, num_versions: int, delay_s: float) -> None:
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(num_versions):
            assert writer.stdout.readline(), "the writer ended without the kill"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(delay_s)
        writer.kill()


@pytest.mark.slow
def test_every_version_is_complete_however_often_the_writer_is_killed(tmp_path: Path) -> None:
    folder, chance, first = tmp_path / "weights", random.Random(0), 0
    for _ in range(3):
        kill_after(folder, first=first, num_versions=2, delay_s=chance.uniform(0, 0.05))
        for version in snapshots.versions(folder)[-NUM_KEPT:]:
            update, _ = make_version(version, moved=version % 1000, num_columns=COLUMNS)
            manifest = Manifest.of(update)
            HostWeights().update_to(SnapshotStore(folder), manifest, with_deltas=False, timeout_s=TIMEOUT_S)
        newest = SnapshotStore(folder).newest()
        assert newest is not None
        assert newest >= first + 1
        first = newest + 1
    SnapshotStore(folder).put(*make_version(first, num_columns=COLUMNS), with_delta=True)
    assert list(folder.glob(".version-*")) == []
