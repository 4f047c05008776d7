"""Generators fetch weights as deltas if possible, otherwise whole, and always end with the right version."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import SnapshotSource, Update
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.learner.publishing.fetches import SnapshotServer
from tests import runs
from tests.fakes import KEYS
from tests.unit.broker.weight_versions import make_version

TIMEOUT_S = 20.0
NUM_BYTES = 3 * 32 * 1024


class Scene:
    """A learner that serves versions, each with a hundred more changed weights, and generators that fetch them."""

    def __init__(self, folder: Path) -> None:
        self.store = SnapshotStore(folder)
        self.address = f"ipc://{folder}.sock"
        self.start()
        self.with_deltas = True
        self._fetchers: list[Fetcher] = []

    def start(self) -> None:
        self.server = StreamServer(self.store, keys=KEYS, address=self.address)
        self.snapshots = SnapshotServer(self.store, self.server)

    def publish(self, *versions: int, pinned: tuple[int, ...] = ()) -> None:
        for version in versions:
            self.snapshots.add(*make_version(version, moved=100 * version), with_delta=True, pinned=pinned)

    def join(self) -> Fetcher:
        self._fetchers.append(Fetcher(KEYS))
        return self._fetchers[-1]

    def order(self, version: int, *, folder: Path | None = None, timeout_s: float = TIMEOUT_S) -> Update:
        update, _ = make_version(version, moved=100 * version)
        source = SnapshotSource(self.address, str(folder or "/not/shared"), has_deltas=self.with_deltas)
        return msgspec.structs.replace(update, source=source, timeout_s=timeout_s)

    def fetch(self, fetcher: Fetcher, version: int, *, folder: Path | None = None) -> int:
        """Fetch a version and verify it. Returns the bytes read."""
        fetched = fetcher.fetch(self.order(version, folder=folder), cancelled=Event())
        _, packed = make_version(version, moved=100 * version)
        assert all(torch.equal(got, expected) for got, expected in zip(fetched.tensors, packed, strict=True))
        return fetcher.num_bytes

    def close(self) -> None:
        for fetcher in self._fetchers:
            fetcher.close()
        self.snapshots.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "weights")
    yield made
    made.close()


def test_a_follower_fetches_deltas_and_a_joiner_or_who_released_its_version_the_snapshot(scene: Scene) -> None:
    scene.publish(1)
    follower = scene.join()
    assert scene.fetch(follower, 1) >= NUM_BYTES
    assert scene.fetch(follower, 1) == 0, "a held version is not fetched again"
    for version in range(2, 6):
        scene.publish(version)
        assert scene.fetch(follower, version) < NUM_BYTES / 10
    assert scene.fetch(scene.join(), 5) >= NUM_BYTES
    follower.release()
    scene.publish(6)
    assert scene.fetch(follower, 6) >= NUM_BYTES
    scene.with_deltas = False
    scene.publish(7)
    assert scene.fetch(follower, 7) >= NUM_BYTES


def test_a_generator_that_missed_versions_catches_up(scene: Scene) -> None:
    scene.publish(1)
    slow = scene.join()
    scene.fetch(slow, 1)
    scene.publish(2, 3, 4, 6, 7)
    assert scene.fetch(slow, 7) < NUM_BYTES / 4


def test_a_version_being_fetched_is_kept(scene: Scene) -> None:
    scene.publish(1)
    scene.publish(*range(2, 30), pinned=(1,))
    assert scene.fetch(scene.join(), 1) >= NUM_BYTES
    scene.publish(30)
    with pytest.raises(WeightTransferError, match="in the newest version 30"):
        scene.join().fetch(scene.order(1, timeout_s=0.3), cancelled=Event())


def test_a_restarted_learner_at_the_same_address_is_followed(scene: Scene) -> None:
    scene.publish(1)
    fetcher = scene.join()
    scene.fetch(fetcher, 1)
    scene.server.close()
    scene.start()
    scene.publish(2)
    assert scene.fetch(fetcher, 2) < NUM_BYTES / 10


def test_a_cancelled_fetch_ends_soon_and_the_next_one_works(scene: Scene) -> None:
    scene.publish(1)
    fetcher = scene.join()
    nowhere = SnapshotSource("tcp://127.0.0.1:9", "/not/shared")
    unreachable = msgspec.structs.replace(scene.order(1), source=nowhere, timeout_s=600.0)
    cancelled = Event()
    with ThreadPoolExecutor(1) as thread:
        underway = thread.submit(fetcher.fetch, unreachable, cancelled=cancelled)
        assert not wait([underway], timeout=0.3).done
        cancelled.set()
        with pytest.raises(WeightTransferError, match="was cancelled"):
            underway.result(timeout=TIMEOUT_S)
    with pytest.raises(WeightTransferError, match="was cancelled"):
        fetcher.fetch(unreachable, cancelled=cancelled)
    assert scene.fetch(fetcher, 1) >= NUM_BYTES


def test_a_shared_folder_is_read_without_the_server_and_deleted_at_the_end(scene: Scene) -> None:
    scene.publish(1)
    scene.server.close()
    assert scene.fetch(scene.join(), 1, folder=scene.store.folder) >= NUM_BYTES
    scene.snapshots.close()
    assert not scene.store.folder.exists()


@pytest.mark.parametrize("seen", ["damaged", "of another run"])
def test_a_damaged_shared_folder_and_that_of_another_run_fall_back_to_the_stream(
    scene: Scene, tmp_path: Path, seen: str
) -> None:
    folder = tmp_path / "seen"
    version = make_version(1, moved=100) if seen == "damaged" else make_version(1, seed=5)
    SnapshotStore(folder).put(*version)
    if seen == "damaged":
        path = folder / "version-00000001" / "bucket-0001.bin"
        path.write_bytes(bytes(path.stat().st_size))
    scene.publish(1)
    assert scene.fetch(scene.join(), 1, folder=folder) >= NUM_BYTES


def test_a_version_that_never_appears_is_an_error_in_time(scene: Scene) -> None:
    fetcher = scene.join()
    with pytest.raises(WeightTransferError, match=r"within 0\.3 s, got no version at all"):
        fetcher.fetch(scene.order(1, timeout_s=0.3), cancelled=Event())
    scene.publish(1)
    with pytest.raises(WeightTransferError, match=r"in the newest version 1; nothing was loaded"):
        fetcher.fetch(scene.order(2, timeout_s=0.3), cancelled=Event())
    scene.publish(2)
    assert scene.fetch(fetcher, 2) >= NUM_BYTES


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["snapshot", "delta"])
def test_a_run_trains_without_any_broadcast(tmp_path: Path, transport: str):
    folder = runs.make_task(tmp_path, warm=False)
    overrides = (f"name={transport}", f"weights.transport={transport}", "learner.max_steps=6")
    runs.train(folder, *runs.SMALL, *overrides, timeout_s=200)
    log = (folder / "runs" / transport / "logs" / "learner.log").read_text()
    assert "epoch_opened" not in log
    lines = re.findall(r"version_fetched\s+member=generator-0 (?:role=learner )?version=(\d+)", log)
    fetched = [int(version) for version in lines]
    assert (fetched[0], fetched[-1]) == (0, 6)
    assert fetched == sorted(set(fetched))
    assert not (folder / "runs" / transport / "weights").exists()
