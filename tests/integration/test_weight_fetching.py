"""Generators fetch weights as deltas if possible, otherwise whole, and always end with the right version."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event

import msgspec
import pytest

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import SnapshotSource
from slipstream.broker.weights.fetcher import Fetcher
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.learner.publishing.fetches import SnapshotServer
from tests import runs
from tests.contract.test_weight_relay import NUM_BYTES, TIMEOUT_S
from tests.contract.test_weight_relay import Scene as LendingScene
from tests.fakes import KEYS
from tests.unit.broker.weight_versions import make_version


class Scene(LendingScene):
    """Generators fetch from the learner alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.snapshots = SnapshotServer(self.store, self.server)

    def publish(self, *versions: int, pinned: tuple[int, ...] = ()) -> None:
        for version in versions:
            self.snapshots.add(*self.version(version), with_delta=True, pinned=pinned)

    def join(self) -> Fetcher:
        self.fetchers.append(Fetcher(KEYS))
        return self.fetchers[-1]

    def close(self) -> None:
        super().close()
        self.snapshots.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path)) as made:
        yield made


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
    scene.has_deltas = False
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
    SnapshotStore(folder).put(*(scene.version(1) if seen == "damaged" else make_version(1, seed=5)))
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
def test_a_run_trains_without_any_broadcast(tmp_path: Path):
    folder, transport = runs.make_task(tmp_path, warm=False), "snapshot"
    overrides = (f"name={transport}", f"weights.transport={transport}", "learner.max_steps=6")
    runs.train(folder, *runs.SMALL, *overrides, timeout_s=200)
    log = (folder / "runs" / transport / "logs" / "learner.log").read_text()
    assert "epoch_opened" not in log
    lines = re.findall(r"version_fetched\s+member=generator-0 (?:role=learner )?version=(\d+)", log)
    fetched = [int(version) for version in lines]
    assert (fetched[0], fetched[-1]) == (0, 6)
    assert fetched == sorted(set(fetched))
    assert not (folder / "runs" / transport / "weights").exists()
