import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.buffer import object_folder
from slipstream.buffer.durable_files import CHECKSUMS, find_damage, write_durably
from slipstream.buffer.errors import StorageError
from slipstream.buffer.object_folder import ObjectFolder, StorageWait
from slipstream.learner.background_save import BackgroundSaver, delete_folder
from tests.runs import until

TRACED = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink")


class Alone:
    """A rank whose collectives return its own values. `words`: the values that ranks have posted."""

    def __init__(self, rank: int, *, size: int = 2, words: dict[tuple[str, int], str] | None = None) -> None:
        self.rank, self.size, self.is_first = rank, size, rank == 0
        self.words = {} if words is None else words

    def max(self, values):
        return values

    def post(self, subject, word):
        self.words[subject, self.rank] = word

    def posted(self, subject, *, rank):
        return self.words.get((subject, rank), "")


def make_saver(
    folder: Path, rank: int, *, size: int = 2, words: dict | None = None, storage: ObjectFolder | None = None
) -> BackgroundSaver:
    everyone = list(range(size))
    sharers, leaders = ([rank], everyone) if storage else (everyone, [0])
    sharing = SimpleNamespace(sharers=sharers, leaders=leaders, is_leader=sharers[0] == rank)
    ranks = Alone(rank, size=size, words=words)
    return BackgroundSaver(folder, ranks=ranks, folders=sharing, in_background=True, storage=storage)


def start(saver: BackgroundSaver, number: int, *, finish=lambda: None) -> None:
    rank = saver._ranks.rank
    writes = {f"rank-{rank}": partial(Path.write_text, data=f"{number} of {rank}")}
    if rank == 0:
        writes["model/weights"] = partial(Path.write_text, data=str(number))
    saver.start(writes, name=f"step-{number}", finish=finish)


def save(folder: Path, number: int) -> None:
    """Save like the ranks of a learner: own files, a pointer once all are durable, then delete old checkpoints."""

    def finish() -> None:
        write_durably(folder / "pointer", f"step-{number}".encode())
        for old in folder.glob("step-*"):
            if old.name != f"step-{number}":
                delete_folder(old)

    savers = [make_saver(folder, rank) for rank in (0, 1)]
    for saver in savers:
        start(saver, number, finish=finish)
    for saver in savers:
        saver.flush()


def assert_whole(folder: Path) -> str:
    """Check that every checkpoint is complete and the pointer's target exists. Returns its name."""
    checkpoints = sorted(folder.glob("step-*"))
    assert [find_damage(each) for each in checkpoints] == [""] * len(checkpoints)
    for each in checkpoints:
        number = each.name.removeprefix("step-")
        assert [(each / f"rank-{rank}").read_text() for rank in (0, 1)] == [f"{number} of 0", f"{number} of 1"]
        assert (each / "model" / "weights").read_text() == number
    pointer = (folder / "pointer").read_text()
    assert pointer in {each.name for each in checkpoints}
    return pointer


def test_all_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_pointer(tmp_path, monkeypatch):
    done: list[tuple] = []

    def record(name: str, note: Callable[..., tuple]) -> None:
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments: (done.append(note(*arguments)), call(*arguments))[1])

    inode = lambda path: Path(path).stat().st_ino  # noqa: E731
    record("fsync", lambda descriptor: ("sync", os.fstat(descriptor).st_ino))
    for name in ("rename", "replace"):
        record(name, lambda source, target: (inode(source), inode(Path(target).parent)))
    save(tmp_path, 1)
    assert assert_whole(tmp_path) == "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pointer", "step-1"]

    named_at = done.index((inode(tmp_path / "step-1"), inode(tmp_path)))
    for path in (tmp_path / "step-1", *(tmp_path / "step-1").rglob("*")):
        syncs = [at for at, each in enumerate(done) if each == ("sync", inode(path))]
        entries = [at for at, (moved, folder) in enumerate(done) if moved != "sync" and folder == inode(path)]
        assert any(max(entries, default=-1) < at < named_at for at in syncs), path
    pointed_at = done.index((inode(tmp_path / "pointer"), inode(tmp_path)))
    assert any(named_at < at < pointed_at for at, each in enumerate(done) if each == ("sync", inode(tmp_path)))


def kill_at(count: int) -> None:
    """Kill this process instead of its `count`-th change of the file system."""
    left = [count]
    lock = threading.Lock()
    sync = os.fsync

    def traced(call):
        def replaced(*arguments, **options):
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return None if call is sync else call(*arguments, **options)

        return replaced

    for name in TRACED:
        setattr(os, name, traced(getattr(os, name)))


def test_a_process_killed_anywhere_in_a_save_leaves_whole_checkpoints(tmp_path):
    save(tmp_path, 1)
    found = []
    for count in range(100):
        number = len(found) + 2
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                save(tmp_path, number)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(assert_whole(tmp_path))
        if not os.WIFSIGNALED(status):
            break
    assert os.WIFEXITED(status), "every point was reached"
    assert found[0] == "step-1"
    assert found[-1] == f"step-{len(found) + 1}"
    assert len(found) > 15
    # Killed after the pointer moved and before the old checkpoint was deleted.
    assert found[-2] == f"step-{len(found)}"


def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path):
    saver = make_saver(tmp_path, 0, size=1)

    def fail(part: Path) -> None:
        raise PermissionError

    saver.start({"state": fail}, name="step-1", finish=lambda: None)
    until(saver._in_flight.done, what="the end of the save")
    for call in (saver.raise_error, saver.flush):
        with pytest.raises(PermissionError):
            call()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_rank_0_says_whose_files_it_waits_for(tmp_path):
    first, second = (make_saver(tmp_path, rank) for rank in (0, 1))
    start(first, 1)
    await_rank_1(first)
    assert not (tmp_path / "step-1").exists()
    start(second, 1)
    first.flush()
    assert first.reason == ""
    assert (tmp_path / "step-1").is_dir()


class Held(StorageWait):
    def __init__(self) -> None:
        super().__init__(0)
        self.let_go = threading.Event()

    def repeat(self, what, call):
        assert self.let_go.wait(timeout=20)
        return super().repeat(what, call)


def await_rank_1(first: BackgroundSaver) -> None:
    until(lambda: "checkpoint files of rank-1" in first.reason, what="the wait for rank 1")


def test_a_checkpoint_of_two_machines_counts_once_both_have_written_and_sent_their_files(tmp_path):
    storage, held = ObjectFolder(f"file://{tmp_path}/remote", StorageWait(0)), Held()
    storages, words = (storage, ObjectFolder(storage.uri, held)), {}
    places = [each.child("checkpoints") for each in storages]
    first, second = (make_saver(tmp_path / str(n), n, words=words, storage=place) for n, place in enumerate(places))
    finished: list[list[str]] = []
    start(first, 1, finish=lambda: finished.append(storage.child("checkpoints").names()))
    await_rank_1(first)
    assert not (tmp_path / "0" / "step-1").exists()
    start(second, 1)
    until((tmp_path / "0" / "step-1").exists, what="the checkpoint")
    await_rank_1(first)
    assert finished == storage.child("checkpoints").names() == []
    held.let_go.set()
    for saver in (first, second):
        saver.flush()
    assert finished == [["step-1"]], "the object store has all files when the pointer moves"
    for rank in (0, 1):
        assert find_damage(tmp_path / str(rank) / "step-1") == ""
        assert (tmp_path / str(rank) / "step-1" / f"rank-{rank}").read_text() == f"1 of {rank}"
    storage.child("checkpoints/step-1").download(tmp_path / "elsewhere")
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [CHECKSUMS, "model", "rank-0", "rank-1"]
    assert [*tmp_path.glob("*/draft*")] == []


def test_a_dead_object_store_ends_the_save_before_its_pointer_moves_and_leaves_it_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(object_folder, "_FIRST_DELAY_S", 0.05)
    (tmp_path / "remote").write_text("no folder")
    storage = ObjectFolder(f"file://{tmp_path}/remote", StorageWait(0.3))
    saver = make_saver(tmp_path / "0", 0, size=1, storage=storage)
    finished: list[bool] = []
    start(saver, 1, finish=lambda: finished.append(True))
    ends_at = time.monotonic() + 10
    while f"s of 0.3 s for file://{tmp_path}/remote/step-1" not in saver.storage_reason:
        assert time.monotonic() < ends_at
        time.sleep(0.005)
    with pytest.raises(StorageError, match=f"file://{tmp_path}/remote/step-1.* must be reachable in storage.uri"):
        saver.flush()
    assert finished == []
    assert find_damage(tmp_path / "0" / "step-1") == ""
